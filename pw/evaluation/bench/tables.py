"""What the comparison of policies says: ratios of its cells, and tables for people.

python -m pw.evaluation.bench.tables benchmarks/results/matrix.json      # of a saved run
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pw.config import format_bytes
from pw.evaluation.bench.profile import CLASSES

_HEADS = (
    "policy", "batch", "context", "tokens/s", "step p50, ms", "p99, ms", "in turn, ms",
    "device, ms", "first token, ms", "mean bits", "experts read", "floor, ms", "step / floor",
)  # fmt: skip
_CLASSES = ("planes", "luts", "experts_dense", "dense", "kv", "free", "tables", "workspace", "host")


def _measured(cells: Iterable[dict[str, Any]]) -> dict[tuple[str, int, int], dict[str, Any]]:
    return {
        (cell["policy"], cell["batch"], cell["context"]): cell
        for cell in cells
        if "left_out" not in cell
    }


def speedups(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens a second of each cell over those of the unquantized experts."""
    found = _measured(cells)
    return [
        {"policy": policy, "batch": batch, "context": context}
        | {"speedup": cell["tokens_per_second"] / dense["tokens_per_second"]}
        for (policy, batch, context), cell in found.items()
        if policy != "dense" and (dense := found.get(("dense", batch, context)))
    ]


def at_equal_bytes(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps and bytes of planned widths, adaptive or held, over those of uniform widths."""
    found = _measured(cells)
    rows = []
    for (policy, batch, context), cell in found.items():
        kind, _, bits = policy.partition(":")
        uniform = found.get((f"static:{bits}", batch, context))
        if kind not in ("adaptive", "held") or uniform is None:
            continue
        mine, its = cell["bytes"], uniform["bytes"]
        rows.append(
            {"policy": policy, "batch": batch, "context": context}
            | {"step_ratio": cell["itl_p50_ms"] / uniform["itl_p50_ms"]}
            | {"weight_bytes_ratio": _weights(mine) / _weights(its)}
            | {"total_bytes_ratio": _used(mine) / _used(its)}
            | {"read_bytes_ratio": cell["read_bytes"]["total"] / uniform["read_bytes"]["total"]}
        )
    return rows


def _weights(sizes: dict[str, int]) -> int:
    return sizes["planes"] + sizes["luts"]


def _used(sizes: dict[str, int]) -> int:
    return sum(
        sizes[name]
        for name in ("planes", "luts", "experts_dense", "dense", "kv", "tables", "workspace")
    )


def head() -> str:
    """The names of the columns of `line`."""
    return f"| {' | '.join(_HEADS)} |"


def line(cell: dict[str, Any]) -> str:
    """A cell as a row of the table."""
    name = f"| {cell['policy']} | {cell.get('batch', '')} | {cell.get('context', '')} "
    if "left_out" in cell:
        return f"{name}| {_why(cell)} |"
    first, turn, device = cell["ttft_ms"], cell["in_turn_p50_ms"], cell["device_ms"]
    return (
        f"{name}| {cell['tokens_per_second']:.0f} | {cell['itl_p50_ms']:.3f} "
        f"| {cell['itl_p99_ms']:.3f} | {'' if turn is None else f'{turn:.3f}'} "
        f"| {'' if device is None else f'{device:.3f}'} "
        f"| {'' if first is None else f'{first:.1f}'} "
        f"| {cell['mean_bits']:.2f} | {cell['experts_read']:.1f} | {cell['floor_ms']:.3f} "
        f"| {cell['over_floor']:.2f} |"
    )


def _why(row: dict[str, Any]) -> str:
    """Why a row has no figures, and what helps."""
    hint = row.get("hint")
    return f"{row['left_out']} ({hint})" if hint else str(row["left_out"])


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What a spreadsheet has of a result: a row for each cell, and for each figure of others.

    Ratios are left out: they are quotients of the rows.
    """
    found = [dict(cell) for cell in result["cells"]]
    found += [
        {"policy": f"transformers, {other['attention']}"} | other
        for other in result.get("transformers", ())
    ]
    for longest in result.get("longest_contexts", ()):
        named = {f"longest_{name}": value for name, value in longest.items() if name != "policy"}
        found.append({"policy": longest["policy"]} | named)
    return [{"model": result["model"]} | row for row in found]


def report(result: dict[str, Any]) -> str:
    """All tables of a result."""
    measured = [cell for cell in result["cells"] if "left_out" not in cell]
    equal = result["adaptive_over_uniform"]
    parts = [_table(_HEADS, map(line, result["cells"]))]
    parts += _by_place(
        "step p50, ms (over its floor)",
        measured,
        lambda cell: f"{cell['itl_p50_ms']:.2f} ({cell['over_floor']:.2f})",
    )
    parts += _by_place(
        "tokens/s over dense", result["speedups_over_dense"], lambda row: f"{row['speedup']:.2f}"
    )
    parts += _by_place("step over uniform widths", equal, lambda row: f"{row['step_ratio']:.3f}")
    parts += _by_place(
        "their bytes over uniform, all", equal, lambda row: f"{row['total_bytes_ratio']:.4f}"
    )
    parts.append(_bytes_table(result["cells"]))
    if any(cell.get("kernels_ms") for cell in result["cells"]):
        parts.append(_kernel_table(result["cells"]))
    if result.get("transformers"):
        heads = ("transformers generate", "context", "tokens/s", "p50, ms", "p99, ms", "first, ms")
        rows = (
            f"| {row['attention']}, {row['experts']} | {row['context']} "
            f"| {row['tokens_per_second']:.1f} | {row['itl_p50_ms']:.2f} "
            f"| {row['itl_p99_ms']:.2f} | {row['ttft_ms']:.1f} |"
            for row in result["transformers"]
        )
        parts.append(_table(heads, rows))
    if result.get("longest_contexts"):
        heads = ("longest context", "budget", "tokens", "served", "bits before", "bits with it")
        parts.append(_table(heads, map(_context_line, result["longest_contexts"])))
    if result.get("starts"):
        ready = (f"{row['policy']} {row['seconds']:.1f} s" for row in result["starts"])
        parts.append(f"Ready, prompts of each length computed, after: {', '.join(ready)}.")
    steps = {cell.get("max_num_batched_tokens") for cell in measured} - {None}  # since 2026-11-30
    if steps:
        parts.append(f"Prompts in steps of up to {' or '.join(map(str, sorted(steps)))} tokens.")
    parts += _ending(result)
    return "\n\n".join(parts)


def _ending(result: dict[str, Any]) -> list[str]:
    """What people have to know of a run that did not come to its end, in a line."""
    cells = len(_measured(result["cells"]))
    kept = f"{cells} {'cell' if cells == 1 else 'cells'} measured, the rest is missing"
    if result.get("interrupted"):
        return [f"Interrupted: {kept}."]
    return [f"Failed: {kept}: {result['failed']}"] if "failed" in result else []


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    heads = tuple(heads)
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows])


