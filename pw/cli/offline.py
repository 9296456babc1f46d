"""Commands that make an artifact: quantize, sensitivity, trace, tune, fit-residuals, or several.

Reports go to stdout, progress to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from pw.cli.command import print_json
from pw.cli.locate import artifact_path, default_output
from pw.cli.options import Calibration, Common, Widths
from pw.cli.plans import plan, print_widths
from pw.cli.stages import build, fetch, fit, progress_of
from pw.config import TuneConfig, format_bytes

if TYPE_CHECKING:
    from pw_pipelines.quantize import QuantizeReport
    from pw_pipelines.tune import TuneReport

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint folder, a hub id, or `tiny` (bundled).")
]
Artifact = Annotated[
    str, typer.Argument(metavar="ARTIFACT", help="A folder that `pw quantize` made, or `tiny`.")
]
Source = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="The unquantized model (default: where it was when the artifact was made).",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The artifact's folder.", show_default="<name>.pw"),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace what was made with other settings.")
]

Download = Annotated[
    bool,
    typer.Option(
        "--download",
        help="Fetch a hub id that is not in the local cache; `id@revision` fetches that revision.",
    ),
]

DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Say what would be done; reads headers only, writes nothing."),
]


@contextmanager
def _telling_what_is_kept(path: Path) -> Iterator[None]:
    """On Ctrl-C, say where the work so far lies."""
    try:
        yield
    except KeyboardInterrupt:
        for folder in (path.with_name(f"{path.name}.partial"), path):
            if folder.is_dir():
                print(f"kept in {folder}; the same command goes on", file=sys.stderr)
                break
        raise


def calibrate(
    model: Model,
    widths: Widths,
    calibration: Calibration,
    common: Common,
    output: Output = None,
    overwrite: Overwrite = False,
    download: Download = False,
) -> None:
    """Do all that serving needs: quantize, then sensitivity, then trace.

    Stopped at any moment, the same command goes on where it was. `pw fit-residuals` may follow.
    Several processes share the work: `torchrun --nproc-per-node N -m pw calibrate MODEL ...`.
    """
    from pw_pipelines.ranks import Ranks

    path, ranks = output or default_output(model), Ranks.join()
    fetch(model, download, ranks)
    with _telling_what_is_kept(path):
        reports = build(model, path, widths, calibration, common, overwrite=overwrite, ranks=ranks)
    ranks.leave()
    if not ranks.first:
        return
    if common.json:
        print_json(reports)
    else:
        _print_quantized(reports["quantize"])
        print(f"next: `pw serve {quote(str(path))}`")


def quantize(
    model: Model,
    widths: Widths,
    calibration: Calibration,
    common: Common,
    output: Output = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    download: Download = False,
) -> None:
    """Turn the experts into nested bit-planes with a lookup table per width."""
    config = widths.config(calibration)
    path = output or default_output(model)
    fetch(model, download)
    if dry_run:
        plan(model, path, config, calibration.device, common, overwrite=overwrite)
        return
    calibration.use_cores()

    from pw_pipelines import quantize as stage

    with _telling_what_is_kept(path):
        report = stage.run(
            model,
            path,
            config,
            progress_of(common),
            overwrite=overwrite,
            device=calibration.device,
        )
    if common.json:
        print_json(report)
    else:
        _print_quantized(report)


def _print_quantized(report: QuantizeReport) -> None:
    print(f"{report.path}: {report.blocks} blocks at {report.min_bits} to {report.max_bits} bits")
    print_widths(report.dense_bytes, report.bytes_by_width)
    print("  (planes and tables; in memory they fill whole pages, and `pw eval` counts those)")
    coverage = ", ".join(f"{count} {name}" for name, count in report.coverage.items())
    print(f"  calibration tokens  {report.tokens:>12,}, experts: {coverage}")


def sensitivity(
    artifact: Artifact,
    calibration: Calibration,
    common: Common,
    source: Source = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure what each block costs at each width, in one unit over all layers."""
    config = calibration.config()
    path = artifact_path(artifact, quiet=common.quiet)
    calibration.use_cores()

    from pw_pipelines import sensitivity as stage

    report = stage.run(
        path,
        config,
        progress_of(common),
        model=source,
        overwrite=overwrite,
        device=calibration.device,
    )
    if common.json:
        print_json(report)


