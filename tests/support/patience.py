"""How long tests wait, and clocks that do not: nothing here depends on how fast a machine is."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

import httpx

# Seconds; for what comes at once on a machine that is not ten times too slow. Less than pytest's
# own limit for a test, so that who waits in vain says for what.
PATIENCE = 60.0
SLOWER = 10.0

get = partial(httpx.get, timeout=PATIENCE)  # httpx' own patience is five seconds
post = partial(httpx.post, timeout=PATIENCE)
options = partial(httpx.options, timeout=PATIENCE)


def allowed(seconds: float) -> float:
    """The bound for what is promised within `seconds`, on machines far slower than promised for."""
    return SLOWER * seconds


def patiently(pause: float = 0.001) -> Iterator[None]:
    """Turns of a loop that waits for something, so many seconds apart; fails when it waits long."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)  # whoever is waited for may need this core, or Python's lock
    raise AssertionError("waited in vain")


class _Leaping(selectors.SelectSelector):
    """Where it would sleep, time passes at once; each turn takes a microsecond, too."""

    now = 0.0  # seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        self.now += 1e-6 if events else max(1e-6, timeout or 0.0)
        return events


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = _Leaping()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now


def run_in_virtual_time(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` with a clock on which computing takes next to no time and sleeping all."""
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(main)
