"""Many clients of the openai package at once, and what became of each request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import openai

from serving.replicas.cluster import KEY


@dataclass
class Tally:
    """What the clients saw."""

    answered: int = 0  # whole answers and streams that came to their end
    broken: int = 0  # streams that had begun and ended with an error
    lost: list[str] = field(default_factory=list)  # errors before the first token
    statuses: Counter[int] = field(default_factory=Counter)  # of HTTP, retries included
    replicas: Counter[str] = field(default_factory=Counter)

    @property
    def asked(self) -> int:
        return self.answered + self.broken + len(self.lost)

    def __str__(self) -> str:
        return (f"{self.asked} asked, {self.answered} answered, {self.broken} begun streams broke, "
                f"{len(self.lost)} lost {self.lost[:3]}; HTTP {dict(self.statuses)}, "
                f"by replica {dict(self.replicas)}")  # fmt: skip


async def load(
    url: str,
    users: int,
    until: Callable[[Tally], bool],
    max_tokens: int = 60,
    stream_every: int = 2,
) -> Tally:
    """Users that ask one question after the other until `until` is true; all get their end."""
    tally = Tally()

    async def note(response: httpx.Response) -> None:
        tally.statuses[response.status_code] += 1
        tally.replicas[response.headers.get("x-pw-replica", "none")] += 1

    http = httpx.AsyncClient(event_hooks={"response": [note]}, timeout=120)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, http_client=http) as client:

        async def user(number: int) -> None:
            turn = number
            while not until(tally):
                turn += 1
                prompt = f"User {number} asks question {turn}."
                await ask(client, tally, prompt, max_tokens, stream=turn % stream_every == 0)

        await asyncio.gather(*(user(number) for number in range(users)))
    return tally


async def ask(
    client: openai.AsyncOpenAI, tally: Tally, prompt: str, max_tokens: int, *, stream: bool
) -> None:
    """One request, its fate noted."""
    begun = False
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens}
    ignore_eos = {"ignore_eos": True}
    try:
        if not stream:
            whole = await client.completions.create(**fields, extra_body=ignore_eos)
            assert whole.usage.completion_tokens == max_tokens
        else:
            last = None
            async for chunk in await client.completions.create(
                **fields, stream=True, extra_body=ignore_eos
            ):
                begun, last = True, chunk.choices[0].finish_reason
            assert last == "length", f"stream ended with {last}"
        tally.answered += 1
    except openai.APIError as error:
        if begun:
            tally.broken += 1
        else:
            tally.lost.append(f"{type(error).__name__}: {error}"[:200])
