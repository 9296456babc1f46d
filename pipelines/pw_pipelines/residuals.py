"""The stage `fit-residuals`: linear heads that foresee a prompt's deviation from the average.

One Ridge regression per block from the features of a prompt at its layer to y (see `trace`). A
prompt counts for a head by n / (n + n0), n the tokens it routed there. Prompts are split into
train and validation, whole documents to one side; heads that do worse than saying zero on the
validation prompts are dropped.

Axes: P prompts, L MoE layers, E experts, F features; heads are ordered (expert, module).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GroupShuffleSplit, ShuffleSplit
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from pw.errors import ConfigError
from pw.store.artifact import Artifact
from pw_pipelines.progress import Progress

STAGE = "residuals"

_ALPHAS = tuple(10.0**k for k in range(-1, 6))  # of features with unit variance
_TOKENS_OF_HALF_WEIGHT = 16.0
_LEAST_PROMPTS = 8  # in either part, for a head and for the split

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ResidualConfig:
    """How the heads are fitted."""

    validation: float = 0.25  # share of prompts
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.validation < 1:
            raise ConfigError(f"validation share must be between 0 and 1: {self.validation}")


@dataclass(frozen=True)
class ResidualReport:
    """How well the heads foresee. R2 is against saying zero, weighted as in the fit."""

    prompts_train: int
    prompts_valid: int
    heads: int
    kept: tuple[int, ...]  # per layer
    r2_train: tuple[float, ...]  # per layer, all heads
    r2_valid: tuple[float, ...]  # per layer, all heads
    r2_valid_kept: tuple[
        float, ...
    ]  # per layer, dropped heads say zero; chosen on the same prompts


@dataclass(frozen=True)
class Heads:
    """Heads of one layer and their sums of squares, predicted and of saying zero."""

    coef: Floats  # [2E, F]
    intercept: Floats  # [2E]
    kept: NDArray[np.bool_]  # [2E]
    train: Floats  # [2, 2E]: weighted squared error of the head, of zero
    valid: Floats  # [2, 2E]


def run(
    path: str | Path,
    progress: Progress,
    config: ResidualConfig | None = None,
    *,
    overwrite: bool = False,
) -> ResidualReport:
    """Fit the heads of an artifact that has a routing trace; store the table `residuals`.

    Args:
        path: Folder of the artifact.
        progress: Where to report.
        config: How to split; None = the defaults.
        overwrite: Replace a table that was made with other settings.

    Raises:
        PwError: No trace, too few prompts, or a table with other settings.
    """
    artifact = Artifact.open(path)
    config = config or ResidualConfig()
    inputs = artifact.digests("routing") if artifact.has_table("routing") else {}
    trace = artifact.table("routing").arrays
    if not artifact.table_done(STAGE, config, inputs, overwrite):
        train, valid = split_prompts(trace["documents"], config, path)
        fitted = _fit_layers(trace, train, valid, progress)
        found = _report(fitted, train, valid)
        arrays = {
            "coef": np.stack([h.coef for h in fitted]).astype(np.float32),
            "intercept": np.stack([h.intercept for h in fitted]).astype(np.float32),
            "kept": np.stack([h.kept for h in fitted]),
        }
        artifact.write_table(STAGE, arrays, {}, config, inputs, asdict(found), overwrite)
    else:
        progress.note("fit-residuals: done already")
    stored = artifact.manifest.stages[STAGE].report
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
    report = ResidualReport(**values)
    _print(report, progress)
    return report


def split_prompts(
    documents: NDArray[np.int64], config: ResidualConfig, artifact: str | Path
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of train and validation prompts; a document is on one side only.

    Text of too few documents is split by prompt.

    Args:
        documents: Document of each prompt [P].
        config: How to split.
        artifact: Folder that the hint names.

    Raises:
        ConfigError: Too few prompts for a fit that means anything.
    """
    if len(documents) < 4 * _LEAST_PROMPTS:
        raise ConfigError(
            f"{len(documents)} prompts are too few to fit residual heads, at least "
            f"{4 * _LEAST_PROMPTS} are needed",
            f"trace more prompts: `pw trace {quote(str(artifact))} --nsamples N --overwrite`",
        )
    size, seed = config.validation, config.seed
    if len(np.unique(documents)) >= _LEAST_PROMPTS:
        split = GroupShuffleSplit(1, test_size=size, random_state=seed)
        train, valid = next(split.split(documents, groups=documents))
        if min(len(train), len(valid)) >= _LEAST_PROMPTS:
            return train, valid
    train, valid = next(ShuffleSplit(1, test_size=size, random_state=seed).split(documents))
    return train, valid


