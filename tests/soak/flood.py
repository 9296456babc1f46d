"""A load generator that costs little: run as a process of its own, it prints its figures as JSON.

    python -m tests.soak.flood http://127.0.0.1:8000 --vocabulary 4096 --peak 32 20
    python -m tests.soak.flood http://127.0.0.1:8000 --vocabulary 4096 --flood 160 60 10

A client library takes longer for a request than a server for its refusal; on shared cores it would
measure itself. So this one speaks just enough HTTP/1.1, over connections that it keeps, and makes
way for the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

PROMPT, ANSWER = 32, 64  # tokens of every request
PATIENCE = 120.0  # seconds
NICENESS = 5


@dataclass
class Rate:
    """What came of requests sent in some way."""

    seconds: float = 0.0
    answered: int = 0  # in full, in that time
    rejected: list[float] = field(default_factory=list)  # seconds until the last byte of the 503
    connected: list[float] = field(default_factory=list)  # seconds until a new connection was taken
    behind: float = 0.0  # seconds by which a request was sent later than planned, at most
    wrong: list[str] = field(default_factory=list)


class Connections:
    """Keep-alive connections to one server, as many as are needed at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(
        self, body: bytes, connected: list[float]
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers, body of the answer to one completion.

        Raises:
            OSError: The connection broke.
            EOFError: It was closed before the answer's end.
        """
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            begin = time.monotonic()
            reader, writer = await asyncio.open_connection(*self._address)
            connected.append(time.monotonic() - begin)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            head, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
            headers = dict(line.split(b": ", 1) for line in lines)
            answer = await reader.readexactly(int(headers[b"content-length"]))
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer))
        return int(head.split()[1]), headers, answer


class Sender:
    """Sends requests of one shape.

    Args:
        url: Of the server.
        vocabulary: Of its model.
    """

    def __init__(self, url: str, vocabulary: int) -> None:
        self._connections, self._vocabulary = Connections(url), vocabulary
        self._chance = random.Random(0)

    async def peak(self, concurrency: int, seconds: float) -> Rate:
        """Closed loop: so many requests at a time, for so long."""
        rate, begin = Rate(seconds), time.monotonic()

        async def user() -> None:
            while time.monotonic() < begin + seconds:
                await self._one(rate, begin + seconds)

        await asyncio.gather(*(user() for _ in range(concurrency)))
        return rate

    async def flood(self, per_second: float, seconds: float, warm_up: float) -> Rate:
        """Open loop: Poisson arrivals, whatever becomes of them; counted after a warm-up."""
        rate, begin = Rate(seconds - warm_up), time.monotonic()
        moment, tasks = begin, []
        while moment < begin + seconds:
            await asyncio.sleep(max(0.0, moment - time.monotonic()))
            rate.behind = max(rate.behind, time.monotonic() - moment)
            tasks.append(asyncio.create_task(self._one(rate, begin + seconds, begin + warm_up)))
            moment += self._chance.expovariate(per_second)
        await asyncio.gather(*tasks)
        return rate

    async def _one(self, rate: Rate, until: float, since: float = 0.0) -> None:
        prompt = self._chance.choices(range(self._vocabulary), k=PROMPT)
        body = {"prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True}
        data, begin = json.dumps(body).encode(), time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                status, headers, answer = await self._connections.post(data, rate.connected)
        except (OSError, EOFError, TimeoutError) as error:
            rate.wrong.append(repr(error))
            return
        now = time.monotonic()
        if status == 200:
            full = json.loads(answer)["usage"]["completion_tokens"] == ANSWER
            rate.answered += full and since <= now <= until
        elif status == 503 and b"retry-after" in headers:
            rate.rejected.append(now - begin)
        else:
            rate.wrong.append(f"{status}: {answer[:200]!r}")


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser("tests.soak.flood", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--vocabulary", type=int, required=True)
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--peak", nargs=2, type=float, metavar=("CONCURRENCY", "SECONDS"))
    kinds.add_argument("--flood", nargs=3, type=float, metavar=("PER_SECOND", "SECONDS", "WARM_UP"))
    arguments = parser.parse_args()
    os.nice(NICENESS)
    sender = Sender(arguments.url, arguments.vocabulary)
    if arguments.peak:
        rate = asyncio.run(sender.peak(int(arguments.peak[0]), arguments.peak[1]))
    else:
        rate = asyncio.run(sender.flood(*arguments.flood))
    json.dump(asdict(rate), sys.stdout)


if __name__ == "__main__":
    main()
