"""What the ingress needs from the replicas, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from starlette.types import Message

from pw.serving.replicas.calls import Answer, Call
from pw.serving.replicas.choice import Routing

TAKEN = "pw.taken"  # type of a replica's first message: it has accepted the call


class ReplicaLostError(Exception):
    """A replica went away, or broke off, while it had a request."""


class Replicas(Protocol):
    """All replicas, as their ingress sees them."""

    def send(self, call: Call, routing: Routing) -> AsyncIterator[Message]:
        """Have one replica answer: a message `TAKEN` with its `replica`, then those of ASGI.

        Closing or cancelling the iterator gives the request up.

        Raises:
            RequestError: 503, nobody takes it.
            ReplicaLostError: The replica went away.
        """

    async def ask_all(self, call: Call) -> dict[str, Answer]:
        """What each replica answers to a small question; one that does not is left out."""

    async def serving(self) -> int:
        """How many replicas take requests now."""
