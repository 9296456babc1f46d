"""Load on a running server that speaks OpenAI's HTTP, ours or another, measured at the client.

Every request streams. A stream that ends without `[DONE]`, carries an error or has no token is a
failed request, never an empty success.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from pw.errors import PwError
from pw.evaluation.bench.metrics import Timing
from pw.evaluation.bench.workload import Request, arrivals

logger = logging.getLogger("pw.bench")

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True)
class Target:
    """Where and how to ask."""

    base_url: str
    endpoint: str = ENDPOINTS[0]
    model: str | None = None  # None: the first that the server lists
    api_key: str | None = None
    ignore_eos: bool = False
    timeout: float = 600.0  # seconds of silence


@dataclass(frozen=True)
class Pace:
    """When to ask."""

    rate: float = float("inf")  # requests per second
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0


async def run(
    target: Target,
    requests: Sequence[Request],
    pace: Pace,
    transport: httpx.AsyncBaseTransport | None = None,
) -> tuple[list[Timing], dict[str, Any]]:
    """Send all requests at their times; timings in their order, and what the run was.

    Args:
        target: Where and how.
        requests: What.
        pace: When.
        transport: In place of the network.

    Raises:
        PwError: The server does not answer, or serves no model.
    """
    if target.endpoint != ENDPOINTS[0] and not all(isinstance(r.prompt, str) for r in requests):
        logger.info(
            "a chat takes text: token ids of prompts are sent as numbers in words, and the server "
            "counts more input tokens than their lengths say; /v1/completions takes ids as they are"
        )
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=target.base_url,
        headers=headers,
        limits=limits,
        timeout=target.timeout,
        transport=transport,
    ) as client:
        model = target.model or await _first_model(client)
        client_run = _Run(client, target, model, pace)
        warm = await client_run.ask(_short(requests[0]))
        if warm.error is not None:
            raise PwError(
                f"the server's first answer failed: {warm.error}",
                "--random-input-len and --random-output-len set the lengths"
                if "context" in warm.error
                else "",
            )
        started = time.perf_counter()
        timings = await client_run.all(requests)
    ended = max((t.last for t in timings if t.last is not None), default=time.perf_counter())
    return timings, {"model": model, "duration": ended - started}


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        answer = await client.get("/v1/models")
        if answer.status_code == 401:
            raise PwError(
                f"the server needs an API key: {client.base_url}",
                "give it with `--api-key` or in the environment variable PW_API_KEY",
            )
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise PwError(
            f"no model at {client.base_url}: {str(error) or type(error).__name__}",
            "start a server (`pw serve MODEL`), or name it with --base-url",
        ) from error


def _short(request: Request) -> Request:
    """A request that makes the server ready and leaves nothing for the measured ones to reuse."""
    return Request(request.prompt[::-1], 2)


class _Run:
    """One run against one server."""

    def __init__(self, client: httpx.AsyncClient, target: Target, model: str, pace: Pace) -> None:
        self._client, self._target, self._model, self._pace = client, target, model, pace
        self._slots = asyncio.Semaphore(pace.max_concurrency or 1 << 30)

    async def all(self, requests: Sequence[Request]) -> list[Timing]:
        """Every request at its moment."""
        pace = self._pace
        times = arrivals(len(requests), pace.rate, pace.burstiness, pace.seed).tolist()
        started = time.perf_counter()

        async def at(moment: float, request: Request) -> Timing:
            await asyncio.sleep(max(0.0, started + moment - time.perf_counter()))
            async with self._slots:
                return await self.ask(request)

        moments = [
            moment if request.arrival is None else request.arrival
            for moment, request in zip(times, requests, strict=True)
        ]
        return await asyncio.gather(*map(at, moments, requests))

    async def ask(self, request: Request) -> Timing:
        """One streamed answer."""
        timing = Timing(time.perf_counter())
        try:
            async with self._client.stream(
                "POST", self._target.endpoint, json=self._body(request)
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    text = (await answer.aread()).decode(errors="replace")
                    timing.error = f"HTTP {answer.status_code}: {_reason(text)}"
                else:
                    await _read(answer, timing)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            timing.error = f"{type(error).__name__}: {error}"
        return timing

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": self._target.ignore_eos,
        }
        if self._target.endpoint == ENDPOINTS[0]:
            return body | {"prompt": request.prompt, "max_tokens": request.output_len}
        text = request.prompt
        content = text if isinstance(text, str) else " ".join(map(str, text))
        message = {"role": "user", "content": content}
        return body | {"messages": [message], "max_completion_tokens": request.output_len}


async def _read(answer: httpx.Response, timing: Timing) -> None:
    """Take in a stream of server-sent events."""
    done, deliveries = False, 0
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue  # comments keep proxies awake
        data = line[5:].strip()
        if data == "[DONE]":
            done = True
            continue  # to the end of the answer, so that the connection can be used again
        event = json.loads(data)
        if error := event.get("error"):
            timing.error = f"in the stream: {error.get('message', error)}"
            return
        if event.get("choices") and _delivers(event["choices"][0]):
            timing.token(time.perf_counter())
            deliveries += 1
        if usage := event.get("usage"):
            timing.input_tokens = int(usage["prompt_tokens"])
            timing.output_tokens = int(usage["completion_tokens"])
            details = usage.get("prompt_tokens_details") or {}
            timing.cached_tokens = int(details.get("cached_tokens") or 0)
    if not done:
        timing.error = "the stream ended without [DONE]"
    elif not deliveries:
        timing.error = "the answer had no token"
    elif not timing.output_tokens:
        timing.output_tokens = deliveries  # a server that tells no usage


def _delivers(choice: dict[str, Any]) -> bool:
    """Whether a chunk stands for tokens; the first of a chat has a role alone."""
    delta = choice.get("delta")
    if delta is not None:
        return bool(delta.get("content") or delta.get("tool_calls"))
    return "text" in choice


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
