"""How long the prompts of a squeeze are: past the free pages, within what planes can give up."""

from __future__ import annotations

import bisect
import math
from collections import Counter

from pw.engine import Engine
from pw.engine.request import EngineStatus
from pw.errors import ConfigError
from pw.evaluation.bench.squeeze_settings import PROBE, Squeeze

_PROMPT_STEPS = 64  # that the long prompts may take: the probes grow meanwhile


class LongPrompts:
    """Their lengths, from what an engine at rest has free and its planes can give up.

    Args:
        engine: An engine whose policy is adaptive.
        squeeze: The settings.
        start: The engine's status at rest, at the widest widths.
    """

    def __init__(self, engine: Engine, squeeze: Squeeze, start: EngineStatus) -> None:
        self._engine, self._squeeze, self._start = engine, squeeze, start

    def lengths(self) -> list[int]:
        """Lengths of prompts whose KV together is `load` times the room beside the experts.

        Raises:
            ConfigError: None may run, or with the probes they fit beside the widest experts.
        """
        squeeze = self._squeeze
        lengths = self._beside(squeeze.probes)
        if self._presses(squeeze.probes, lengths):
            return lengths
        probes = f"{squeeze.probes} probes of {PROBE + squeeze.steady_steps} tokens"
        prompts = " and ".join(f"{n} x {length}" for length, n in Counter(lengths).items())
        raise ConfigError(
            f"{probes} and long prompts of {prompts} tokens fit beside the widest experts"
            if lengths
            else f"no long prompt may run beside {probes}",
            self._what_helps(lengths),
        )

    def _what_helps(self, lengths: list[int]) -> str:
        """The hint where prompts of these lengths are too short."""
        squeeze = self._squeeze
        for probes in range(squeeze.probes - 1, 0, -1):
            if self._presses(probes, self._beside(probes)):
                return f"lower --probes to {probes}: more leave too little room for long prompts"
        if sum(map(self._long_pages, lengths)) >= squeeze.load * self._start.pages_free:
            return f"raise --load above 1: {squeeze.load:g} times the free pages is too little"
        if len(lengths) >= squeeze.max_long:
            return "lower --memory-budget, or raise --max-num-seqs and --max-model-len"
        return "lower --memory-budget or --min-bits: the experts give up too few pages"

    def _presses(self, probes: int, lengths: list[int]) -> bool:
        """Whether so many probes and these long requests want more than the free pages."""
        held = probes * self._probe_pages(self._squeeze.steady_steps)
        together = held + sum(map(self._long_pages, lengths))
        return bool(lengths) and together > self._start.pages_free

    def _beside(self, probes: int) -> list[int]:
        """Lengths of long prompts beside so many probes."""
        status, squeeze = self._start, self._squeeze
        most = self._engine.max_model_len - squeeze.output_len
        most_long = squeeze.max_long + squeeze.probes - probes  # as many may run as before
        wanted, room = squeeze.load * status.pages_free, self._room_at_most(probes)
        lengths: list[int] = []
        while wanted > 0 and len(lengths) < most_long:
            length = most
            while length > 16 and self._long_pages(length // 2) >= wanted:
                length //= 2
            length = bisect.bisect_right(range(1, length + 1), room, key=self._long_pages)
            if length == 0:
                break
            lengths.append(length)
            wanted -= self._long_pages(length)
            room -= self._long_pages(length)
        return lengths

    def _long_pages(self, length: int) -> int:
        return self._engine.pages_for_tokens(length + self._squeeze.output_len)

    def _probe_pages(self, steps: int) -> int:
        """Pages of a probe after so many steps."""
        return self._engine.pages_for_tokens(min(PROBE + steps, self._engine.max_model_len))

    def _room_at_most(self, probes: int) -> int:
        """Pages for long requests beside the narrowest experts and what the probes grow to.

        They grow on after the long requests have ended, into pages that those have left.
        """
        squeeze, status = self._squeeze, self._start
        table, config = self._engine._parts.table, self._engine._config
        assert table is not None  # the policy is adaptive
        least = table.cost_bytes()[:, (config.min_bits or table.min_bits) - table.min_bits]
        given_up = status.pages_weights - int(least.sum()) // status.page_bytes
        grown = self._probe_pages(squeeze.steady_steps + squeeze.output_len + _PROMPT_STEPS)
        low = math.ceil(config.planner.low_watermark * status.pages_total) + 1
        return status.pages_free + given_up - probes * grown - low
