"""Ten times what a server can do: what it still does, and how fast it refuses the rest."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

PROMPT, ANSWER = 32, 64  # tokens of every request


@dataclass
class Rate:
    """What came of requests sent in some way."""

    seconds: float = 0.0
    answered: int = 0  # in that time
    rejected: list[float] = field(default_factory=list)  # seconds until the 503
    wrong: list[str] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        """Requests answered in full."""
        return self.answered / self.seconds

    def reject_ms(self, percentile: float) -> float:
        """Time until the refusal."""
        return float(np.percentile(self.rejected, percentile) * 1e3) if self.rejected else 0.0


class Sender:
    """Sends requests of one shape.

    Args:
        client: Knows the server.
        vocabulary: Of its model.
    """

    def __init__(self, client: httpx.AsyncClient, vocabulary: int) -> None:
        self._client, self._vocabulary = client, vocabulary
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
            tasks.append(asyncio.create_task(self._one(rate, begin + seconds, begin + warm_up)))
            moment += self._chance.expovariate(per_second)
        await asyncio.gather(*tasks)
        return rate

    async def recovery(self) -> float:
        """Seconds until a request is answered again."""
        begin = time.monotonic()
        while True:
            rate = Rate(1.0)
            await self._one(rate, begin + 60)
            if rate.answered or time.monotonic() > begin + 60:
                return time.monotonic() - begin
            await asyncio.sleep(0.1)

    async def _one(self, rate: Rate, until: float, since: float = 0.0) -> None:
        body: dict[str, Any] = {
            "prompt": self._chance.choices(range(self._vocabulary), k=PROMPT),
            "max_tokens": ANSWER,
            "ignore_eos": True,
        }
        begin = time.monotonic()
        try:
            answer = await self._client.post("/v1/completions", json=body, timeout=120)
        except httpx.HTTPError as error:
            rate.wrong.append(repr(error))
            return
        now = time.monotonic()
        if answer.status_code == httpx.codes.OK:
            full = answer.json()["usage"]["completion_tokens"] == ANSWER
            rate.answered += full and since <= now <= until
        elif (
            answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
            and "retry-after" in answer.headers
        ):
            rate.rejected.append(now - begin)
        else:
            rate.wrong.append(f"{answer.status_code}: {answer.text[:200]}")
