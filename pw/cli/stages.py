"""Offline stages as commands run them: from options to reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pw.cli.options import Calibration, Common, Widths

if TYPE_CHECKING:
    from pw_pipelines.progress import Progress
    from pw_pipelines.ranks import Ranks
    from pw_pipelines.residuals import ResidualReport


def progress_of(common: Common, *, quiet: bool = False) -> Progress:
    """Progress as the user wants to see it: a bar, lines, JSON lines, or nothing."""
    from pw_pipelines.progress import Progress, Style

    style = Style.QUIET if common.quiet or quiet else Style.JSON if common.json else None
    return Progress(style, verbose=common.verbose)


def fetch(model: str, wanted: bool, ranks: Ranks | None = None) -> None:
    """Bring a hub id into the local cache, if so `wanted`; the first rank does so for all."""
    if wanted and (ranks is None or ranks.first):
        from pw.models.resolve import download

        download(model)
    if ranks is not None:
        ranks.wait()


def build(
    model: str,
    output: Path,
    widths: Widths,
    calibration: Calibration,
    common: Common,
    *,
    overwrite: bool = False,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Run the three stages of `pw calibrate`; what is done already is not done again.

    Returns:
        The report of each stage.
    """
    config = widths.config(calibration)
    calibration.use_cores()

    from pw_pipelines import quantize, sensitivity, trace
    from pw_pipelines.ranks import ALONE

    ranks = ranks or ALONE
    progress = progress_of(common, quiet=not ranks.first)
    how: dict[str, Any] = {"overwrite": overwrite, "device": calibration.device, "ranks": ranks}
    reports: dict[str, Any] = {
        "quantize": quantize.run(model, output, config, progress, **how),
    }
    for name, stage in (("sensitivity", sensitivity.run), ("trace", trace.run)):
        reports[name] = stage(output, config.calibration, progress, model=model, **how)
    return reports


def fit(path: Path, common: Common, *, overwrite: bool = False) -> ResidualReport:
    """Run the stage of `pw fit-residuals`; nothing to do where it is done already."""
    from pw_pipelines import residuals

    return residuals.run(path, progress_of(common), overwrite=overwrite)
