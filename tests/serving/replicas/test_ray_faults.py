"""Two replicas under load, and one of them is killed: its worker, or its engine.

No request may be lost that had not begun to stream; counts are printed (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serving.replicas.cluster import Cluster, cluster
from serving.replicas.users import Tally, load

pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]
USERS = 8


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("faults")
    with cluster(folder, min_replicas=2, max_replicas=2) as made:
        yield made


def under_load(running: Cluster, harm: Callable[[], None], requests: int) -> Tally:
    """Do harm after a third of the requests; the tally of all."""
    done = threading.Event()

    def until(tally: Tally) -> bool:
        if tally.asked * 3 >= requests and not done.is_set():
            done.set()
            harm()
        return tally.asked >= requests

    return asyncio.run(load(running.url, USERS, until))


@pytest.mark.parametrize("victims", ["workers", "engines"])
def test_a_killed_replica_costs_begun_streams_alone(running: Cluster, victims: str) -> None:
    before = running.replicas()
    assert len(before) == 2
    victim: int = getattr(running, victims)()[0]
    begin = time.monotonic()
    tally = under_load(running, lambda: os.kill(victim, signal.SIGKILL), requests=120)
    print(f"\nSIGKILL of one of two {victims}: {tally}; {time.monotonic() - begin:.0f} s")
    assert not tally.lost
    assert tally.answered + tally.broken == tally.asked >= 120
    assert tally.broken <= USERS  # each had one request open
    assert set(tally.statuses) == {200}  # nobody had to ask again
    assert len(set(tally.replicas) & set(before)) == 2
    seconds = running.wait(
        lambda: len(set(running.replicas()) - set(before)) == 1 and len(running.replicas()) == 2,
        120, "replacement",
    )  # fmt: skip
    print(f"a new replica answered {seconds:.0f} s after the last request")
    assert len(running.engines()) == 2  # the killed worker's is gone


def test_with_no_replica_left_clients_are_told_to_come_back(running: Cluster) -> None:
    """Both engines die: a 503 or a wait, and an answer in the end."""
    before, engines = set(running.replicas()), running.engines()

    def harm() -> None:
        for engine in engines:
            os.kill(engine, signal.SIGKILL)

    tally = under_load(running, harm, requests=24)
    print(f"\nSIGKILL of both engines: {tally}")
    assert set(tally.statuses) <= {200, 503}
    running.wait(lambda: len(set(running.replicas()) - before) == 2, 120, "replacement")
    again = asyncio.run(load(running.url, USERS, lambda tally: tally.asked >= 24))
    assert again.answered == again.asked
