"""A small engine and a word tokenizer, with no model and no transformers behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from pw.engine.request import (
    BytesByClass,
    EngineStatus,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from pw.errors import RequestError

STORY = ["The", "🦊", "jumps", "over\nthe", "lazy", "dog,", "naïve"]
STORY += ["as", "ever;", "then", "it", "sleeps", "."]


class FakeEngine:
    """Tells STORY word by word, from the word that the seed names; a word is a token.

    Prompt tokens choose the misbehaviour, see the class attributes.
    """

    REFUSE, BREAK, RAISE, ABORT, MUTE, DIE, UNABLE = 900, 901, 902, 903, 904, 905, 906
    HOLD = 907  # says three words, then nothing more until it is aborted

    def __init__(self, step_seconds: float = 0.0, max_model_len: int = 4096) -> None:
        self.step_seconds = step_seconds
        self.max_model_len = max_model_len
        self.alive = True
        self.failed = False
        self.failure: str | None = None
        self.calls: dict[str, tuple[list[int], SamplingParams]] = {}
        self.aborted: list[str] = []
        self.running = 0
        self.tokens = 0
        self.step = 0
        self.stopped = False
        self.policy = "static:4"
        self.allowed: int | None = None  # tokens that may be made so far; None: any number
        self.script: list[str] = []  # said instead of STORY, piece by piece; token i is piece i

    async def precision_map(self) -> dict[str, Any]:
        return {"layers": [{"layer": 0, "gate_up": [4, 4], "down": [4, 3], "mass": [0.75, 0.25]}]}

    async def set_policy(self, policy: str) -> None:
        if not policy.startswith("static:"):
            raise RequestError(f"policy cannot be taken now: `{policy}`", param="policy")
        self.policy = policy

    def start(self) -> None:
        self.stopped = False

    async def shutdown(self, drain_seconds: float) -> None:
        self.stopped = True

    def healthy(self) -> bool:
        return self.alive

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        self.calls[request_id] = (prompt_token_ids, params)
        if any(token >= 1000 for token, _ in params.logit_bias):
            raise RequestError("logit_bias has an id outside the vocabulary", param="logit_bias")
        if params.min_bits is not None and params.min_bits > 8:
            raise RequestError("min_bits must be at most 8 on this server", param="min_bits")
        if self.REFUSE in prompt_token_ids:
            raise RequestError("needs 9 pages of 8", code="context_length_exceeded")
        self.running += 1
        try:
            async for output in self._words(request_id, prompt_token_ids, params):
                yield output
        finally:
            self.running -= 1

    async def _words(
        self, request_id: str, prompt: list[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        limit = params.max_tokens if params.max_tokens is not None else self.max_model_len
        start = params.seed or 0
        done = 0
        says = self.script or [word + " " for word in STORY]
        if params.prompt_logprobs is not None:
            for output in self._prompt_logprobs(request_id, prompt, params.prompt_logprobs):
                yield output
        while True:
            silent = self.MUTE in prompt or (self.HOLD in prompt and done == 3)
            await asyncio.sleep(3600 if silent else self.step_seconds)
            while self.allowed is not None and self.tokens >= self.allowed:
                await asyncio.sleep(0.005)
            if done == 3 and self.UNABLE in prompt:
                code = "precision_unavailable"
                yield RequestOutput(request_id, finish_reason="error", error="no", error_code=code)
            if done == 3 and self.BREAK in prompt:
                yield RequestOutput(request_id, finish_reason="error", error="a kernel failed")
            if done == 3 and self.DIE in prompt:
                self.failed, self.alive = True, False
                yield RequestOutput(request_id, finish_reason="error", error="the engine failed")
            if done == 3 and self.RAISE in prompt:
                raise ZeroDivisionError("secret detail")
            if done == 3 and self.ABORT in prompt:
                yield RequestOutput(request_id, finish_reason="abort")
            last = done + 1 >= min(limit, len(says))
            token = (start + done) % len(says)
            new = min(1, limit)
            done += new
            self.tokens += new
            yield RequestOutput(
                request_id,
                text=says[token] * new,
                token_ids=(token,) * new,
                logprobs=self._logprobs(token, params)[:new],
                finish_reason=("length" if done == limit else "stop") if last else None,
                prompt_tokens=len(prompt),
                completion_tokens=done,
                cached_tokens=len(prompt) // 2,
                mean_bits=5.5,
                min_bits=4 if done == 2 else 5,
            )
            if last:
                return

    @staticmethod
    def _prompt_logprobs(request_id: str, prompt: list[int], k: int) -> Iterator[RequestOutput]:
        """As prefill comes in chunks, two entries to an output."""
        entries: list[TokenLogprob | None] = [None]
        for token in prompt[1:]:
            top = tuple((token + i, -1.5 - i) for i in range(k))
            entries.append(TokenLogprob(token, -1.5, top))
        for at in range(0, len(entries), 2):
            yield RequestOutput(
                request_id,
                prompt_logprobs=tuple(entries[at : at + 2]),
                prompt_tokens=len(prompt),
                mean_bits=5.5,
                min_bits=5,
            )

    @staticmethod
    def _logprobs(token: int, params: SamplingParams) -> tuple[TokenLogprob, ...]:
        if params.logprobs is None:
            return ()
        top = tuple(
            (token + i, -0.25 * i if i < 2 else -float("inf")) for i in range(params.logprobs)
        )
        return (TokenLogprob(token, 0.0, top),)

    def status(self) -> EngineStatus:
        return EngineStatus(
            step=self.step,
            policy=self.policy,
            running=self.running,
            generation_tokens=self.tokens,
            max_model_len=self.max_model_len,
            page_bytes=4096,
            pages_total=100,
            pages_weights=60,
            pages_kv=10,
            pages_free=30,
            mean_bits=5.5,
            layer_bits={0: 5.0, 1: 6.0},
            blocks_by_bits={5: 16, 6: 16},
            bytes_released=8192,
            plans=3,
            plans_by_trigger={"kv allocation": 2, "rebalance": 1},
            plan_runs=5,
            plan_seconds_total=0.25,
            moves=4,
            move_seconds_total=0.5,
            prefix_cache_queries=20,
            prefix_cache_hits=5,
            nonfinite=1,
            experts_never_routed=2,
            steps_by_tokens={8: 1, 1: 2},
            step_tokens=9,
            plan_history=({"reason": "kv allocation", "moves": 4, "pages": 16, "damage": 0.125},),
            bytes=BytesByClass(
                planes=200_000, luts=40_000, kv=40_960, free=122_880, budget=500_000
            ),
        )


class WordTokenizer:
    """A number is its own id, any other word of STORY its place, everything else id 500."""

    vocab_size = 1000
    bos_token_id: int | None = None
    has_chat_template = True
    chat_template = "{{ messages }} {{ tools }} <tool_call>"
    longest_token = 10_000

    def is_special(self, text: str) -> bool:
        return False

    def info(self) -> dict[str, Any]:
        return {"eos_token": ".", "vocab_size": self.vocab_size}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self._id(word) for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.spelling(token) + " " for token in ids)

    def spelling(self, token_id: int) -> str:
        return STORY[token_id] if token_id < len(STORY) else str(token_id)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        if messages[0]["role"] == "system":
            raise RequestError("System role not supported", param="messages")
        return " ".join(message["content"] for message in messages)

    @staticmethod
    def _id(word: str) -> int:
        return int(word) % 1000 if word.isdigit() else STORY.index(word) if word in STORY else 500
