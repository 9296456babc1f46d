"""More load brings a replica, less load takes one away when its requests have ended."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from serving.replicas.cluster import cluster
from serving.replicas.users import Tally, load

pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]


def test_replicas_follow_the_queue_and_drain(tmp_path: Path) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4,
               "upscale_delay": 2, "downscale_delay": 4, "look_back_period": 11}  # fmt: skip
    with cluster(tmp_path, **scaling) as running:
        assert len(running.replicas()) == 1
        begin = time.monotonic()

        async def both() -> tuple[Tally, float, Tally, float]:
            many = asyncio.create_task(load(running.url, 12, lambda _: grown.is_set()))
            await reached(2)
            up = time.monotonic() - begin
            grown.set()
            busy = await many
            least, since = asyncio.Event(), time.monotonic()
            few = asyncio.create_task(
                load(running.url, 2, lambda _: least.is_set(), max_tokens=400, stream_every=1)
            )
            await reached(1)
            down = time.monotonic() - since
            least.set()
            return busy, up, await few, down

        async def reached(wanted: int) -> None:
            while len(await asyncio.to_thread(running.replicas)) != wanted:
                assert time.monotonic() - begin < 300, running.log.read_text()[-3000:]
                await asyncio.sleep(0.5)

        grown = asyncio.Event()
        busy, up, few, down = asyncio.run(both())
        print(f"\n12 users, target 4: second replica after {up:.0f} s; {busy}")
        print(f"2 users: one replica left after {down:.0f} s; {few}")
        assert (busy.broken, busy.lost) == (0, [])
        assert (few.broken, few.lost) == (0, [])
        assert few.asked == few.answered > 0
        assert len(few.replicas) == 2  # the one that left had streams, and ended them
        running.wait(lambda: len(running.engines()) == 1, 60, "end of an engine")
