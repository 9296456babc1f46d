"""Which replica takes a request: the one that holds its prefix, unless it is too busy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pw.serving.replicas.prefixes import LENGTHS, Directory

LEAST_SHARE = 0.1  # of a prompt that must be held for its holder to be preferred


@dataclass(frozen=True)
class Routing:
    """What is known of a request before a replica takes it.

    Attributes:
        keys: Of its prompt, see `prefix_keys`.
        avoid: Replicas that have failed at it.
        only: The one replica that it is meant for.
    """

    keys: tuple[int, ...] = ()
    avoid: tuple[str, ...] = ()
    only: str | None = None


def ranked(
    queues: Mapping[str, int], routing: Routing, directory: Directory, max_imbalance: int
) -> list[str]:
    """Replicas for a request, the best first.

    First comes the replica that has seen most of the prompt, unless its queue is longer than the
    shortest by more than `max_imbalance`; then all others by their queues. Replicas to avoid come
    last: a poor one is better than none.

    Args:
        queues: Requests that each replica runs or queues.
        routing: See there.
        directory: Who has seen which keys.
        max_imbalance: Requests.
    """
    if routing.only is not None:
        return [routing.only] if routing.only in queues else []
    others = sorted(queues, key=lambda name: (name in routing.avoid, queues[name], name))
    holder = _holder(others, queues, routing, directory, max_imbalance)
    if holder is not None:
        others.remove(holder)
        others.insert(0, holder)
    return others


def _holder(
    names: Sequence[str],
    queues: Mapping[str, int],
    routing: Routing,
    directory: Directory,
    max_imbalance: int,
) -> str | None:
    """The first of `names` that has seen the most, is not too busy and is not to be avoided."""
    shortest = min(queues.values(), default=0)
    free = [
        name
        for name in names
        if name not in routing.avoid and queues[name] - shortest <= max_imbalance
    ]
    depths = {name: directory.depth(routing.keys, name) for name in free}
    best = max(free, key=depths.__getitem__, default=None)
    if best is None or not depths[best]:
        return None
    held, asked = LENGTHS[depths[best] - 1], LENGTHS[len(routing.keys) - 1]
    return best if held >= LEAST_SHARE * asked else None
