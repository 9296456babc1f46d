"""One running or waiting sequence, and the part of it that a step computes."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pw.engine.detokenizer import Detokenizer
from pw.engine.precision.statistics import PromptStatistics
from pw.engine.request import SamplingParams, TokenLogprob
from pw.engine.sampling.draw import Chance
from pw.engine.sampling.grammar import GrammarState
from pw.engine.sampling.token_counts import TokenCounts
from pw.memory.kv_cache import KvSequence
from pw.memory.prefix_cache import PrefixChain


@dataclass(eq=False)
class Sequence:
    """State of one request inside the engine. `kv` is None while it waits."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int  # tokens to generate at most
    detokenizer: Detokenizer
    chance: Chance | None  # None: the likeliest token
    output: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose KV is in the cache
    kv: KvSequence | None = None
    chain: PrefixChain | None = None  # digests of its tokens, for the prefix cache
    reused: int = 0  # tokens found in the prefix cache when it was last let in
    cached_tokens: int | None = None  # ... when it was first let in
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)  # not yet given out
    counts: TokenCounts | None = None  # of its tokens, once a penalty asks for them
    grammar: GrammarState | None = None  # of its parameters, once compiled
    seen: int = 0  # tokens of the prompt computed at least once
    arrived: float = field(default_factory=time.monotonic)  # seconds
    started: float | None = None  # ... when its first chunk was scheduled
    told: bool = False  # an output has been given out
    statistics: PromptStatistics | None = None  # while its prompt is prefilled
    eta: NDArray[np.float64] | None = None  # [L, E, 2] once it has been

    @property
    def length(self) -> int:
        """Tokens so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def longest(self) -> int:
        """Tokens at most in the cache: the last sampled token is never computed."""
        return len(self.prompt) + max(self.max_tokens - 1, 0)

    @property
    def remaining(self) -> int:
        """Tokens it may still generate."""
        return self.max_tokens - len(self.output)

    def see(self, end: int, scored: list[TokenLogprob]) -> int:
        """Tokens up to `end` have been computed, and the log-probabilities that came out of it.

        Returns:
            Prompt tokens among them that had never been computed before.
        """
        places = len(self.prompt)
        new = min(end, places) - self.seen
        if new <= 0:
            return 0
        if self.params.prompt_logprobs is not None:
            given = min(self.seen + 1, places) if self.seen else 0
            count = min(self.seen + new + 1, places) - given
            self.prompt_logprobs += [*[None] * (count - len(scored)), *scored]
        self.seen += new
        return new

    @property
    def kv_row(self) -> int:
        """Row in the block tables of a running sequence."""
        assert self.kv is not None
        return self.kv.row

    def tokens(self, start: int, end: int) -> Seq[int]:
        """Token ids start..end-1 of prompt and output together."""
        split = len(self.prompt)
        if start >= split:
            return self.output[start - split : end - split]
        return self.prompt[start:end] + self.output[: max(0, end - split)]


@dataclass(frozen=True)
class Chunk:
    """Tokens start..start+count-1 of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int
    ahead: bool = False  # its one token has been drawn on the device and was not read before

    @property
    def is_prompt(self) -> bool:
        """Whether prompt tokens are in it (not one decoded token after another)."""
        return self.start < len(self.sequence.prompt)

    @property
    def lives(self) -> bool:
        """Whether its sequence still runs."""
        return self.sequence.kv is not None

    @property
    def samples(self) -> bool:
        """Whether the sequence's next token comes out of this step."""
        return self.ahead or self.start + self.count == self.sequence.length

    def scored_targets(self) -> range:
        """Prompt tokens whose log-probabilities are wanted and come out of this chunk."""
        prompt, params = self.sequence.prompt, self.sequence.params
        if params.prompt_logprobs is None:
            return range(0)
        # A preempted sequence computes its prompt again: what has been scored stays.
        first = max(self.start, params.prompt_logprobs_start - 1, self.sequence.seen)
        return range(first + 1, min(self.start + self.count, len(prompt) - 1) + 1)

    def token_ids(self) -> Seq[int]:
        """The token ids to compute."""
        return self.sequence.tokens(self.start, self.start + self.count)
