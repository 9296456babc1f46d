"""How a stage says how far it is: a bar with time left, plain lines, JSON lines or nothing.

Everything goes to stderr, so that stdout stays the result. Knows nothing of the stages.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

Advance = Callable[[int], None]  # call with the number of units done since the last call

_SECONDS_BETWEEN_LINES = 5.0


class Style(Enum):
    """How progress is shown."""

    QUIET = "quiet"
    PLAIN = "plain"
    BAR = "bar"
    JSON = "json"


class Progress:
    """Reports the stages of one command.

    Args:
        style: How to show progress; None = a bar on a terminal, plain lines elsewhere.
        verbose: Also show `detail` messages.
        stream: Where to write; default stderr.
        clock: Seconds, for tests.
    """

    def __init__(
        self,
        style: Style | None = None,
        *,
        verbose: bool = False,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self.style = style or (Style.BAR if self._stream.isatty() else Style.PLAIN)
        self._verbose = verbose
        self._clock = clock
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True, markup=False)

    def note(self, message: str) -> None:
        """Say one thing that the user should know (not with `-q`)."""
        if self.style is Style.JSON:
            self._event(event="note", message=message)
        elif self.style is not Style.QUIET:
            self._console.print(message)

    def warn(self, message: str) -> None:
        """Say one thing that may spoil the result (not with `-q`)."""
        if self.style is Style.JSON:
            self._event(event="warning", message=message)
        elif self.style is not Style.QUIET:
            self._console.print(f"warning: {message}")

    def detail(self, message: str) -> None:
        """Say one thing that only `-v` shows."""
        if self._verbose:
            self.note(message)

    @contextmanager
    def stage(self, name: str, total: int, unit: str) -> Iterator[Advance]:
        """Follow `total` units of work; the block gets a function to call as they are done.

        A block that ends with fewer of them is not said to have done all.
        """
        started, done = self._clock(), 0
        tracker = {
            Style.BAR: self._bar,
            Style.PLAIN: self._lines,
            Style.JSON: self._json,
            Style.QUIET: self._silence,
        }[self.style]
        with tracker(name, total, unit) as advance:

            def count_and_show(count: int) -> None:
                nonlocal done
                done += count
                advance(count)

            yield count_and_show
        if self.style in (Style.BAR, Style.PLAIN):
            units = f"{total}" if done >= total else f"{done} of {total}"
            self.note(f"{name}: {units} {unit} in {self._clock() - started:.1f} s")
        elif self.style is Style.JSON:
            short = {"done": done} if done < total else {}
            self._event(event="done", stage=name, total=total, unit=unit, **short)

    @contextmanager
    def _silence(self, _name: str, _total: int, _unit: str) -> Iterator[Advance]:
        yield lambda _count: None

    @contextmanager
    def _bar(self, name: str, total: int, unit: str) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.advance(task, count)

    @contextmanager
    def _lines(self, name: str, total: int, unit: str) -> Iterator[Advance]:
        def show(done: int, seconds_left: float) -> None:
            self._console.print(f"{name}: {done}/{total} {unit}, {seconds_left:.0f} s left")

        yield self._counter(total, show)

    @contextmanager
    def _json(self, name: str, total: int, unit: str) -> Iterator[Advance]:
        def show(done: int, seconds_left: float) -> None:
            self._event(
                event="progress",
                stage=name,
                done=done,
                total=total,
                unit=unit,
                seconds_left=round(seconds_left, 1),
            )

        show(0, 0.0)
        yield self._counter(total, show)

    def _counter(self, total: int, show: Callable[[int, float], None]) -> Advance:
        """An advance function that calls `show` every few seconds while work remains."""
        started = shown = self._clock()
        done = 0

        def advance(count: int) -> None:
            nonlocal done, shown
            done += count
            now = self._clock()
            if done < total and now - shown >= _SECONDS_BETWEEN_LINES:
                shown = now
                show(done, (now - started) / done * (total - done))

        return advance

    def _event(self, **fields: object) -> None:
        print(json.dumps(fields), file=self._stream, flush=True)
