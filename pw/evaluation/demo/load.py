"""The demo's load: clients whose contexts grow, over HTTP, as users would send it.

A client sends its whole context with every turn: what it said, what it was answered, and the next
passage. Knows the completions endpoint of OpenAI's API, nothing of the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

_CHARACTERS_PER_TOKEN = 3.4  # of the bundled tokenizer on English text
_TIMEOUT = httpx.Timeout(120.0)  # a request may wait long for pages; none may wait for ever


@dataclass(frozen=True)
class Wave:
    """Clients that start together, each with the same number of turns."""

    name: str
    clients: int
    turns: int
    passage_tokens: int  # about so many new tokens of text with each turn
    answer_tokens: int  # exactly so many tokens made in each turn
    think_seconds: float  # mean pause of a client between an answer and its next turn

    @property
    def requests(self) -> int:
        """Requests of all clients."""
        return self.clients * self.turns


@dataclass(frozen=True)
class Answer:
    """What became of one request, seen by the client."""

    text: str
    tokens_asked: int
    tokens_made: int
    finish_reason: str | None
    first_token_seconds: float
    seconds: float
    error: str | None = None
    logprobs: tuple[float, ...] = ()  # of each token made, if asked for

    @property
    def finished(self) -> bool:
        """Whether the answer is whole."""
        whole = self.finish_reason == "length" and self.tokens_made == self.tokens_asked
        return self.error is None and whole


class Passages:
    """Pieces of documents, never the same piece twice until all have been used.

    Args:
        documents: Texts; every client reads on in one of its own.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        self._documents = documents
        self._positions = [0] * len(documents)
        self._next = itertools.count()

    def new_client(self) -> Callable[[int], str]:
        """A function that gives the next passage of about so many tokens."""
        number = next(self._next) % len(self._documents)

        def read(tokens: int) -> str:
            document, size = self._documents[number], round(tokens * _CHARACTERS_PER_TOKEN)
            start = self._positions[number]
            if start + size > len(document):
                start = 0
            self._positions[number] = start + size
            return document[start : start + size]

        return read


async def send(
    client: httpx.AsyncClient,
    prompt: str,
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    logprobs: bool = False,
) -> Answer:
    """Stream one completion. What goes wrong is in the answer, never raised."""
    started = time.monotonic()
    pieces: list[str] = []
    chosen: list[float] = []
    finish_reason, tokens, first = None, 0, 0.0
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": 0 if logprobs else None,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    def answer(error: str | None = None) -> Answer:
        seconds = time.monotonic() - started
        text = "".join(pieces)
        return Answer(text, max_tokens, tokens, finish_reason, first, seconds, error, tuple(chosen))

    try:
        async with client.stream("POST", "/v1/completions", json=body, timeout=_TIMEOUT) as reply:
            if reply.status_code != 200:
                return answer(f"HTTP {reply.status_code}: {(await reply.aread()).decode()[:200]}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return answer(str(chunk["error"].get("message", chunk["error"])))
                first = first or time.monotonic() - started
                for choice in chunk["choices"]:
                    pieces.append(choice["text"])
                    finish_reason = choice["finish_reason"] or finish_reason
                    if choice.get("logprobs"):
                        chosen += choice["logprobs"]["token_logprobs"]
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return answer(f"{type(error).__name__}: {error}")
    return answer()


async def run_wave(
    client: httpx.AsyncClient,
    wave: Wave,
    passages: Passages,
    seed: int,
    done: Callable[[Answer], None],
) -> None:
    """Run all clients of a wave to their ends.

    Args:
        client: Knows the server.
        wave: What to send.
        passages: Where the text comes from.
        seed: Of the first request; every request has its own. Pauses follow from it too.
        done: Called with each answer as it comes.
    """
    seeds = itertools.count(seed)
    pauses = random.Random(seed)

    async def converse() -> None:
        read, context = passages.new_client(), ""
        for _ in range(wave.turns):
            context += read(wave.passage_tokens)
            answer = await send(
                client, context, wave.answer_tokens, temperature=0.8, seed=next(seeds)
            )
            done(answer)
            context += answer.text
            await asyncio.sleep(pauses.uniform(0, 2 * wave.think_seconds))

    await asyncio.gather(*(converse() for _ in range(wave.clients)))