def _by_place(
    what: str, rows: list[dict[str, Any]], text: Callable[[dict[str, Any]], str]
) -> list[str]:
    """A table with a line for each policy and a column for each batch and context, if any is."""
    places = sorted({(row["context"], row["batch"]) for row in rows})
    found = {(row["policy"], row["context"], row["batch"]): text(row) for row in rows}
    heads = (what, *(f"{batch} x {context}" for context, batch in places))
    lines = [
        f"| {policy} | {' | '.join(found.get((policy, *place), '') for place in places)} |"
        for policy in dict.fromkeys(row["policy"] for row in rows)
    ]
    return [_table(heads, lines)] if rows else []


def _bytes_table(cells: list[dict[str, Any]]) -> str:
    """Bytes by class at each policy's last cell."""
    last = {cell["policy"]: cell for cell in cells if "left_out" not in cell}
    lines = []
    for policy, cell in last.items():
        sizes = (format_bytes(cell["bytes"][name]) for name in _CLASSES)
        lines.append(f"| {policy}, {cell['batch']} x {cell['context']} | {' | '.join(sizes)} |")
    return _table(("bytes of", *_CLASSES), lines)


def _kernel_table(cells: list[dict[str, Any]]) -> str:
    """Milliseconds of the device by class of kernels, and the floor of those that have one."""
    lines = []
    for cell in cells:
        if kernels := cell.get("kernels_ms"):
            floors = cell["kernels_floor_ms"]
            parts = (
                f"{kernels[name]:.3f} ({floors[name]:.3f})"
                if floors[name]
                else f"{kernels[name]:.3f}"
                for name in CLASSES
            )
            name = f"{cell['policy']}, {cell['batch']} x {cell['context']}"
            lines.append(f"| {name} | {' | '.join(parts)} | {sum(kernels.values()):.3f} |")
    return _table(("device, ms (floor)", *CLASSES, "all"), lines)


def _context_line(row: dict[str, Any]) -> str:
    name = f"| {row['policy']} | {format_bytes(row['budget'])} "
    if "left_out" in row:
        return f"{name}| does not fit | {_why(row)} |"
    return (
        f"{name}| {row['context']} | {row['served']} | {row['mean_bits_before']:.2f} "
        f"| {row['mean_bits_with_it']:.2f} |"
    )


if __name__ == "__main__":
    print(*(report(json.loads(Path(name).read_text("utf-8"))) for name in sys.argv[1:]), sep="\n\n")
