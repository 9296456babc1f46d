"""Connections that are reset as soon as they are made: with nothing said, a part, or a request."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from typing import Any

import httpx

RESET = struct.pack("ii", 1, 0)  # SO_LINGER that makes `close` send RST
BODY = json.dumps({"prompt": list(range(5, 69)), "max_tokens": 50, "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
REQUEST = HEAD + f"content-length: {len(BODY)}\r\n\r\n".encode() + BODY
LENGTHS = [0, 20, len(HEAD) + 30, len(REQUEST)]


async def storm(client: httpx.AsyncClient, per_second: float, seconds: float) -> dict[str, Any]:
    """Reset so many connections a second; what a client with an honest question sees.

    Args:
        client: Knows the server, asks it whether it is ready once a second.
        per_second: New connections.
        seconds: How long.
    """
    address, chance = (client.base_url.host, client.base_url.port), random.Random(1)
    sent = refused = not_ready = 0
    slowest = 0.0

    async def ask() -> None:
        nonlocal not_ready, slowest
        asked = time.monotonic()
        answer = await client.get("/health/ready")
        slowest = max(slowest, time.monotonic() - asked)
        not_ready += answer.status_code != httpx.codes.OK

    begin = asked = time.monotonic()
    questions: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    while (now := time.monotonic()) < begin + seconds:
        if now >= asked + 1:
            questions.append(asyncio.create_task(ask()))
            asked = now
        if sent >= (now - begin) * per_second:
            await asyncio.sleep(0.001)
            continue
        with socket.socket() as victim:
            victim.setblocking(False)
            victim.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            try:
                async with asyncio.timeout(5):
                    await loop.sock_connect(victim, address)
                    await loop.sock_sendall(victim, REQUEST[: chance.choice(LENGTHS)])
            except (TimeoutError, OSError):
                refused += 1
        sent += 1
    await asyncio.gather(*questions)
    figures = {
        "connections": sent,
        "per_second": round(sent / seconds, 1),
        "not_connected": refused,
        "questions": len(questions),
        "slowest_health_s": round(slowest, 3),
    }
    promises = {
        "always ready": not_ready == 0,
        "asked throughout": len(questions) >= seconds / 2,
        "every connection was taken": refused == 0,
    }
    return figures | {"not_kept": [promise for promise, kept in promises.items() if not kept]}
