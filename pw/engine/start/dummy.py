"""Planes, LUTs and tables that look like an artifact's and mean nothing: for load tests.

All blocks of a module hold the same random planes, so that the host makes and keeps one copy; on
the device every block has pages of its own, as with a real model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, BlockKey, ExpertGeometry, Module
from pw.models.architecture import Architecture
from pw.models.dummy import STANDARD_DEVIATION
from pw.models.features import feature_count
from pw.store.files import sha256_file
from pw.store.tables import Table
from pw_kernels.bitplane import padded_rows

_LOSS_PER_BLOCK = 1e-4  # nats at the least width, in the middle of the blocks: a scale, no more
_SPREAD = 1.5  # standard deviation of its logarithm; a trained model of 30 M parameters has 1.4


class DummySource:
    """A `WeightSource` made of a folder with a config.json (see `pw.models.dummy`).

    Attributes:
        architecture: Shapes of the model.
    """

    min_bits, max_bits = 2, 8
    lut_dtype = torch.bfloat16
    table_bytes = None  # no rows share a table

    def __init__(self, path: Path) -> None:
        self.path = path
        self.architecture = Architecture.load(path)
        self.model_name = path.name
        self.artifact_hash = sha256_file(path / "config.json")
        self._planes: dict[tuple[str, int], NDArray[np.uint8]] = {}  # by module, made so far
        self._luts: dict[tuple[int, int], NDArray[np.uint8]] = {}  # by rows and width

    @property
    def geometry(self) -> ExpertGeometry:
        """Layers, experts and block shapes."""
        return self.architecture.geometry

    def read_planes(self, key: BlockKey, first: int, count: int, out: NDArray[np.uint8]) -> None:
        """Random bits, the same for every block of a module."""
        size = out.nbytes // count
        for number in range(count):
            plane = self._plane(key.module, first + number, size)
            out[number * size : (number + 1) * size] = plane

    def _plane(self, module: Module, plane: int, size: int) -> NDArray[np.uint8]:
        """One plane; its random numbers are made once, a model has thousands of blocks."""
        made = self._planes.get((module, plane))
        if made is None:
            generator = np.random.default_rng([MODULES.index(module), plane])
            made = self._planes[module, plane] = generator.integers(256, size=size, dtype=np.uint8)
        return made

    def read_lut(self, key: BlockKey, bits: int, out: NDArray[np.uint8]) -> None:
        """Quantiles of a normal distribution in every row: [N padded, 2^bits]."""
        rows = padded_rows(self.geometry.shape(key.module).rows)
        made = self._luts.get((rows, bits))
        if made is None:
            middle = (torch.arange(1 << bits) + 0.5) / (1 << bits)
            values: Tensor = torch.special.ndtri(middle.double()) * STANDARD_DEVIATION
            table = values.to(self.lut_dtype).repeat(rows, 1)
            made = self._luts[rows, bits] = table.view(torch.uint8).numpy().reshape(-1)
        out[:] = made

    def has_table(self, stage: str) -> bool:
        """Whether `table` makes it up."""
        return stage in ("sensitivity", "residuals")

    def table(self, stage: str) -> Table:
        """Losses that fall by four a bit and differ between blocks; heads that predict nothing."""
        layers, experts = len(self.geometry.layers), self.geometry.experts
        if stage == "residuals":
            heads = (layers, experts * len(MODULES))
            features = feature_count(self.geometry.gate_up.cols)
            return Table(
                {
                    "coef": np.zeros((*heads, features), np.float32),
                    "intercept": np.zeros(heads, np.float32),
                    "kept": np.zeros(heads, np.bool_),
                }
            )
        widths = list(range(self.min_bits, self.max_bits + 1))
        size = (layers, experts, len(MODULES), 1)
        scale = np.random.default_rng(0).lognormal(np.log(_LOSS_PER_BLOCK), _SPREAD, size)
        losses = scale * 0.25 ** np.arange(len(widths))
        return Table({"output_gradient": losses, "hessian": losses}, {"widths": widths})
