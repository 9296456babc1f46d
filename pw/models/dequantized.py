"""Blocks of an artifact as plain weights at any width. Knows nothing of what they are used for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pw.blocks import BlockKey
from pw.store.artifact import Artifact
from pw_kernels.bitplane import TILE_WORDS, bit_reverse_lut, dequantize, plane_bytes, unpack_planes


class DequantizedBlocks:
    """Reads blocks from an artifact and decodes them, in float32.

    Args:
        artifact: A finished artifact.
        device: Where the weights go.
    """

    def __init__(self, artifact: Artifact, device: torch.device) -> None:
        self.widths = range(artifact.min_bits, artifact.max_bits + 1)
        self._artifact = artifact
        self._device = device

    def weight(self, key: BlockKey, bits: int) -> Tensor:
        """[N, K] float32 at one width."""
        shape = self._artifact.geometry.shape(key.module)
        lut = self._artifact.lut(key, bits).to(self._device)
        return dequantize(self._planes(key, bits), lut, shape.rows, shape.cols).float()

    def errors(self, key: BlockKey, original: Tensor) -> Tensor:
        """[W, N, K] float32: weight at each width minus the original [N, K]."""
        shape, most = self._artifact.geometry.shape(key.module), self.widths[-1]
        codes = unpack_planes(self._planes(key, most), shape.rows, shape.cols).long()
        exact = original.to(self._device, torch.float32)
        errors = exact.new_empty((len(self.widths), *exact.shape))
        for bits, out in zip(self.widths, errors, strict=True):
            table = bit_reverse_lut(self._artifact.lut(key, bits).to(self._device))
            torch.sub(table[: shape.rows].gather(1, codes >> (most - bits)).float(), exact, out=out)
        return errors

    def _planes(self, key: BlockKey, bits: int) -> Tensor:
        shape = self._artifact.geometry.shape(key.module)
        data = np.empty(bits * plane_bytes(shape.rows, shape.cols), np.uint8)
        self._artifact.read_planes(key, 0, bits, data)
        words = torch.from_numpy(data.view(np.int32)).view(bits, -1, TILE_WORDS)
        return words.to(self._device)
