"""What a request must be to enter the queue. Everything else is a `RequestError` with numbers."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence as Seq

from tokenizers import Tokenizer

from pw.config import EngineConfig
from pw.engine.detokenizer import Decoder, Detokenizer, byte_tokens
from pw.engine.precision.policies import FixedPrecision
from pw.engine.request import SamplingParams
from pw.engine.sampling.draw import make_chance
from pw.engine.sequence import Sequence
from pw.engine.start.build import Parts
from pw.errors import ModelError, RequestError
from pw.memory.page_table import WeightPageTable


class Admission:
    """Turns requests into sequences, or refuses them."""

    def __init__(self, parts: Parts, config: EngineConfig) -> None:
        tokenizer = getattr(parts.tokenizer.inner, "backend_tokenizer", None)
        if tokenizer is None:
            raise ModelError("the model's tokenizer has no fast form (tokenizer.json)")
        self._tokenizer: Tokenizer = tokenizer
        self._byte_tokens = byte_tokens(self._tokenizer)
        self._eos = frozenset(parts.tokenizer.eos_token_ids)
        self._speakable = min(parts.tokenizer.vocab_size, parts.skeleton.vocab_size)
        self._limit = parts.memory.max_model_len
        self._stated = parts.stated_model_len
        self._vocabulary = parts.skeleton.vocab_size
        self._parts = parts
        self._limits: dict[int, int] = {}  # by min_bits
        self._max_queued = config.max_num_queued_reqs
        self._seeds = None if config.seed is None else random.Random(config.seed)

    def admit(
        self, request_id: str, prompt: Seq[int], params: SamplingParams, waiting: int
    ) -> Sequence:
        """A new sequence for a request.

        Raises:
            RequestError: See the class.
        """
        if waiting >= self._max_queued:
            raise RequestError(
                f"the queue is full: {waiting} requests wait",
                code="server_overloaded",
                status=503,
            )
        tokens = [int(token) for token in prompt]
        if not tokens:
            raise RequestError("the prompt is empty", param="prompt")
        self._check_vocabulary(tokens, "prompt")
        self._check_vocabulary(params.stop_token_ids, "stop_token_ids")
        self._check_vocabulary([token for token, _ in params.logit_bias], "logit_bias")
        ends = len(self._eos.union(params.stop_token_ids))
        if params.min_tokens > 0 and ends >= self._speakable:
            raise RequestError(
                f"min_tokens is {params.min_tokens} but every token ends the text",
                param="stop_token_ids",
            )
        limit = self._limit_at(params.min_bits)
        return Sequence(
            request_id,
            tokens,
            params,
            self._max_tokens(len(tokens), params, limit),
            Detokenizer(
                Decoder(self._tokenizer, self._byte_tokens, params.skip_special_tokens),
                params.stop,
                params.include_stop_str_in_output,
            ),
            make_chance(params, self._next_seed()),
        )

    def _check_vocabulary(self, tokens: Seq[int], param: str) -> None:
        for token in tokens:
            if not 0 <= token < self._vocabulary:
                raise RequestError(
                    f"token id is outside the vocabulary of {self._vocabulary}: {token}",
                    param=param,
                )

    def _next_seed(self) -> int | None:
        """A seed of its own for each request of an engine that has a seed."""
        return None if self._seeds is None else self._seeds.getrandbits(63)

    def _limit_at(self, min_bits: int | None) -> int:
        """Tokens of the longest sequence that fits alone where no block is below `min_bits`.

        Raises:
            RequestError: The policy or the budget does not have these bits.
        """
        table = self._parts.table
        if min_bits is None or table is None:
            return self._limit
        fixed = isinstance(self._parts.precision, FixedPrecision)
        most = int(table.committed.min()) if fixed else self._parts.precision.most_bits
        if min_bits > most:
            raise RequestError(
                f"min_bits must be at most {most} on this server: {min_bits}", param="min_bits"
            )
        if fixed:
            return self._limit
        if min_bits not in self._limits:
            self._limits[min_bits] = self._find_limit(table, max(min_bits, table.min_bits))
        return self._limits[min_bits]

    def _find_limit(self, table: WeightPageTable, least: int) -> int:
        weights = int(table.cost_bytes()[:, least - table.min_bits].sum())
        pages, page_bytes = self._parts.pool.num_pages, self._parts.arena.page_bytes
        left = pages - weights // page_bytes
        limit = bisect.bisect_right(
            range(1, self._limit + 1), left, key=self._parts.kv.pages_for_tokens
        )
        if limit < 2:
            raise RequestError(
                f"min_bits {least} needs {weights:,} bytes for weights and leaves no room for "
                f"a request in the {pages * page_bytes:,} bytes that weights and KV share",
                param="min_bits",
                hint="ask for less, or serve with a larger --memory-budget",
            )
        return limit

    def _max_tokens(self, prompt: int, params: SamplingParams, most: int) -> int:
        """Tokens to generate at most, so that prompt and output fit alone.

        Args:
            prompt: Tokens of the prompt.
            params: Of the request.
            most: Tokens that fit.
        """
        wanted = most - prompt if params.max_tokens is None else params.max_tokens
        if prompt + wanted <= most and (wanted > 0 or params.max_tokens == 0):
            return wanted
        wanted = max(wanted, 1)
        limit = f"this model's maximum context length is {most} tokens"
        if most < self._limit:
            limit += f" at {params.min_bits} bits ({self._limit} without min_bits)"
        elif self._limit < self._stated:
            limit += f" within the memory budget (the model states {self._stated})"
        raise RequestError(
            f"{limit}, but {prompt + wanted} are asked for: {prompt} in the prompt and "
            f"{wanted} to generate",
            code="context_length_exceeded",
            param="max_tokens" if prompt < most else "prompt",
        )
