"""An engine without a model for tests of scoring: every token has a fixed log-probability."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pw.engine.request import (
    BytesByClass,
    EngineStatus,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from pw.errors import RequestError

VOCABULARY = 128


class CharTokenizer:
    """A token for each character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def render_chat(self, messages: Sequence[Any], *, add_generation_prompt: bool = True) -> str:
        turns = [f"<{message['role'][0]}>{message['content']}" for message in messages]
        return "".join([*turns, "<a>\n"])


class UnigramEngine:
    """Gives token t the log-probability of `logits`; finishes one prompt a step, newest first.

    Args:
        logits: [V]; default: a tenth of minus the token, not normalised.
        bits: Of every block while step n runs; the last one stays. None: unquantized.
        fail_on: Id of a request whose outputs say so.
        max_model_len: Longer prompts are refused.
        answers: Text that is written behind prompts that end in the key.
    """

    def __init__(
        self,
        logits: Tensor | None = None,
        *,
        policy: str = "static:4",
        bits: Sequence[int] | None = (4,),
        fail_on: str = "",
        max_model_len: int = 1000,
        answers: dict[str, str] | None = None,
    ) -> None:
        self.logits = logits
        self.policy, self.fail_on, self.max_model_len = policy, fail_on, max_model_len
        self.answers = answers or {}
        self.queue: deque[tuple[str, list[int], SamplingParams]] = deque()
        self.most_in_flight = self.steps = self.maps = 0
        self.closed = False
        self._widths = bits
        self._observer: Any = None

    def logprob(self, token: int) -> float:
        if self.logits is None:
            return -(token + 1) / 10
        return float(self.logits.double().log_softmax(-1)[token])

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        if len(prompt) > self.max_model_len:
            raise RequestError(f"{len(prompt)} tokens are more than {self.max_model_len}")
        self.queue.append((request_id, prompt, params))
        self.most_in_flight = max(self.most_in_flight, len(self.queue))

    def step(self) -> list[RequestOutput]:
        request_id, prompt, params = self.queue[-1]
        if self._observer is not None and self.logits is not None:
            rows = self.logits.expand(len(prompt) - 1, -1)
            half = len(rows) // 2  # in pieces, as the engine does it
            self._observer(request_id, 1, rows[:half])
            self._observer(request_id, half + 1, rows[half:])
        elif self._observer is not None:
            self._observer(request_id, 1, torch.empty(0, 1))
        self.queue.pop()
        self.steps += 1
        if request_id == self.fail_on:
            return [RequestOutput(request_id, finish_reason="error", error="non-finite logits")]
        if params.prompt_logprobs is None:
            text = "".join(map(chr, prompt))
            written = next((a for end, a in self.answers.items() if text.endswith(end)), "")
            return [RequestOutput(request_id, text=written, finish_reason="stop")]
        best = max(map(self.logprob, range(VOCABULARY)))
        top = ((0, best),) if params.prompt_logprobs else ()
        scored = [TokenLogprob(token, self.logprob(token), top) for token in prompt[1:]]
        return [
            RequestOutput(
                request_id,
                prompt_logprobs=(None, *scored),
                finish_reason="length",
                mean_bits=float(self.width),
            )
        ]

    @property
    def width(self) -> int:
        if self._widths is None:
            return 16
        return self._widths[min(self.steps, len(self._widths) - 1)]

    def status(self) -> EngineStatus:
        weights = self.width * 1000
        held = {"experts_dense": weights} if self._widths is None else {"planes": weights}
        return EngineStatus(
            step=self.steps,
            policy=self.policy,
            running=len(self.queue),
            preemptions=3,
            transitions=self.steps,
            mean_bits=float(self.width),
            blocks_by_bits={} if self._widths is None else {self.width: 4},
            bytes=BytesByClass(**held, kv=100 * len(self.queue), free=5000, budget=99_999),
        )

    def precision_map(self) -> dict[str, Any]:
        self.maps += 1
        return {"layers": [{"layer": 3, "gate_up": [self.width, 2], "down": [self.width, 2]}]}

    def observe_prompt_logits(self, observer: Any) -> None:
        self._observer = observer

    def close(self) -> None:
        self.closed = True
