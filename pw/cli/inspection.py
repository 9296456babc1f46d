"""Commands that only look: inspect an artifact, describe the environment."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pw import __version__
from pw.cli.command import print_json
from pw.cli.locate import artifact_path, cache_home
from pw.cli.options import Common
from pw.config import format_bytes
from pw.errors import StoreError

_LIBRARIES = (
    "torch",
    "transformers",
    "triton",
    "numba",
    "numpy",
    "zarr",
    "safetensors",
    "scikit-learn",
    "fastapi",
    "uvicorn",
    "typer",
)


def inspect(
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="A folder, or `tiny`.")],
    common: Common,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything and check every checksum.")
    ] = False,
) -> None:
    """Show what an artifact holds: sizes, widths, provenance, coverage, stages."""
    path = artifact_path(artifact, quiet=common.quiet)
    findings = []
    if verify:
        from pw.store.verify import verify as find_faults

        findings = find_faults(path)
    if findings:
        if common.json:
            print_json({"path": str(path), "findings": [str(finding) for finding in findings]})
        else:
            for finding in findings:
                print(finding)
        raise StoreError(
            f"artifact is damaged: {len(findings)} finding{'s' * (len(findings) > 1)}: `{path}`",
            "quantize again with --overwrite, or copy the artifact again",
        )
    from pw.store import Artifact, describe

    described = describe(Artifact.open(path))
    if common.json:
        print_json(described | ({"findings": []} if verify else {}))
        return
    _print_description(described)
    if verify:
        print("verified: every byte matches its checksum")


def _print_description(described: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    model, geometry = described["model"], described["geometry"]
    for label, value in (
        ("artifact", f"{described['path']}  (sha256 {described['artifact_hash'][:16]})"),
        ("model", f"{model['name']}  {model['architecture']}  {model['revision']}".rstrip()),
        ("source", model["source"]),
        (
            "made by",
            f"pagedweight {described['tool_version']}, format {described['format_version']}",
        ),
        (
            "experts",
            f"{len(geometry['layers'])} layers x {geometry['experts']} experts, "
            f"top {geometry['top_k']}, {geometry['weights']:,} weights",
        ),
        ("widths", f"{described['min_bits']} to {described['max_bits']} bits"),
        ("coverage", _coverage_line(described["coverage"])),
        ("stages", ", ".join(described["stages"])),
        *_tuned_line(described["stages"]),
    ):
        console.print(f"{label:<10}{value}", markup=False)
    console.print()
    console.print(_sizes_table(described["bytes"]))
    console.print(_widths_table(described["widths"]))


def _coverage_line(coverage: dict[str, Any] | None) -> str:
    if coverage is None:
        return "not measured"
    return ", ".join(f"{kind['experts']} {name}" for name, kind in coverage.items())


def _tuned_line(stages: dict[str, Any]) -> list[tuple[str, str]]:
    """For which widths the codebooks were fitted; nothing where all count alike."""
    focus = stages["quantize"]["settings"].get("focus")
    if not isinstance(focus, dict) or not isinstance(focus.get("widths"), dict):
        return []
    digits = "".join(map(str, focus["widths"].values()))
    blocks = ", ".join(f"{digits.count(digit)} at {digit}" for digit in sorted(set(digits)))
    return [("tuned", f"for the bytes of {focus.get('bits')} bits; blocks: {blocks} bits")]


def _sizes_table(sizes: dict[str, int]) -> Table:
    table = Table("class", title="bytes on disk", title_justify="left")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for name, size in sizes.items():
        table.add_row(name, f"{size:,}", f"{size / sizes['total']:.1%}")
    return table


def _widths_table(widths: dict[str, dict[str, float]]) -> Table:
    table = Table("bits", title="experts at one width, in bytes", title_justify="left")
    for heading in ("planes", "LUTs", "total", "bits a weight"):
        table.add_column(heading, justify="right")
    for bits, row in widths.items():
        cells = (f"{int(row[name]):,}" for name in ("planes", "luts", "total"))
        table.add_row(bits, *cells, f"{row['weight_bits']:.2f}")
    return table


def env(common: Common) -> None:
    """Print what a bug report needs: versions, machine, devices."""
    described = _environment()
    if common.json:
        print_json(described)
        return
    for name, value in described.items():
        shown = ", ".join(value) or "none" if isinstance(value, list) else value
        print(f"{name:<14}{shown}")


def _environment() -> dict[str, Any]:
    import torch

    from pw_kernels.dispatch import available_backends

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = torch.cuda.get_device_properties
    devices = [
        f"{torch.cuda.get_device_name(i)} ({format_bytes(properties(i).total_memory)})"
        for i in range(torch.cuda.device_count())
    ]
    return {
        "pagedweight": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cpu cores": os.cpu_count(),
        "memory": format_bytes(memory),
        "cuda": torch.version.cuda or "not in this build of torch",
        "devices": devices,
        "backends": list(available_backends()),
        "cache": str(cache_home()),
        **{name: _version(name) for name in _LIBRARIES},
        "variables": sorted(name for name in os.environ if name.startswith("PW_")),
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
