"""Windows of text that a distillation trains on, and windows held back to judge it.

Axes: W windows, S tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pw.config import CalibrationConfig
from pw.errors import ConfigError
from pw.models.checkpoint import Checkpoint
from pw.models.tokenizer import Tokenizer, load_tokenizer
from pw_pipelines.calibration import CalibrationSet, calibration_set
from pw_pipelines.source import vocabulary_of

HELD_BACK = 32  # windows that are not trained on, at most a tenth of all
RUN = 32  # tokens, at most half a window: text that shares so many in a row is the same text
_FACTOR = 6364136223846793005  # of a rolling hash modulo 2^64 (Knuth, MMIX)
_EVERY = 1 << 30  # windows: all that a text gives


@dataclass(frozen=True)
class TrainingText:
    """What is trained on, and what is not."""

    fit: CalibrationSet  # windows that blocks are fitted on
    windows: Tensor  # [W, S] to train on
    held_back: Tensor  # [W, S]
    dropped: int  # windows of other text that share runs of tokens with those held back
    record: dict[str, Any]  # digest of all windows; name and SHA-256 of the other text's file


def read_texts(calibration: CalibrationConfig, more: str, checkpoint: Checkpoint) -> TrainingText:
    """Windows to train on and windows held back.

    All windows of the calibration text, not only those that blocks were fitted on, and those of
    other text if there is any. Held back are some of the calibration text's last ones.

    Args:
        calibration: The text that blocks are fitted on.
        more: Other text, a .jsonl or .txt; none if empty.
        checkpoint: The model.

    Raises:
        ConfigError: The text is one window, or the other text is the same text.
    """
    tokenizer, vocabulary = load_tokenizer(checkpoint.path), vocabulary_of(checkpoint)
    every = replace(calibration, nsamples=_EVERY)
    own = calibration_set(every, tokenizer, vocabulary)
    if len(own.windows) < 2:
        raise ConfigError(
            f"calibration text gives one window, distillation takes two: `{every.dataset}`",
            "use more text or a smaller --seqlen",
        )
    count = min(HELD_BACK, max(1, len(own.windows) // 10))
    windows, held_back = own.windows[:-count], own.windows[-count:]
    record: dict[str, Any] = {"windows": own.digest}
    dropped = 0
    if more:
        others = _others(every, more, tokenizer, vocabulary)
        kept = ~_shared(others.windows, held_back)
        dropped = int((~kept).sum())
        if not kept.any():
            raise ConfigError(
                f"all of `{more}` shares text with what is held back of `{every.dataset}`",
                "give other text, or leave --distill-text out",
            )
        others = replace(others, windows=others.windows[kept])
        windows = torch.cat([windows, others.windows])
        record["windows"] += f"+{others.digest}"
        record["text"] = {"name": Path(more).name, "sha256": _sha256(more)}
    drawn = calibration.nsamples  # a draw of more windows begins with those of one of fewer
    fit = CalibrationSet(own.windows[:drawn], own.documents[:drawn], own.available)
    return TrainingText(fit, windows, held_back, dropped, record)


def _others(
    every: CalibrationConfig, more: str, tokenizer: Tokenizer, vocabulary: int
) -> CalibrationSet:
    found = calibration_set(replace(every, dataset=more), tokenizer, vocabulary)
    if _sha256(more) == _sha256(every.dataset):
        raise ConfigError(
            f"--distill-text is the calibration text, which is trained on anyway: `{more}`",
            "give other text, or leave --distill-text out",
        )
    return found


def _sha256(dataset: str) -> str:
    bundled = resources.files("pw").joinpath("assets", "calibration.jsonl")
    file = bundled if dataset == "bundled" else Path(dataset)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _shared(windows: Tensor, others: Tensor) -> Tensor:
    """Which of windows [W, S] have a run of `RUN` tokens that is in other windows [V, S]: [W]."""
    length = min(RUN, max(1, windows.shape[1] // 2))
    return torch.isin(_runs(windows, length), _runs(others, length)).any(1)


def _runs(windows: Tensor, length: int) -> Tensor:
    """Hash [W, S - length + 1] of every run of tokens."""
    count = windows.shape[1] - length + 1
    total = torch.zeros(len(windows), count, dtype=torch.int64)
    for start in range(length):
        total = total * _FACTOR + windows[:, start : start + count]
    return total