def trace(
    artifact: Artifact,
    calibration: Calibration,
    common: Common,
    source: Source = None,
    overwrite: Overwrite = False,
) -> None:
    """Record which experts each calibration prompt uses, and what residuals it has."""
    config = calibration.config()
    path = artifact_path(artifact, quiet=common.quiet)
    calibration.use_cores()

    from pw_pipelines import trace as stage

    report = stage.run(
        path,
        config,
        progress_of(common),
        model=source,
        overwrite=overwrite,
        device=calibration.device,
    )
    if common.json:
        print_json(report)


def tune(
    artifact: Artifact,
    common: Common,
    bits: Annotated[
        float,
        typer.Option("--bits", "-b", help="The planner has the bytes of uniform widths of these."),
    ] = TuneConfig.bits,
    distill: Annotated[
        int,
        typer.Option(
            help="Then train codes and tables on the divergence, so many steps; 240 on a GPU."
        ),
    ] = TuneConfig.distill,
    distill_text: Annotated[
        str,
        typer.Option(
            help="With --distill, more text to train on: .jsonl or .txt; never the text that the "
            "result is evaluated on.",
            show_default="none",
        ),
    ] = TuneConfig.distill_text,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The new folder.", show_default="<name>.tuned.pw"),
    ] = None,
    source: Source = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Make an artifact again with codebooks fitted for the widths that the planner gives.

    Less loss at the same bytes where widths are planned; fixed widths gain less, wide ones lose a
    little. Stopped at any moment, the same command goes on where it was (a training begins anew).
    Several processes share the work, as with `pw calibrate`, but for the training.
    """
    from pw_pipelines import tune as stage
    from pw_pipelines.ranks import Ranks

    path = artifact_path(artifact, quiet=common.quiet)
    out, ranks = output or Path(f"{path.stem}.tuned.pw"), Ranks.join()
    progress = progress_of(common, quiet=not ranks.first)
    with _telling_what_is_kept(out):
        report = stage.run(
            path,
            out,
            TuneConfig(bits, distill, distill_text),
            progress,
            model=source,
            overwrite=overwrite,
            device=device,
            ranks=ranks,
        )
    ranks.leave()
    if not ranks.first:
        return
    if common.json:
        print_json(report)
    else:
        _print_tuned(report)


def _print_tuned(report: TuneReport) -> None:
    blocks = ", ".join(f"{count} at {width} bits" for width, count in report.blocks.items())
    print(f"{report.path}: tuned for the bytes of {report.bits:g} bits: {blocks}")
    print(
        f"  predicted rise of the loss there {report.damage_before:+.5f} before, "
        f"{report.damage_after:+.5f} after, nats a token"
    )
    print(f"next: `pw serve {quote(str(report.path))}`")


def fit_residuals(artifact: Artifact, common: Common, overwrite: Overwrite = False) -> None:
    """Fit the heads that predict a prompt's residuals; those that lose to zero are dropped."""
    report = fit(artifact_path(artifact, quiet=common.quiet), common, overwrite=overwrite)
    if common.json:
        print_json(report)


def export(
    artifact: Artifact,
    bits: Annotated[int, typer.Option("--bits", "-b", help="Width of all experts.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The checkpoint's folder.")],
    common: Common,
) -> None:
    """Write an artifact as a Hugging Face checkpoint with dequantized experts of one width."""
    path = artifact_path(artifact, quiet=common.quiet)

    from pw_pipelines import export as stage

    report = stage.run(path, output, bits, progress_of(common))
    if common.json:
        print_json(report)
    else:
        print(
            f"{report.path}: {report.architecture} with experts of {report.bits} bits, "
            f"{report.tensors} tensors in {report.files} files, {format_bytes(report.bytes)}"
        )
