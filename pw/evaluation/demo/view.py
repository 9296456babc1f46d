"""The demo's live picture: where the pages are, how wide the experts are, what runs.

A picture that repaints itself on a terminal, a line now and then elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pw.evaluation.demo.timeline import Sample, Timeline

WEIGHTS, KV, FREE, BITS = "#4269d0", "#ff8a3d", "#d5d9e0", "#2a8a4a"  # as in the plot
_WIDTH = 64  # characters of the bar and of the history
_SPARK = "▁▂▃▄▅▆▇█"
_SECONDS_BETWEEN_LINES = 1.0
_PLANS_SHOWN = 4


class View:
    """Shows a timeline as it grows.

    Args:
        console: Where.
        requests: How many the load will send.
    """

    def __init__(self, console: Console, requests: int) -> None:
        self._console, self._requests = console, requests
        self._live: Live | None = None
        self._next_line = 0.0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Paint for the length of the block; the last picture stays."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, refresh_per_second=10) as self._live:
            yield
        self._live = None

    def show(self, timeline: Timeline) -> None:
        """Show the newest sample."""
        if self._live is not None:
            self._live.update(picture(timeline, self._requests))
        elif not self._console.is_terminal and timeline.last.seconds >= self._next_line:
            self._next_line = timeline.last.seconds + _SECONDS_BETWEEN_LINES
            self._console.print(line(timeline, self._requests), markup=False, soft_wrap=True)


def line(timeline: Timeline, requests: int) -> str:
    """The newest sample in one line."""
    sample = timeline.last
    return (
        f"{sample.seconds:6.1f} s  {bar(sample, 30).plain}  "
        f"weights {mebibytes(sample, sample.pages_weights):4.2f} MiB at {sample.mean_bits:.2f} "
        f"bits, KV {mebibytes(sample, sample.pages_kv):4.2f}, "
        f"free {mebibytes(sample, sample.pages_free):4.2f} | running {sample.running}, "
        f"waiting {sample.waiting}, finished {timeline.finished}/{requests}, "
        f"preempted {sample.preemptions}"
    )


def picture(timeline: Timeline, requests: int) -> Panel:
    """The newest sample and what led to it."""
    sample = timeline.last
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row("pages", bar(sample, _WIDTH))
    legend = Text()
    for name, colour, pages in (
        ("weights", WEIGHTS, sample.pages_weights),
        ("KV cache", KV, sample.pages_kv),
        ("free", FREE, sample.pages_free),
    ):
        legend.append("█ ", colour)
        legend.append(f"{name} {mebibytes(sample, pages):.2f} MiB   ")
    grid.add_row("", legend)
    grid.add_row("bits", Text(sparkline(timeline), BITS))
    layers = " ".join(f"{bits:.2f}" for bits in sample.layer_bits.values())
    grid.add_row("", f"mean {sample.mean_bits:.2f}   layers {layers}")
    grid.add_row(
        "requests",
        f"running {sample.running}   waiting {sample.waiting}   "
        f"finished {timeline.finished} of {requests}   failed {sample.failed}   "
        f"preempted {sample.preemptions}",
    )
    name = timeline.marks[-1][1] if timeline.marks else "start"
    return Panel(
        Group(grid, _plans(sample)),
        title=f"{name}, {sample.seconds:.0f} s",
        subtitle=f"bytes over budget: {sample.bytes_over_budget}",
        width=_WIDTH + 18,
    )


def _plans(sample: Sample) -> Text:
    """The latest plans, newest first, always as many lines."""
    text = Text()
    latest = list(reversed(sample.plan_history[-_PLANS_SHOWN:]))
    for row in range(_PLANS_SHOWN):
        record = latest[row] if row < len(latest) else None
        text.append("\n")
        if record is not None:
            text.append(
                f"step {record['step']:>5}  {record['reason']:<14} {record['moves']:>3} moves, "
                f"{record['pages']:>4} pages, then {record['mean_bits']:.2f} bits",
                style="dim" if row else "",
            )
    return text


def bar(sample: Sample, width: int) -> Text:
    """The arena as a bar of characters: weights, KV, free."""
    text = Text()
    edge = pages = 0
    for character, colour, count in (
        ("█", WEIGHTS, sample.pages_weights),
        ("▓", KV, sample.pages_kv),
        ("·", FREE, sample.pages_total - sample.pages_weights - sample.pages_kv),
    ):
        pages += count
        end = round(width * pages / sample.pages_total)
        text.append(character * (end - edge), colour)
        edge = end
    return text


def sparkline(timeline: Timeline, width: int = _WIDTH) -> str:
    """Mean bits of the latest samples, the widest seen at the top, the narrowest at the bottom."""
    recent = [sample.mean_bits for sample in timeline.samples[-width:]]
    low, high = timeline.least_bits(), max(sample.mean_bits for sample in timeline.samples)
    span = (high - low) or 1.0
    return "".join(_SPARK[round((bits - low) / span * (len(_SPARK) - 1))] for bits in recent)


def mebibytes(sample: Sample, pages: int) -> float:
    """Pages as MiB."""
    return pages * sample.page_bytes / 2**20
