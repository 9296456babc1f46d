"""Ten times what a server can do: what it still does, and how fast it refuses the rest."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from tests.soak.flood import Rate
from tests.soak.watching import Processes, Watch

REJECT_MS, GOODPUT, RECOVERY_SECONDS = 50.0, 0.9, 5.0
TIMES_THE_PEAK = 10


async def overload(
    client: httpx.AsyncClient, vocabulary: int, concurrency: int, seconds: float
) -> dict[str, Any]:
    """Peak, ten times the peak, and what comes after; the load is made by another process.

    Args:
        client: Knows the server.
        vocabulary: Of its model.
        concurrency: Requests at a time of the closed loop that measures the peak.
        seconds: Of the flood; the peak is measured for a third of it.
    """
    processes = Processes.of_this_child()
    watch = Watch(client, processes)

    async def load(*arguments: str | float) -> Rate:
        return await _load(str(client.base_url), vocabulary, arguments)

    await load("--peak", concurrency, seconds / 20)
    began = processes.cpu()
    peak = await load("--peak", concurrency, seconds / 3)
    between = processes.cpu()
    per_second = peak.answered / peak.seconds
    watching = asyncio.create_task(watch.run())
    flood = await load("--flood", TIMES_THE_PEAK * per_second, seconds, seconds / 6)
    cores = [between.cores_since(began), processes.cpu().cores_since(between)]
    watch.stop()
    await watching
    recovery = await _recovery(client)
    goodput = flood.answered / flood.seconds / per_second
    rejects = _milliseconds(flood.rejected)
    figures = {
        "peak_per_s": round(per_second, 2),
        "sent_per_s": round(TIMES_THE_PEAK * per_second, 2),
        "goodput_of_peak": round(goodput, 3),
        "goodput_of_peak_for_the_engine_s_cpu": round(
            goodput * cores[0]["engine"] / cores[1]["engine"], 3
        ),
        "cores": {"peak": cores[0], "flood": cores[1]},
        "rejected": len(flood.rejected),
        "reject_ms": rejects,
        "connect_ms": _milliseconds(flood.connected),
        "sent_late_ms": round(1e3 * flood.behind, 1),
        "recovery_s": round(recovery, 2),
        "wrong": [*peak.wrong, *flood.wrong][:5],
        "seen": watch.figures(),
    }
    promises = {
        "nothing but answers and 503 with Retry-After": not figures["wrong"],
        "always ready": watch.not_ready == 0,
        f"goodput of {GOODPUT:.0%} of the peak": goodput >= GOODPUT,
        f"p99 of refusals below {REJECT_MS:.0f} ms": 0 < rejects["p99"] < REJECT_MS,
        f"answers within {RECOVERY_SECONDS:.0f} s afterwards": recovery < RECOVERY_SECONDS,
    }
    return figures | {"not_kept": [promise for promise, kept in promises.items() if not kept]}


async def _load(url: str, vocabulary: int, arguments: Sequence[str | float]) -> Rate:
    """Run `tests.soak.flood` to its end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.soak.flood", url, "--vocabulary", str(vocabulary)),
        *map(str, arguments),
        stdout=PIPE,
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the load generator ended with exit code {process.returncode}")
    return Rate(**json.loads(out))


async def _recovery(client: httpx.AsyncClient) -> float:
    """Seconds until a request is answered again; 60 at most."""
    begin = time.monotonic()
    body = {"prompt": "The town of", "max_tokens": 4, "ignore_eos": True}
    while (seconds := time.monotonic() - begin) < 60:
        answer = await client.post("/v1/completions", json=body, timeout=60)
        if answer.status_code == httpx.codes.OK:
            return time.monotonic() - begin
        await asyncio.sleep(0.1)
    return seconds


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    values = np.percentile(seconds, (50, 99, 100)) if seconds else np.zeros(3)
    return {f"p{p}": round(1e3 * value, 1) for p, value in zip((50, 99, 100), values, strict=True)}
