"""What `--dry-run` says: sizes of an artifact, and what each stage would take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pw.cli.command import print_json
from pw.cli.options import Common
from pw.config import QuantizeConfig, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pw_pipelines.dry_run import DryRunReport
    from pw_pipelines.needs import StageNeeds


def plan(
    model: str,
    path: Path,
    config: QuantizeConfig,
    device: str,
    common: Common,
    *,
    overwrite: bool,
) -> None:
    """Say what `pw quantize` would do; MODEL may be a config alone."""
    from pw_pipelines import dry_run

    file = Path(model)
    if file.suffix == ".json" and file.is_file():
        report = dry_run.run_config(model, file, path, config, device=device)
    else:
        report = dry_run.run(model, path, config, overwrite=overwrite, device=device)
    print_plan(report, common, {})


def print_plan(report: DryRunReport, common: Common, more: Mapping[str, str]) -> None:
    """Print a plan; `more` has the stages that read no model, with what they do."""
    if common.json:
        from pw.store.manifest import plain

        described: dict[str, Any] = plain(report)
        print_json(described | {"more_stages": dict(more)} if more else described)
        return
    if report.config_file is not None:
        print(f"checkpoint is not here: `{report.model}`: planned from its config alone,")
        print(f"`{report.config_file}`; the text counts as long enough, nothing is compared")
    print(f"{report.model} ({report.architecture}) -> {report.output}: {report.blocks} blocks")
    for module, blocks in report.plan.items():
        tiles = "x".join(str(n) for n in blocks.padded)
        print(
            f"  {blocks.count} {module} blocks {blocks.rows}x{blocks.cols}, stored as {tiles}: "
            f"bits {report.min_bits} to {report.max_bits}, tables {report.lut_dtype}"
        )
    print_widths(report.dense_bytes, report.bytes_by_width)
    for title, groups in (
        ("left alone, copied byte for byte", report.left_alone),
        ("not copied, no part of the text model", report.not_copied),
    ):
        if groups:
            print(f"{title}: {format_bytes(sum(group.bytes for group in groups))}")
        for group in groups:
            print(f"  {group.count:>4} {group.name}  {format_bytes(group.bytes)}")
    print(f"calibration: {report.samples} samples, {report.tokens:,} tokens")
    _print_stages(report.stages, more)
    print(f"memory: about {_beside(report.memory_bytes, report.memory_there)} there")
    print(f"disk: {_beside(report.disk_bytes, report.disk_free)} free")


def print_widths(dense: int, bytes_by_width: Mapping[int, int]) -> None:
    """Bytes of all experts, unquantized and at each width."""
    print(f"  experts unquantized {format_bytes(dense):>12}")
    for bits, size in bytes_by_width.items():
        print(f"  at {bits} bits           {format_bytes(size):>12}  {size / dense:.0%}")


def _print_stages(stages: Sequence[StageNeeds], more: Mapping[str, str]) -> None:
    print("stages              memory     scratch       reads  products and fits at this moment's")
    print("                                                    speed; reading and writing on top")
    for stage in stages:
        parts = ", ".join(f"{name} {format_seconds(each)}" for name, each in stage.seconds.items())
        sizes = (stage.memory_bytes, stage.scratch_bytes, stage.read_bytes)
        shown = "  ".join(f"{format_bytes(size):>10}" for size in sizes)
        print(f"  {stage.stage:<14}{shown}  {parts}")
    for name, what in more.items():
        print(f"  {name:<14}{what}")


def _beside(needed: int, there: int) -> str:
    """What is needed and what there is, and whether that is too little."""
    lacking = "TOO LITTLE, " if there < needed else ""
    return f"{format_bytes(needed)}, {lacking}{format_bytes(there)}"
