"""Blocks of an artifact as plain weights at any width. Knows nothing of what they are used for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pw.blocks import BlockKey
from pw.store.artifact import Artifact
from pw_kernels.bitplane import TILE_WORDS, dequantize, plane_bytes


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
        return self._decode(key, self._planes(key, bits), bits)

    def errors(self, key: BlockKey, original: Tensor) -> Tensor:
        """[W, N, K] float32: weight at each width minus the original [N, K]."""
        planes = self._planes(key, self.widths[-1])
        exact = original.to(self._device, torch.float32)
        return torch.stack([self._decode(key, planes[:b], b) - exact for b in self.widths])

    def _planes(self, key: BlockKey, bits: int) -> Tensor:
        shape = self._artifact.geometry.shape(key.module)
        data = np.empty(bits * plane_bytes(shape.rows, shape.cols), np.uint8)
        self._artifact.read_planes(key, 0, bits, data)
        words = torch.from_numpy(data.view(np.int32)).view(bits, -1, TILE_WORDS)
        return words.to(self._device)

    def _decode(self, key: BlockKey, planes: Tensor, bits: int) -> Tensor:
        shape = self._artifact.geometry.shape(key.module)
        lut = self._artifact.lut(key, bits).to(self._device)
        return dequantize(planes, lut, shape.rows, shape.cols).float()
