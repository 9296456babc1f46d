"""Blocks become planes and tables: all experts of one (layer, module) at a time, written at once.

The maths is in `codebook` and `refit`, the files in `pw.store`.

Axes: E experts, N rows, K columns, B planes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pw.blocks import MODULES, BlockKey, Module
from pw.errors import DamagedModelError
from pw.models.checkpoint import Checkpoint
from pw.store.manifest import BlocksKey
from pw.store.writer import ArtifactWriter
from pw_kernels.bitplane import bit_reverse_lut, pack_planes
from pw_pipelines.behind import Behind
from pw_pipelines.codebook import fit_codebook
from pw_pipelines.focus import Focus
from pw_pipelines.moments import Moments
from pw_pipelines.refit import refit
from pw_pipelines.sharing import fit_shared

# Experts are fitted together up to this many weights: on a GPU all of a layer, so that few and
# large products are started; `codebook` and `refit` bound their own temporaries.
_WEIGHTS_PER_FIT = {"cpu": 1 << 24, "cuda": 1 << 29}

Weight = Callable[[BlockKey], Tensor]


class BlockFitter:
    """Fits and writes the blocks that are this process's work.

    Args:
        writer: Takes them; says what is done.
        checkpoint: Whose blocks; named in errors.
        pairs: Which (layer, module).
        device: Where to fit.
        focus: The width of each block that counts most; None: all count alike.
        behind: Does the writing.
    """

    def __init__(
        self,
        writer: ArtifactWriter,
        checkpoint: Checkpoint,
        pairs: Collection[BlocksKey],
        device: torch.device,
        focus: Focus | None = None,
        behind: Behind | None = None,
    ) -> None:
        self._writer, self._checkpoint, self._pairs = writer, checkpoint, pairs
        self.device, self._focus, self._behind = device, focus, behind or Behind(0)
        self.outputs: Tensor | None = None  # [L, N, N], see `pw_pipelines.outputs`
        self._copies: Any = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.seconds = 0.0  # spent here so far

    def fit(
        self,
        layer: int,
        moments: Moments,  # of the layer, L = 1
        hessians: Mapping[Module, Tensor],  # [E, K, K]; empty: inputs count as uncorrelated
        weight: Weight,
    ) -> None:
        """Fit what is left of a layer and have it written.

        Args:
            layer: Its index in the model.
            moments: Mean squared inputs.
            hessians: Of the inputs.
            weight: Gives [N, K] of a block of this layer.

        Raises:
            DamagedModelError: A weight is not finite.
            PartialResultError: The disk is full; the folder resumes.
        """
        started = time.perf_counter()
        for module in MODULES:
            if (layer, module) in self._pairs and not self._writer.done(layer, module):
                made = self._fit(layer, module, moments, hessians.get(module), weight)
                ready = None
                if self._copies is not None:
                    ready = torch.cuda.current_stream(self.device).record_event()
                self._behind.do(partial(self._write, layer, module, *made, ready))
        self.seconds += time.perf_counter() - started

    def _write(
        self,
        layer: int,
        module: Module,
        planes: Tensor,
        luts: dict[int, Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Copy planes and LUTs to the host, beside what the GPU does next, and write them."""
        if ready is not None:
            ready.synchronize()
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            planes, luts = planes.cpu(), {bits: table.cpu() for bits, table in luts.items()}
        self._writer.write_blocks(layer, module, planes, luts)

    def _fit(
        self, layer: int, module: Module, moments: Moments, hessians: Tensor | None, weight: Weight
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Planes and LUTs of all experts of one (layer, module), on the device or the CPU."""
        geometry, manifest = self._checkpoint.geometry, self._writer.manifest
        mean_squares = torch.from_numpy(moments.of(module)[0])
        focus = None if self._focus is None else self._focus.of(layer, module)
        outputs = None
        if self.outputs is not None and module == "down":
            outputs = self.outputs[geometry.slot(layer)]
        room = _WEIGHTS_PER_FIT[self.device.type]
        group = max(1, room // geometry.shape(module).weights)
        planes, luts = torch.empty(0), dict[int, Tensor]()
        for first in range(0, geometry.experts, group):
            some = slice(first, min(first + group, geometry.experts))
            keys = [BlockKey(layer, e, module) for e in range(some.start, some.stop)]
            part, tables = quantize_blocks(
                self._stacked(keys, weight),
                mean_squares[some].to(self.device),
                manifest.min_bits,
                manifest.max_bits,
                getattr(torch, manifest.lut_dtype),
                None if hessians is None else hessians[some].to(self.device),
                None if focus is None else focus[some],
                None if self._focus is None else self._focus.table_bytes,
                outputs,
            )
            if group >= geometry.experts:
                return part, tables
            if first == 0:  # the whole at once: parts and their sum would be twice as much
                planes = _room(part, geometry.experts)
                luts = {b: _room(table, geometry.experts) for b, table in tables.items()}
            planes[some] = part.cpu()
            for bits, table in tables.items():
                luts[bits][some] = table.cpu()
        return planes, luts

    def _stacked(self, keys: list[BlockKey], weight: Weight) -> Tensor:
        """Finite weights [E, N, K] of some blocks, on the device."""
        weights = torch.stack([weight(key) for key in keys]).to(self.device)
        if not torch.isfinite(weights).all():
            refuse_infinite(self._checkpoint, keys, weight)
        return weights


def _room(part: Tensor, experts: int) -> Tensor:
    """Host memory for all experts, of which `part` is some."""
    return torch.empty((experts, *part.shape[1:]), dtype=part.dtype)


def refuse_infinite(checkpoint: Checkpoint, keys: Collection[BlockKey], weight: Weight) -> None:
    """Name the first block whose weights are not finite, if there is one.

    Raises:
        DamagedModelError: There is.
    """
    for key in keys:
        if not torch.isfinite(weight(key)).all():
            raise DamagedModelError(
                f"weights of {key} are not finite: `{checkpoint.path}`",
                "the checkpoint is damaged: fetch it again",
            )


def quantize_blocks(
    weights: Tensor,  # [E, N, K]
    moments: Tensor,  # [E, K]
    min_bits: int,
    max_bits: int,
    lut_dtype: torch.dtype,
    hessians: Tensor | None = None,  # [E, K, K]; None: inputs count as uncorrelated
    focus: Tensor | None = None,  # [E] the width that counts most; None: all count alike
    table_bytes: int | None = None,  # of tables that rows share
    outputs: Tensor | None = None,  # [N, N] second moments of the gradients there
) -> tuple[Tensor, dict[int, Tensor]]:
    """Planes [E, B, tiles, 128] int32 and LUTs {b: [E, N, 2^b]} in kernel order of some experts."""
    experts, rows, cols = weights.shape
    if table_bytes is None:
        each = moments.repeat_interleave(rows, 0)
        book = fit_codebook(weights.flatten(0, 1), each, min_bits, max_bits, lut_dtype)
    else:
        assert hessians is not None, "rows share tables after a refit only"
        book = fit_shared(weights, moments, range(min_bits, max_bits + 1), lut_dtype, table_bytes)
    if hessians is not None:
        book = refit(
            book, weights, hessians, focus=focus, table_bytes=table_bytes, outputs=outputs
        ).book
    planes = pack_planes(book.codes.view(experts, rows, cols), max_bits)
    luts = {b: bit_reverse_lut(lut).view(experts, rows, -1) for b, lut in book.luts.items()}
    return planes, luts
