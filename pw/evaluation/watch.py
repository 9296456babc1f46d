"""What a run really used: bytes by class and widths of the blocks, step by step.

Sampled in the middle of every forward step: after it, a prompt that was done has given its KV pages
back already.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pw.engine.request import BytesByClass, EngineStatus
from pw.evaluation.inflight import ScoringEngine

_CLASSES = tuple(field.name for field in fields(BytesByClass))
_MODULES = ("gate_up", "down")
_MOST_MOMENTS = 2000  # of a timeline; a longer run keeps every second one, and so on


@dataclass(frozen=True)
class Widths:
    """Widths of the routed experts while a text was scored. Unquantized experts count 16 bits."""

    mean: float  # bits of a weight, mean over forward steps
    least: float  # mean bits at the step that had the fewest
    most: float
    share: dict[int, float]  # width -> share of the blocks that had it, mean over forward steps
    blocks: list[dict[str, Any]] | None  # per layer: {"layer", "gate_up": [E], "down": [E]}, means


@dataclass(frozen=True)
class Moment:
    """The engine in the middle of one forward step."""

    seconds: float  # since the run began
    step: int
    mean_bits: float
    weight_bytes: int  # planes, LUTs, or unquantized experts
    kv_bytes: int
    free_bytes: int  # of the arena


@dataclass(frozen=True)
class Usage:
    """Bytes and widths of one run."""

    bytes: BytesByClass  # mean over forward steps
    kv_peak: int  # most bytes of KV pages at any step
    used_peak: int  # most bytes charged and not free at any step
    used_single: int  # the same with the KV of one sequence only: what the policy needs at least
    widths: Widths
    timeline: tuple[Moment, ...]

    @property
    def expert_bytes(self) -> int:
        """Planes and LUTs in whole pages, or the unquantized experts; mean over steps."""
        return self.bytes.planes + self.bytes.luts + self.bytes.experts_dense


class Watch:
    """Collects a `Usage`: call `look` inside a forward step, `next_step` after it."""

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine = engine
        self._started = time.monotonic()
        self._steps = 0
        self._sums = dict.fromkeys(_CLASSES, 0)
        self._kv_peak = self._used_peak = self._used_single = 0
        self._bits: list[float] = []
        self._share: Counter[int] = Counter()
        self._moments: list[Moment] = []
        self._every = 1
        self._map: list[dict[str, Any]] | None = None
        self._map_arrays: list[dict[str, NDArray[np.float64]]] = []
        self._map_sums: list[dict[str, NDArray[np.float64]]] = []
        self._maps = 0
        self._last_transitions = -1
        self._looked = False

    def next_step(self) -> None:
        """A forward step is over."""
        self._looked = False

    def look(self) -> None:
        """Take in the state; the first call in a step counts."""
        if self._looked:
            return
        self._looked = True
        status = self._engine.status()
        held = status.bytes
        used = held.total - held.free
        self._steps += 1
        for name in _CLASSES:
            self._sums[name] += getattr(held, name)
        self._kv_peak = max(self._kv_peak, held.kv)
        self._used_peak = max(self._used_peak, used)
        if status.running:
            single = used - held.kv + -(-held.kv // status.running)
            self._used_single = max(self._used_single, single)
        self._bits.append(status.mean_bits)
        self._share.update(status.blocks_by_bits)
        self._note_moment(status)
        self._add_map(status)

    def _note_moment(self, status: EngineStatus) -> None:
        if self._steps % self._every:
            return
        held = status.bytes
        self._moments.append(
            Moment(
                time.monotonic() - self._started,
                status.step,
                status.mean_bits,
                held.planes + held.luts + held.experts_dense,
                held.kv,
                held.free,
            )
        )
        if len(self._moments) > _MOST_MOMENTS:
            del self._moments[::2]
            self._every *= 2

    def _add_map(self, status: EngineStatus) -> None:
        """Add the widths of all blocks; they are asked for again only after a transition."""
        if not status.blocks_by_bits:
            return
        if self._map is None or status.transitions != self._last_transitions:
            self._map = self._engine.precision_map()["layers"]
            self._last_transitions = status.transitions
            self._map_arrays = [
                {
                    module: np.array(layer[module], dtype=np.float64)
                    for module in ("gate_up", "down")
                }
                for layer in self._map
            ]
        if not self._map_sums:
            self._map_sums = [
                {module: np.zeros_like(bits) for module, bits in layer.items()}
                for layer in self._map_arrays
            ]
        for total, layer in zip(self._map_sums, self._map_arrays, strict=True):
            for module, bits in layer.items():
                total[module] += bits
        self._maps += 1

    def usage(self) -> Usage:
        """All that was seen.

        Raises:
            ValueError: Nothing was.
        """
        if not self._steps:
            raise ValueError("no forward step was seen")
        blocks = sum(self._share.values())
        return Usage(
            bytes=BytesByClass(
                **{n: round(total / self._steps) for n, total in self._sums.items()}
            ),
            kv_peak=self._kv_peak,
            used_peak=self._used_peak,
            used_single=self._used_single,
            widths=Widths(
                mean=float(np.mean(self._bits)),
                least=min(self._bits),
                most=max(self._bits),
                share={width: n / blocks for width, n in sorted(self._share.items())},
                blocks=self._mean_map(),
            ),
            timeline=tuple(self._moments),
        )

    def _mean_map(self) -> list[dict[str, Any]] | None:
        if self._map is None:
            return None
        return [
            {"layer": layer["layer"]}
            | {module: (bits / self._maps).round(4).tolist() for module, bits in total.items()}
            for layer, total in zip(self._map, self._map_sums, strict=True)
        ]
