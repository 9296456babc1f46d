"""Rows that the studies share: an allocation with its bytes and its distance from others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pw.evaluation.bootstrap import mean_interval, paired_interval
from pw.evaluation.lab.costs import LONG_ROW, bare_costs, mean_bits, total_bytes
from pw.evaluation.lab.lab import Scores
from pw.evaluation.lab.model import Bits
from pw.evaluation.lab.room import Room

Row = dict[str, Any]


def interval(values: NDArray[np.float64], baseline: NDArray[np.float64] | None = None) -> Row:
    """Mean of values, or of values - baseline, with its 95 % interval over windows."""
    if baseline is None:
        found = mean_interval(values.tolist())
    else:
        found = paired_interval(values.tolist(), baseline.tolist())
    kept = asdict(found)
    del kept["level"]
    return {name: round(value, 6) for name, value in kept.items()}


def size(room: Room, bits: Bits) -> Row:
    """Bytes of an allocation by three ways of counting, and its mean width."""
    widths, geometry = room.model.widths, room.model.geometry
    long_rows = bare_costs(geometry, widths, LONG_ROW)
    return {
        "bytes": total_bytes(room.costs, widths, bits),
        "share": round(total_bytes(room.costs, widths, bits) / room.dense_bytes, 4),
        "share_bare": round(
            total_bytes(bare_costs(geometry, widths), widths, bits) / room.dense_bytes, 4
        ),
        "share_long_rows": round(total_bytes(long_rows, widths, bits) / room.dense_bytes, 4),
        "mean_bits": round(mean_bits(geometry, bits), 3),
    }


def compared(scores: Scores, dense: Scores, uniform: Scores) -> Row:
    """Distance from the unquantized model and from uniform widths of the same bytes."""
    lost = float(uniform.excess(dense).mean())
    won = float((uniform.nll - scores.nll).mean())
    return {
        "perplexity": round(scores.perplexity, 4),
        "nll": interval(scores.nll, dense.nll),
        "kl": interval(scores.kl),
        "nll_over_uniform": interval(scores.nll, uniform.nll),
        "kl_over_uniform": interval(scores.kl, uniform.kl),
        "won_back": round(won / lost, 4) if lost > 0 else None,
        "won_back_kl": round(1 - float(scores.kl.mean() / uniform.kl.mean()), 4),
    }


def pivot(
    rows: Sequence[Row], down: str, across: str, cell: Callable[[Row], str], corner: str
) -> str:
    """A table with the values of one key down and of another across; rows that failed say so."""
    names = list(dict.fromkeys(row[down] for row in rows))
    places = list(dict.fromkeys(row[across] for row in rows))
    found = {(row[down], row[across]): "-" if "failed" in row else cell(row) for row in rows}
    lines = [[name, *(found.get((name, place), "-") for place in places)] for name in names]
    return markdown([corner, *(f"{place:g} bits" for place in places)], lines)


def show(row: Row) -> str:
    """`+0.0123 [+0.0101, +0.0145]`."""
    return f"{row['mean']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; numbers of a fraction get three decimals where nothing else was done to them."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
