"""Blocks at planned widths as functions of latent values and levels, which can be trained.

Each weight has a latent value; its code is the level nearest to it, and a gradient passes through
this rounding as if it were not there (straight-through). Levels get the sum of their weights'
gradients, over all rows that share a table (`pw_pipelines.sharing`). Only codes and tables of the
planned width change: a weight whose code there is as before keeps the bits below, else it takes
what is nearest; tables of other widths stay.

Axes: E experts, N rows, K columns, P rows of a table that rows share, C levels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pw.blocks import MODULES, BlockKey
from pw.models.checkpoint import Checkpoint
from pw.store.artifact import Artifact
from pw_kernels.bitplane import TILE_WORDS, bit_reverse_lut, plane_bytes, unpack_planes
from pw_pipelines.focus import Focus
from pw_pipelines.sharing import period

RATE = 0.003  # of a step of Adam, in distances between levels
_TOWARD = 0.9  # of the way from its level to the weight on which a latent value starts


class Blocks:
    """All blocks of an artifact at the widths of a focus, as functions of what is trained.

    Args:
        artifact: Whose codes and tables are the start.
        checkpoint: The unquantized weights.
        focus: The widths.
        device: Where they are.
    """

    def __init__(
        self, artifact: Artifact, checkpoint: Checkpoint, focus: Focus, device: torch.device
    ) -> None:
        self.artifact, self.device, self.most = artifact, device, artifact.max_bits
        self.keys = list(artifact.geometry.keys())
        self._focus = focus
        self.latents: dict[BlockKey, Tensor] = {}  # [P, N / P * K]
        self.tables: dict[BlockKey, Tensor] = {}  # [P, C], natural order
        self._shapes = {m: artifact.geometry.shape(m) for m in MODULES}
        gaps = {}
        for key in self.keys:
            codes, table = self._codes(key), self._table(key)
            weight = checkpoint.expert_weight(key).to(device, torch.float32)
            tied = self._tied(weight, table)
            start = self._tied((codes >> (self.most - self.bits(key))).long(), table)
            levels, order = table.sort(1)
            place = order.argsort(1).gather(1, start)
            edges = torch.nn.functional.pad((levels[:, 1:] + levels[:, :-1]) / 2, (1, 1))
            edges[:, 0], edges[:, -1] = -torch.inf, torch.inf
            inside = tied.clamp(edges.gather(1, place), edges.gather(1, place + 1))
            own = table.gather(1, start)
            gap = (levels[:, -1] - levels[:, 0]).mean() / (levels.shape[1] - 1)
            toward = (inside - own).clamp(-2 * gap, 2 * gap)
            self.latents[key] = (own + _TOWARD * toward).requires_grad_()
            self.tables[key] = table.requires_grad_()
            gaps[key] = max(float(gap), 1e-12)
        self.groups = [
            {"params": [values[key]], "lr": RATE * gaps[key], "top": RATE * gaps[key]}
            for values in (self.latents, self.tables)
            for key in self.keys
        ]
        self._now: dict[BlockKey, Tensor] = {}

    def bits(self, key: BlockKey) -> int:
        """Width of a block."""
        return self._focus.widths[key.layer, key.module][key.expert]

    def refresh(self) -> None:
        """Compute the weights anew from what is trained."""
        self._now = {key: self._weight(key) for key in self.keys}

    def weight(self, key: BlockKey) -> Tensor:
        """[N, K] as of the last `refresh`."""
        return self._now[key].detach()

    def backward(self, gradients: dict[BlockKey, Tensor]) -> None:
        """Hand gradients at the weights [N, K] on to latents and tables."""
        keys = list(gradients)
        torch.autograd.backward([self._now[key] for key in keys], [gradients[key] for key in keys])

    @torch.no_grad()
    def codes(self, key: BlockKey, *, changed: bool = True) -> Tensor:
        """[N, K] uint8 of all widths, natural order; as they were unless `changed`."""
        below = self.most - self.bits(key)
        kept = self._codes(key)
        if not changed:
            return kept
        table, latent = self._rounded(self.tables[key]), self.latents[key]
        found, before = self._nearest(latent, table), self._tied(kept.long() >> below, table)
        found = torch.where(table.gather(1, found) == table.gather(1, before), before, found)
        top, same = self._untied(found, key), self._untied(found == before, key)
        wide = self._lut(key, self.most)
        target, first = self._untied(latent, key), top << below
        apart = torch.stack([
            (wide.gather(1, first + child) - target).abs() for child in range(1 << below)
        ])  # fmt: skip
        return torch.where(same, kept, first + apart.argmin(0)).to(torch.uint8)

    @torch.no_grad()
    def lut(self, key: BlockKey, bits: int, *, changed: bool = True) -> Tensor:
        """Table [N, 2^bits] in natural order; as it was unless `changed`."""
        if bits != self.bits(key) or not changed:
            return self._lut(key, bits)
        table = self._rounded(self.tables[key])
        rows = self._shapes[key.module].rows
        return table.repeat(rows // len(table), 1)

    def _weight(self, key: BlockKey) -> Tensor:
        latent, table = self.latents[key], self.tables[key]
        rounded = table + (self._rounded(table) - table).detach()
        found = self._nearest(latent.detach(), rounded.detach())
        level = rounded.gather(1, found)
        return self._untied(level + (latent - latent.detach()), key)

    def _nearest(self, latent: Tensor, table: Tensor) -> Tensor:
        """Entries [P, n] of the table nearest to latent values."""
        levels, order = table.sort(1)
        middle = (levels[:, 1:] + levels[:, :-1]) / 2
        return order.gather(1, torch.searchsorted(middle, latent))

    def _rounded(self, table: Tensor) -> Tensor:
        return table.detach().to(self.artifact.lut_dtype).float()

    def _tied(self, values: Tensor, table: Tensor) -> Tensor:
        """[N, K] -> [P, N / P * K]: rows that share a table of P rows side by side."""
        apart = len(table)
        return values.view(-1, apart, values.shape[1]).transpose(0, 1).reshape(apart, -1)

    def _untied(self, values: Tensor, key: BlockKey) -> Tensor:
        shape = self._shapes[key.module]
        return values.view(len(values), -1, shape.cols).transpose(0, 1).reshape(shape.rows, -1)

    def _codes(self, key: BlockKey) -> Tensor:
        shape = self.artifact.geometry.shape(key.module)
        data = np.empty(self.most * plane_bytes(shape.rows, shape.cols), np.uint8)
        self.artifact.read_planes(key, 0, self.most, data)
        words = torch.from_numpy(data.view(np.int32)).view(self.most, -1, TILE_WORDS)
        return unpack_planes(words.to(self.device), shape.rows, shape.cols)

    def _lut(self, key: BlockKey, bits: int) -> Tensor:
        """[N, 2^bits] float32 in natural order, as the artifact has it."""
        rows = self.artifact.geometry.shape(key.module).rows
        lut = self.artifact.lut(key, bits)[:rows].to(self.device)
        return bit_reverse_lut(lut).float()

    def _table(self, key: BlockKey) -> Tensor:
        """[P, C] of the planned width."""
        whole, bits = self._lut(key, self.bits(key)), self.bits(key)
        if self._focus.table_bytes is None:
            return whole
        return whole[: period(len(whole), bits, self._focus.table_bytes)].clone()
