"""The experts function of the engine: fused MoE over arena pages, and what it counts on the way.

Routing statistics are added into a persistent buffer in the same pass; prompt statistics are
collected only for the parts of a batch that are prompt, and only when a planner wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pw.blocks import MODULES, ExpertGeometry
from pw.engine.context import Batch, PrefillSpan
from pw.engine.precision.statistics import PromptStatistics
from pw.memory.arena import Arena
from pw.memory.page_table import WeightPageTable
from pw.memory.small_copies import to_host
from pw.models.experts import Activation, JoinedExperts
from pw_kernels.dispatch import compiles, dense_moe, fused_moe, fused_moe_slots
from pw_kernels.pages import WeightPages
from pw_kernels.reference import Observer
from pw_kernels.slots import Choice, SlotResults

Biases = Sequence[tuple[Tensor | None, Tensor | None]]  # by slot: gate_up [E, 2I], down [E, H]


class RoutedExperts(Protocol):
    """What the model calls for its routed experts; may be `JoinedExperts`, too."""

    batch: Batch | None

    def __call__(
        self, slot: int, _module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """Experts of one MoE layer: x [T, H], ids [T, k] int64, weights [T, k] -> [T, H]."""

    def rehearse(self, tokens: int, dtype: torch.dtype) -> None:
        """Launch what prompts of so many tokens launch and is compiled at run time, on nothing."""


class RoutingCounter:
    """Router weight that each expert received since `take`, on the device.

    Attributes:
        sums: [L, 2, E] float32: weights and their squares, added up by the kernels in the pass that
            routes, and never moved.
    """

    def __init__(self, geometry: ExpertGeometry, device: torch.device) -> None:
        self.sums = torch.zeros(len(geometry.layers), 2, geometry.experts, device=device)

    def take(self) -> NDArray[np.float32]:
        """Weights [L, E] since the last call, there once a later `mark` is reached; zero again."""
        sums = to_host(self.sums)  # whole: a part would have to be gathered first
        self.sums.zero_()
        mass: NDArray[np.float32] = sums[:, 0]
        return mass


class PagedExperts(JoinedExperts):
    """Experts read from bit-planes in the arena, at whatever width each block has now."""

    def __init__(
        self,
        table: WeightPageTable,
        arena: Arena,
        activations: Sequence[Activation],  # by slot
        biases: Biases,
        lut_dtype: torch.dtype,
        counter: RoutingCounter | None,
        widths: tuple[int, int],  # least and greatest that a block can ever have
        routed: int | None = None,  # experts of the model, where other ranks have some; None: these
    ) -> None:
        self.batch: Batch | None = None
        self._arena = arena
        self._activations, self._biases = activations, biases
        self._lut_dtype, self._counter, self._top_k = lut_dtype, counter, table.geometry.top_k
        modules = [
            [
                replace(table.pages_of(slot, module), widths=widths, routed=routed)
                for module in MODULES
            ]
            for slot in range(len(table.geometry.layers))
        ]
        self._pages: list[tuple[WeightPages, WeightPages]] = [(a, b) for a, b in modules]

    def __call__(
        self, slot: int, _module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """See `RoutedExperts`."""
        return self._run(fused_moe, slot, x, ids, weights)  # type: ignore[no-any-return]

    def joined(
        self,
        slot: int,
        _module: nn.Module,
        x: Tensor,
        ids: Tensor | Choice,
        weights: Tensor | None,
        *,
        summed: bool,
    ) -> Tensor | SlotResults:
        """See `JoinedExperts`."""
        run = fused_moe if summed else fused_moe_slots
        return self._run(run, slot, x, ids, weights)  # type: ignore[no-any-return]

    def _run(
        self,
        run: Callable[..., Any],
        slot: int,
        x: Tensor,
        ids: Tensor | Choice,
        weights: Tensor | None,
    ) -> Any:
        observer = live = None
        if self.batch is not None:
            live = self.batch.live
            if self.batch.spans:
                observer = self._observe_prompts(slot, x, self.batch.spans)
        gate_up, down = self._pages[slot]
        gate_up_bias, down_bias = self._biases[slot]
        return run(
            x,
            ids,
            weights,
            self._arena.pages,
            gate_up,
            down,
            lut_dtype=self._lut_dtype,
            activation=self._activations[slot],
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            observer=observer,
            statistics=None if self._counter is None else self._counter.sums[slot],
            live=live,
        )

    @torch.inference_mode()
    def rehearse(self, tokens: int, dtype: torch.dtype) -> None:
        """See `RoutedExperts`."""
        pages, device = self._arena.pages, self._arena.pages.device
        kinds: dict[tuple[Activation, bool, bool], int] = {}  # a layer of each
        for slot, activation in enumerate(self._activations):
            gate_up_bias, down_bias = self._biases[slot]
            kinds.setdefault((activation, gate_up_bias is None, down_bias is None), slot)
        x = torch.zeros(tokens, self._pages[0][0].cols, dtype=dtype, device=device)
        ids = torch.zeros(tokens, self._top_k, dtype=torch.int64, device=device)
        for (activation, *_), slot in kinds.items():
            call = (x, ids, pages, *self._pages[slot])
            if compiles(*call, lut_dtype=self._lut_dtype, activation=activation):
                self(slot, nn.Identity(), x, ids, ids.float())

    @staticmethod
    def _observe_prompts(slot: int, x: Tensor, spans: Sequence[PrefillSpan]) -> Observer | None:
        """Feed the statistics of the prompts in this batch."""
        wanting: list[tuple[int, int, PromptStatistics]] = []
        for span in spans:
            statistics = span.chunk.sequence.statistics
            if statistics is None:
                continue
            statistics.add_hidden(slot, x[span.start : span.end])
            if statistics.wants_moments:
                wanting.append((span.start, span.end, statistics))
        if not wanting:
            return None

        def observe(
            expert: int, tokens: Tensor, _weights: Tensor, inputs: Tensor, hidden: Tensor
        ) -> None:
            for start, end, statistics in wanting:
                mine = (tokens >= start) & (tokens < end)
                if bool(mine.any()):
                    statistics.add_moments(slot, expert, inputs[mine], hidden[mine])

        return observe


class DenseExperts(JoinedExperts):
    """Unquantized experts: the BF16 baseline. Plain tensors, charged to the budget whole."""

    def __init__(
        self,
        weights: list[tuple[Tensor, Tensor]],  # per MoE layer [E, 2I, H], [E, H, I]
        activations: Sequence[Activation],  # by slot
        biases: Biases,
    ) -> None:
        self.batch: Batch | None = None
        self._weights, self._activations, self._biases = weights, activations, biases

    @property
    def bytes(self) -> int:
        """Bytes of the experts."""
        return sum(t.numel() * t.element_size() for pair in self._weights for t in pair)

    def __call__(
        self, slot: int, _module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """See `RoutedExperts`."""
        return self._run(slot, x, ids, weights)

    def joined(
        self,
        slot: int,
        _module: nn.Module,
        x: Tensor,
        ids: Tensor | Choice,
        weights: Tensor | None,
        *,
        summed: bool,
    ) -> Tensor:
        """See `JoinedExperts`."""
        del summed  # they always are
        return self._run(slot, x, ids, weights)

    def _run(self, slot: int, x: Tensor, ids: Tensor | Choice, weights: Tensor | None) -> Tensor:
        gate_up, down = self._weights[slot]
        gate_up_bias, down_bias = self._biases[slot]
        return dense_moe(
            x,
            ids,
            weights,
            gate_up,
            down,
            activation=self._activations[slot],
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            live=None if self.batch is None else self.batch.live,
        )

    def rehearse(self, tokens: int, dtype: torch.dtype) -> None:
        """See `RoutedExperts`. No such kernel is launched here."""
