"""Everything that the studies share: the model, the texts, the bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from pw.blocks import MODULES
from pw.evaluation.lab.cache import CachedLab
from pw.evaluation.lab.costs import Costs, page_costs
from pw.evaluation.lab.damage_scores import Floats, measure_scores
from pw.evaluation.lab.lab import Lab
from pw.evaluation.lab.model import LabModel
from pw.evaluation.lab.texts import read_documents, spread_windows
from pw.models.tokenizer import Tokenizer, load_tokenizer

BUDGETS = (2.2, 2.5, 3.0, 3.5, 4.0)  # mean bits of uniform widths of the same bytes
WINDOW = 2048  # tokens
CALIBRATION_WINDOW = 1024


@dataclass(frozen=True)
class Texts:
    """Files that the studies read."""

    calibration: Path
    heldout: Path
    without: tuple[int, ...] = ()  # held-out documents to leave out: they overlap the calibration
    other: Path | None = None  # text of another source, such as WikiText-2
    tasks: Path | None = None  # folder of task files
    narrow: Path | None = None  # artifact of the same model, calibrated on prose alone
    apl: Path | None = None  # artifact of the same model with APL's codebooks
    windows: int = 32  # held-out windows
    other_windows: int = 12
    calibration_windows: int = 64


class Room:
    """A model, its texts and what was measured before.

    Args:
        artifact: Planes, LUTs and tables.
        checkpoint: What it was made from.
        texts: Files.
        memory: Folder of what was measured before; None: forget. Devices round differently, so each
            but the CPU has a folder of its own in it.
        device: Where models run: "cpu", "cuda".
    """

    def __init__(
        self,
        artifact: Path,
        checkpoint: Path,
        texts: Texts,
        memory: Path | None = None,
        device: str = "cpu",
    ) -> None:
        self.texts = texts
        self.memory = memory if memory is None or device == "cpu" else memory / device
        self.model = LabModel.open(artifact, checkpoint, device)
        self.tokenizer: Tokenizer = load_tokenizer(artifact)

    def kept(self, name: str) -> Path | None:
        """Where something about this artifact's weights is remembered."""
        if self.memory is None:
            return None
        weights = self.model.artifact.manifest.stage_digest("quantize")
        self.memory.mkdir(parents=True, exist_ok=True)
        return self.memory / f"{weights[:16]}-{name}"

    @cached_property
    def costs(self) -> Costs:
        """Bytes [n, W] as the engine charges them."""
        widths = self.model.widths
        kv = self.model.checkpoint.kv
        tables = self.model.artifact.table_bytes
        return page_costs(self.model.geometry, kv, (widths[0], widths[-1]), table_bytes=tables)

    def budget(self, mean_bits: float) -> int:
        """Bytes of uniform widths of so many bits, between two widths in proportion."""
        totals = self.costs.sum(0).astype(np.float64)
        return int(np.interp(mean_bits, np.array(self.model.widths), totals))

    @property
    def dense_bytes(self) -> int:
        """Of the routed experts, unquantized."""
        return self.model.geometry.weights * self.model.checkpoint.weight_dtype.itemsize

    @cached_property
    def heldout(self) -> CachedLab:
        """Held-out text."""
        documents = read_documents(self.texts.heldout, without=self.texts.without)
        windows = spread_windows(documents, self.tokenizer, WINDOW, self.texts.windows)
        return CachedLab(Lab(self.model, windows), self.memory)

    @cached_property
    def other(self) -> CachedLab | None:
        """Text of another source than any that the model was calibrated on."""
        if self.texts.other is None:
            return None
        documents = read_documents(self.texts.other)
        windows = spread_windows(documents, self.tokenizer, WINDOW, self.texts.other_windows)
        return CachedLab(Lab(self.model, windows), self.memory)

    @cached_property
    def scores(self) -> dict[str, Floats]:
        """`measure_scores` on the calibration text; damages as [L, E, M, W]."""
        kept = self.kept("damage.safetensors")
        if kept is not None and kept.exists():
            return dict(load_file(kept))
        documents = read_documents(self.texts.calibration)
        count = self.texts.calibration_windows
        windows = spread_windows(documents, self.tokenizer, CALIBRATION_WINDOW, count)
        found = measure_scores(self.model, windows)
        if kept is not None:
            part = kept.with_suffix(f".{os.getpid()}")  # other studies may be writing the same
            save_file({name: np.ascontiguousarray(v) for name, v in found.items()}, part)
            part.replace(kept)
        return found

    def flat(self, name: str) -> Floats:
        """One of `scores` as damages [n, W]."""
        values = self.scores[name]
        return values.reshape(self.model.geometry.blocks, len(self.model.widths))

    @property
    def layer_of(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Layer slot [n] of each block."""
        geometry = self.model.geometry
        per_layer = geometry.experts * len(MODULES)
        return np.repeat(np.arange(len(geometry.layers)), per_layer)
