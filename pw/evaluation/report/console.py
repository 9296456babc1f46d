"""The report on a terminal: one policy line by line, several as tables."""

from __future__ import annotations

from pw.config import format_bytes
from pw.evaluation.report.document import BYTE_CLASSES
from pw.evaluation.report.tables import Described, Table, findings, interval, tables, widths


def print_rows(described: Described) -> None:
    """Print what was found on stdout."""
    rows = described["rows"]
    if len(rows) == 1 and rows[0]["error"] is None:
        _print_one(described, rows[0])
        shown = [table for table in tables(described) if table.title not in _LINES]
    else:
        shown = tables(described)
    for table in shown:
        print("\n".join(_lines(table)) + "\n")
    for row in rows:
        if row.get("against_baseline") and len(rows) > 1:
            print(f"{row['policy']}: {_baseline(row)}")
    for finding in findings(described):
        print(finding.sentence)


_LINES = ("Quality and bytes", "Bytes by class")  # tables that `_print_one` replaces


def _print_one(described: Described, row: Described) -> None:
    nll, held, text = row["nll"], row["bytes"], described["text"]
    print(f"policy      {row['policy']}, mean {row['mean_bits']:.2f} bits ({widths(row)})")
    print(f"perplexity  {row['perplexity']:.3f}")
    print(
        f"nll         {interval(nll, sign=False)} nats a token, {text['chunks']} chunks of "
        f"{text['chunk_tokens']} tokens"
    )
    if row.get("against_baseline"):
        print(f"difference  {_baseline(row)}")
    used = held["total"] - held["free"]
    sizes = {name: format_bytes(held[name]) for name in ("free", "budget")}
    print(f"bytes       {format_bytes(used)} used, {sizes['free']} free, budget {sizes['budget']}")
    for name, meaning in BYTE_CLASSES.items():
        if held[name]:
            print(f"  {name:<14}{format_bytes(held[name]):>12}  {meaning}")
    most = format_bytes(row["kv_peak_bytes"])
    print(f"  {'KV at most':<14}{most:>12}  the others are means over steps")
    print(f"over budget {format_bytes(row['bytes_over_budget'])}")


def _baseline(row: Described) -> str:
    found = row["against_baseline"]
    return f"{interval(found['nll'])} nats a token against the baseline ({found['policy']})"


def _lines(table: Table) -> list[str]:
    """A table in columns of equal width."""
    cells = (table.columns, *table.rows)
    sizes = [max(len(row[place]) for row in cells) for place in range(len(table.columns))]
    lines = [table.title]
    for row in cells:
        parts = [
            cell.ljust(size) if place < table.words else cell.rjust(size)
            for place, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    lines += [table.note] if table.note else []
    width = max((len(name) for name, _ in table.legend), default=0)
    return lines + [f"  {name.ljust(width)}  {meaning}" for name, meaning in table.legend]
