"""What a server holds, seen from outside: its own books, and the memory of its processes."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Processes:
    """The processes of one server."""

    server: int
    engine: int

    @classmethod
    def of_this_child(cls) -> Processes:
        """The one server that this process has started."""
        [server] = _children(os.getpid())
        engine = next(
            pid for pid in _children(server) if "pw.engine.process.worker" in _command(pid)
        )
        return cls(server, engine)

    def rss(self) -> tuple[int, int]:
        """Resident bytes of server and engine."""
        return _rss(self.server), _rss(self.engine)

    def cpu(self) -> CpuTimes:
        """What they, and processes that have ended, and the whole machine have used so far."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        fields = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
        return CpuTimes(
            server=_cpu(self.server),
            engine=_cpu(self.engine),
            load=ended.ru_utime + ended.ru_stime,
            machine=(sum(fields) - fields[3] - fields[4]) / TICKS,  # neither idle nor waiting
            at=time.monotonic(),
        )


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds up to a moment."""

    server: float
    engine: float
    load: float
    machine: float
    at: float

    def cores_since(self, before: CpuTimes) -> dict[str, float]:
        """Cores that each took on average, and those that went to others."""
        spent = {name: value - getattr(before, name) for name, value in vars(self).items()}
        seconds, machine = spent.pop("at"), spent.pop("machine")
        spent["others"] = max(0.0, machine - sum(spent.values()))
        return {name: round(value / seconds, 2) for name, value in spent.items()}


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


@dataclass
class Rest:
    """A server with nothing to do."""

    status: dict[str, Any]
    rss: tuple[int, int]  # bytes: server, engine
    text: str  # of the same greedy request


@dataclass
class Watch:
    """Reads the server's status once a second until stopped."""

    client: httpx.AsyncClient
    processes: Processes
    least_bits: float = 16.0
    most_kv: int = 0  # pages
    most_running: int = 0
    most_waiting: int = 0
    over_budget: int = 0  # bytes
    not_ready: int = 0  # answers of /health/ready other than 200
    slowest_health: float = 0.0  # seconds
    looks: int = 0
    rss_mib: list[list[float]] = field(default_factory=list)  # each minute: server, engine
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Look until `stop`."""
        while not self._stopped.is_set():
            if self.looks % 60 == 0:
                self.rss_mib.append([round(size / 2**20, 1) for size in self.processes.rss()])
            status = await read_status(self.client)
            self.looks += 1
            self.least_bits = min(self.least_bits, status["mean_bits"])
            self.most_kv = max(self.most_kv, status["pages_kv"])
            self.most_running = max(self.most_running, status["running"])
            self.most_waiting = max(self.most_waiting, status["waiting"])
            self.over_budget = max(self.over_budget, status["bytes_over_budget"])
            begin = time.monotonic()
            ready = await self.client.get("/health/ready")
            self.slowest_health = max(self.slowest_health, time.monotonic() - begin)
            self.not_ready += ready.status_code != httpx.codes.OK
            try:
                await asyncio.wait_for(self._stopped.wait(), 1.0)
            except TimeoutError:
                continue

    def stop(self) -> None:
        """End `run` after its present look."""
        self._stopped.set()

    def figures(self) -> dict[str, Any]:
        """What was seen."""
        seen = {k: v for k, v in vars(self).items() if isinstance(v, int | float)}
        return {k: round(v, 3) for k, v in seen.items()}


async def read_status(client: httpx.AsyncClient) -> dict[str, Any]:
    """`/v1/pw/status`."""
    answer = await client.get("/v1/pw/status")
    answer.raise_for_status()
    status: dict[str, Any] = answer.json()
    return status


async def rest(client: httpx.AsyncClient, processes: Processes, seconds: float = 120.0) -> Rest:
    """Wait until nothing has run or moved for five seconds, ask for an answer, then look.

    An answer while planes were still moving would say nothing about those of equal widths: it is
    asked for again.

    Raises:
        TimeoutError: It does not come to rest.
    """
    deadline = time.monotonic() + seconds
    while True:
        before = await _calm(client, deadline)
        answer = await client.post(
            "/v1/completions", json={"prompt": "The town of", "max_tokens": 24, "temperature": 0}
        )
        answer.raise_for_status()
        after = await _calm(client, deadline)
        if all(before[name] == after[name] for name in ("transitions", "mean_bits")):
            text = str(answer.json()["choices"][0]["text"])
            return Rest(after, processes.rss(), text)


async def _calm(client: httpx.AsyncClient, deadline: float) -> dict[str, Any]:
    """The status when it has been the same for five seconds, with nothing to do."""
    last: tuple[float, int] | None = None
    calm = 0
    while True:
        status = await read_status(client)
        busy = status["open_sequences"] or status["running"] or status["moves_in_flight"]
        seen = (status["mean_bits"], status["transitions"])
        calm = 0 if busy or status["pages_kv"] or seen != last else calm + 1
        last = seen
        if calm >= 5:
            return status
        if time.monotonic() > deadline:
            raise TimeoutError(f"not at rest: {status}")
        await asyncio.sleep(1.0)
