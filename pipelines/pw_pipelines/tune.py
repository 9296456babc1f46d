"""The stage `tune`: an artifact again, with codes and tables fitted for the widths that are used.

The joint fit of `pw_pipelines.refit` serves all widths of a block alike, though a planner holds a
busy block at four bits and an idle one at two. This stage asks the planner, with the artifact's own
sensitivities, which width each block has at some number of bytes; fits every block with that width
as its focus; and measures anew what rests on the codes. Where rows are short and tables dear, rows
share tables (`pw_pipelines.sharing`), and memory holds fewer bytes at every width. Planes, format
and the unquantized model stay what they were. The artifact that was read is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pw.blocks import MODULES
from pw.config import CalibrationConfig, QuantizeConfig, TuneConfig
from pw.errors import ConfigError
from pw.store.artifact import QUANTIZE, Artifact
from pw_pipelines import distill, quantize, sensitivity, trace
from pw_pipelines.focus import Focus, plan_focus
from pw_pipelines.progress import Progress
from pw_pipelines.ranks import ALONE, Ranks
from pw_pipelines.sharing import WIDEST
from pw_pipelines.source import source_checkpoint


@dataclass(frozen=True)
class TuneReport:
    """What `tune` made, and what it should be worth."""

    path: Path
    bits: float
    blocks: dict[int, int]  # width -> number of blocks that were fitted for it
    damage_before: float  # predicted rise of the loss at those widths, nats a token
    damage_after: float


def run(
    source: str | Path,
    out: str | Path,
    config: TuneConfig,
    progress: Progress,
    *,
    model: str | None = None,
    overwrite: bool = False,
    device: str = "auto",
    recipe: Path | None = None,
    ranks: Ranks = ALONE,
) -> TuneReport:
    """Fit the blocks of an artifact again for the widths that a planner gives them.

    Widths, calibration text and the kind of codebook are those of `source`. A run that was stopped
    goes on where it was.

    Args:
        source: Folder of an artifact with sensitivities.
        out: Folder of the new artifact.
        config: For which bytes.
        progress: Where to report.
        model: The checkpoint; None = what the artifact names.
        overwrite: Replace what `out` was made with other settings.
        device: "auto", "cpu" or "cuda".
        recipe: File that says how the artifact is made, kept in it.
        ranks: Who shares the work.

    Raises:
        PwError: See its subclasses.
    """
    if Path(out).resolve() == Path(source).resolve():
        raise ConfigError(f"cannot tune `{source}` in its own place", "give another --output")
    start = Artifact.open(source)
    settings = _settings_of(start)
    focus = plan_focus(start, config.bits)
    if focus.table_bytes is not None:
        settings = replace(settings, max_bits=min(start.max_bits, WIDEST))
    name = model or start.manifest.model.source
    shares = ", ".join(f"{count} at {width} bits" for width, count in focus.counts().items())
    progress.note(f"tuned for the bytes of {config.bits:g} bits: {shares}")
    if focus.table_bytes is not None:
        progress.note(
            f"rows are short: they share tables of {focus.table_bytes:,} bytes a block, "
            f"of {settings.max_bits} bits at most"
        )
    how: dict[str, Any] = {"overwrite": overwrite, "device": device, "ranks": ranks}

    def fit(folder: Path) -> Artifact:
        quantize.run(name, folder, settings, progress, recipe=recipe, focus=focus, **how)
        return Artifact.open(folder)

    if config.distill:
        if ranks.size > 1:
            raise ConfigError("distillation runs in one process", "leave --distill out")
        checkpoint = source_checkpoint(start, name)
        distill.run(
            fit,
            Path(out),
            start,
            replace(settings, max_bits=settings.max_bits or start.max_bits),
            focus,
            config,
            checkpoint,
            progress,
            overwrite=overwrite,
            device=torch.device(ranks.device(device)),
            recipe=recipe,
        )
    else:
        fit(Path(out))
    for measure in (sensitivity.run, trace.run):
        measure(out, settings.calibration, progress, model=name, **how)
    report = TuneReport(
        path=Path(out),
        bits=config.bits,
        blocks=focus.counts(),
        damage_before=_damage(start, focus),
        damage_after=_damage(Artifact.open(out), focus),
    )
    progress.note(
        f"predicted rise of the loss at these widths: {report.damage_before:+.5f} before, "
        f"{report.damage_after:+.5f} after"
    )
    return report


def _settings_of(artifact: Artifact) -> QuantizeConfig:
    """The settings that an artifact was quantized with."""
    settings = artifact.manifest.stages[QUANTIZE].settings
    if settings["codebook"] != "joint":
        raise ConfigError(
            f"cannot tune the `{settings['codebook']}` codebook of `{artifact.path}`",
            "quantize with `--codebook joint`",
        )
    return QuantizeConfig(
        min_bits=artifact.min_bits,
        max_bits=artifact.max_bits,
        codebook="joint",
        calibration=CalibrationConfig(**settings["calibration"]),
    )


def _damage(artifact: Artifact, focus: Focus) -> float:
    """Predicted rise of the loss, nats a token, with every block at its focus."""
    scores = artifact.table("sensitivity").arrays["output_gradient"]  # [L, E, 2, W]
    total = 0.0
    for (layer, module), widths in focus.widths.items():
        own = scores[artifact.geometry.slot(layer), :, MODULES.index(module)]
        places = np.array(widths) - artifact.min_bits
        total += float(np.take_along_axis(own, places[:, None], 1).sum(dtype=np.float64))
    return total
