"""What a request must be to enter the queue. Everything else is a `RequestError` with numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from tokenizers import Tokenizer

from pw.config import EngineConfig
from pw.engine.build import Parts
from pw.engine.detokenizer import Decoder, Detokenizer, byte_tokens
from pw.engine.request import SamplingParams
from pw.engine.sampling import make_generator
from pw.engine.sequence import Sequence
from pw.errors import ModelError, RequestError


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
        self._device = parts.skeleton.device
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
        ends = len(self._eos.union(params.stop_token_ids))
        if params.min_tokens > 0 and ends >= self._speakable:
            raise RequestError(
                f"min_tokens is {params.min_tokens} but every token ends the text",
                param="stop_token_ids",
            )
        return Sequence(
            request_id,
            tokens,
            params,
            self._max_tokens(len(tokens), params),
            Detokenizer(
                Decoder(self._tokenizer, self._byte_tokens, params.skip_special_tokens),
                params.stop,
                params.include_stop_str_in_output,
            ),
            make_generator(params, self._device, self._next_seed()),
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

    def _max_tokens(self, prompt: int, params: SamplingParams) -> int:
        """Tokens to generate at most, so that prompt and output fit alone at the least widths."""
        wanted = self._limit - prompt if params.max_tokens is None else params.max_tokens
        if prompt + wanted <= self._limit and (wanted > 0 or params.max_tokens == 0):
            return wanted
        wanted = max(wanted, 1)
        limit = f"this model's maximum context length is {self._limit} tokens"
        if self._limit < self._stated:
            limit += f" within the memory budget (the model states {self._stated})"
        raise RequestError(
            f"{limit}, but {prompt + wanted} are asked for: {prompt} in the prompt and "
            f"{wanted} to generate",
            code="context_length_exceeded",
            param="max_tokens" if prompt < self._limit else "prompt",
        )
