"""Users of a soak: most ask for something and wait, some leave early, some ask for nonsense."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE = 120.0  # seconds of silence after which a request counts as hung
COMPLETIONS = "/v1/completions"
NONSENSE: list[bytes] = [
    b"{",
    b"\xff\xfe",
    b"[" * 10_000,
    b'{"prompt": []}',
    b'{"prompt": "x", "temperature": 1e400}',
    b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "x", "max_tokens": -5}',
    b'{"prompt": "x", "n": 1000000}',
    b'{"prompt": [[1, 2], [99999999]]}',
    b'{"prompt": "x", "logit_bias": {"99999999": 1}}',
    b'{"prompt": "x", "model": "another"}',
    b'{"prompt": "x", "max_tokens": 99999999}',
    b'{"prompt": "x", "structured_outputs": {"regex": "("}}',
    b'{"prompt": "' + b"a " * 20_000 + b'"}',
]


@dataclass(frozen=True)
class Mix:
    """What users do."""

    users: int = 64
    leave_share: float = 0.05  # of requests that their user abandons
    nonsense_share: float = 0.02
    most_prompt: int = 400  # tokens
    most_answer: int = 96
    think_seconds: float = 0.2  # mean
    seed: int = 0


@dataclass
class Outcomes:
    """What became of the requests."""

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    slowest: float = 0.0  # seconds of one answered request
    examples: list[str] = field(default_factory=list)  # of what should not be

    def wrong(self, kind: str, example: str) -> None:
        """Count what should not be."""
        self.counts[kind] += 1
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: {example[:300]}")


class Users:
    """Users of one server.

    Args:
        client: Knows the server.
        mix: What they do.
        vocabulary: Of its model; prompts are random tokens.
    """

    def __init__(self, client: httpx.AsyncClient, mix: Mix, vocabulary: int) -> None:
        self._client, self._mix, self._vocabulary = client, mix, vocabulary
        self.outcomes = Outcomes()

    async def run(self, seconds: float) -> Outcomes:
        """All users for so long; returns when the last has its answer."""
        end = time.monotonic() + seconds
        chances = (random.Random(self._mix.seed * 1000 + n) for n in range(self._mix.users))
        await asyncio.gather(*(self._user(chance, end) for chance in chances))
        return self.outcomes

    async def _user(self, chance: random.Random, end: float) -> None:
        mix = self._mix
        while time.monotonic() < end:
            await asyncio.sleep(chance.expovariate(1 / mix.think_seconds))
            roll = chance.random()
            try:
                async with asyncio.timeout(10 * PATIENCE):
                    if roll < mix.nonsense_share:
                        await self._nonsense(chance)
                    elif roll < mix.nonsense_share + mix.leave_share:
                        await self._leave(chance)
                    else:
                        await self._ask(chance)
            except (httpx.TimeoutException, TimeoutError) as error:
                self.outcomes.wrong("hung", repr(error))
            except httpx.HTTPError as error:
                self.outcomes.wrong("broken", repr(error))

    def _body(self, chance: random.Random) -> dict[str, Any]:
        mix = self._mix
        # A few beginnings are shared, so that prefixes are found, kept and given up as well.
        start = random.Random(chance.randrange(8)).choices(range(self._vocabulary), k=64)
        own = chance.choices(range(self._vocabulary), k=chance.randint(1, mix.most_prompt - 64))
        body: dict[str, Any] = {
            "prompt": (start if chance.random() < 0.5 else []) + own,
            "max_tokens": chance.randint(1, mix.most_answer),
            "temperature": chance.choice([0, 0.8, 1.2]),
            "ignore_eos": chance.random() < 0.5,
            "stream": chance.random() < 0.75,
        }
        extra = chance.random()
        if extra < 0.1:
            body |= {"n": 2, "temperature": 1}
        elif extra < 0.15:
            body |= {"logprobs": 5}
        elif extra < 0.2:
            body |= {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}
        elif extra < 0.25:
            body |= {"stop": ["e", " the"], "presence_penalty": 0.5}
        return body

    async def _ask(self, chance: random.Random) -> None:
        body, begin = self._body(chance), time.monotonic()
        choices = body.get("n", 1)
        async with self._client.stream("POST", COMPLETIONS, json=body, timeout=PATIENCE) as answer:
            if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                kind = "rejected" if "retry-after" in answer.headers else "rejected without a time"
                self.outcomes.counts[kind] += 1
                await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
                return
            if answer.status_code != httpx.codes.OK:
                self.outcomes.wrong(f"HTTP {answer.status_code}", (await answer.aread()).decode())
                return
            ends, tokens = await (self._streamed(answer) if body["stream"] else _whole(answer))
        if len(ends) != choices or not set(ends) <= {"stop", "length"}:
            self.outcomes.wrong("cut short", f"{body} -> {ends}")
            return
        self.outcomes.counts["answered"] += 1
        self.outcomes.tokens += tokens
        self.outcomes.slowest = max(self.outcomes.slowest, time.monotonic() - begin)

    async def _streamed(self, answer: httpx.Response) -> tuple[list[str], int]:
        ends, chunks, done = [], 0, False
        async for data in _events(answer):
            if data == b"[DONE]":
                done = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                self.outcomes.wrong("error in a stream", data.decode())
                continue
            chunks += 1
            ends += [c["finish_reason"] for c in chunk["choices"] if c["finish_reason"]]
        return (ends if done else []), chunks

    async def _leave(self, chance: random.Random) -> None:
        """Close the connection after some chunks, or after some time without any."""
        body, chunks = self._body(chance) | {"stream": True}, chance.choice([0, 0, 1, 5, 20])
        self.outcomes.counts["left"] += 1
        try:
            async with (
                asyncio.timeout(chance.uniform(0.001, 3.0)),
                self._client.stream("POST", COMPLETIONS, json=body) as answer,
            ):
                async for _ in _events(answer):
                    chunks -= 1
                    if chunks < 0:
                        return
        except TimeoutError:
            return

    async def _nonsense(self, chance: random.Random) -> None:
        answer = await self._client.post(
            COMPLETIONS,
            content=chance.choice(NONSENSE),
            headers={"content-type": "application/json"},
            timeout=PATIENCE,
        )
        if (
            answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
            and "retry-after" in answer.headers
        ):
            self.outcomes.counts["rejected"] += 1  # by a full queue, before it was read
        elif answer.status_code in (400, 404, 413) and answer.json()["error"]["message"]:
            self.outcomes.counts["refused"] += 1
        else:
            self.outcomes.wrong("nonsense not refused", f"{answer.status_code} {answer.text}")


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events, whose lines end at line feeds and nowhere else."""
    held = b""
    async for piece in answer.aiter_bytes():
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ")


async def _whole(answer: httpx.Response) -> tuple[list[str], int]:
    body = json.loads(await answer.aread())
    return [c["finish_reason"] for c in body["choices"]], body["usage"]["completion_tokens"]