def _fit_layers(
    trace: Mapping[str, NDArray[Any]],
    train: NDArray[np.int64],
    valid: NDArray[np.int64],
    progress: Progress,
) -> list[Heads]:
    prompts, layers = trace["features"].shape[:2]
    fitted = []
    with progress.stage("fit-residuals", layers, "layers") as advance:
        for slot in range(layers):
            y = trace["y"][:, slot].reshape(prompts, -1)  # heads in order (expert, module)
            counts = np.repeat(trace["counts"][:, slot], 2, axis=1)
            fitted.append(fit_layer(trace["features"][:, slot], y, counts, train, valid))
            advance(1)
    return fitted


def fit_layer(
    features: NDArray[np.float32],  # [P, F]
    y: NDArray[np.float32],  # [P, heads], nan where the prompt did not reach the expert
    counts: NDArray[np.int32],  # [P, heads] routed tokens
    train: NDArray[np.int64],
    valid: NDArray[np.int64],
) -> Heads:
    """Fit the heads of one layer."""
    mean = features[train].mean(0, dtype=np.float64)
    deviation = features[train].std(0, dtype=np.float64)
    deviation[deviation <= 1e-6 * np.abs(mean)] = np.inf  # a constant says nothing
    x = (features - mean) / deviation
    weight = np.where(np.isnan(y), 0.0, counts / (counts + _TOKENS_OF_HALF_WEIGHT))
    target = np.nan_to_num(y.astype(np.float64))
    heads = y.shape[1]
    coef, intercept = np.zeros((heads, x.shape[1])), np.zeros(heads)
    with threadpool_limits(1):  # many small systems: threads cost more than they give
        for head in range(heads):
            rows = train[weight[train, head] > 0]
            if len(rows) >= _LEAST_PROMPTS:
                ridge = RidgeCV(alphas=_ALPHAS)
                ridge.fit(x[rows], target[rows, head], sample_weight=weight[rows, head])
                coef[head], intercept[head] = ridge.coef_, ridge.intercept_
    error = weight * (x @ coef.T + intercept - target) ** 2
    zero = weight * target**2
    sums = {name: np.stack([error[i].sum(0), zero[i].sum(0)]) for name, i in
            (("train", train), ("valid", valid))}  # fmt: skip
    enough = (weight[valid] > 0).sum(0) >= _LEAST_PROMPTS
    folded = coef / deviation
    return Heads(
        coef=folded,
        intercept=intercept - folded @ mean,
        kept=enough & (sums["valid"][0] < sums["valid"][1]),
        **sums,
    )


def _report(
    fitted: list[Heads], train: NDArray[np.int64], valid: NDArray[np.int64]
) -> ResidualReport:
    return ResidualReport(
        prompts_train=len(train),
        prompts_valid=len(valid),
        heads=sum(h.kept.size for h in fitted),
        kept=tuple(int(h.kept.sum()) for h in fitted),
        r2_train=tuple(_r2(*h.train) for h in fitted),
        r2_valid=tuple(_r2(*h.valid) for h in fitted),
        r2_valid_kept=tuple(
            _r2(np.where(h.kept, h.valid[0], h.valid[1]), h.valid[1]) for h in fitted
        ),
    )


def _r2(error: Floats, zero: Floats) -> float:
    total = float(zero.sum())
    return 1.0 - float(error.sum()) / total if total > 0 else 0.0


def _print(report: ResidualReport, progress: Progress) -> None:
    progress.note(
        f"{sum(report.kept)} of {report.heads} heads kept, fitted on {report.prompts_train} "
        f"prompts, validated on {report.prompts_valid}"
    )
    for slot, values in enumerate(
        zip(report.r2_train, report.r2_valid, report.r2_valid_kept, report.kept, strict=True)
    ):
        train, valid, kept, count = values
        progress.note(
            f"layer {slot}: R2 train {train:.2f}, validation {valid:.2f}, "
            f"with the {count} kept heads {kept:.2f}"
        )
