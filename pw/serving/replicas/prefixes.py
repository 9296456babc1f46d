"""Which requests begin alike: keys of a prompt's first bytes, and who has seen them.

A replica that has computed a prompt holds its KV cache (docs/prefix-caching.md), so the next turn
of the same conversation is cheaper there. Nobody tokenizes for that: prompts that begin with the
same bytes begin with the same tokens, up to the last token before the difference.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import orjson

FIRST_BYTES = 256  # of the shortest prefix with a key: less is computed as fast as it is found
GROWTH = 1.25  # each further key's prefix is so much longer: a match is known to a fifth
_MAX_BYTES = 16 << 20
_KEY_BYTES = 8


def _lengths() -> tuple[int, ...]:
    lengths, length = [], float(FIRST_BYTES)
    while length <= _MAX_BYTES:
        lengths.append(int(length))
        length *= GROWTH
    return tuple(lengths)


LENGTHS = _lengths()  # bytes


def prefix_keys(body: bytes) -> tuple[int, ...]:
    """A key for each of the prompt's first 256, 320, 400, ... bytes, as far as it reaches.

    Two bodies have their first n keys in common if and only if their prompts begin with the same
    `LENGTHS[n - 1]` bytes, but for collisions of 64 bits, which cost a hit and nothing else.

    Args:
        body: Of a request to either endpoint that generates. One that cannot be read has no keys:
            a replica will say what is wrong with it.
    """
    try:
        text = _prompt(orjson.loads(body))
    except ValueError:
        return ()
    digest, keys, done = hashlib.blake2b(digest_size=_KEY_BYTES), [], 0
    for length in takewhile(len(text).__ge__, LENGTHS):
        digest.update(text[done:length])
        done = length
        keys.append(int.from_bytes(digest.copy().digest()))
    return tuple(keys)


def _prompt(body: Any) -> bytes:
    """The bytes that a prompt's tokens come from, in their order; the first of several prompts."""
    if not isinstance(body, Mapping):
        return b""
    if isinstance(messages := body.get("messages"), list):
        # Templates write tools before the first message.
        parts = [body.get("tools"), *messages]
        return b"".join(orjson.dumps(part, option=orjson.OPT_SORT_KEYS) for part in parts)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode()
    return orjson.dumps(prompt)[1:-1] if isinstance(prompt, list) else b""


class Directory:
    """Which replicas have seen which prefixes, of late.

    Args:
        most: Keys kept; the least recently seen are forgotten first.
    """

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._holders: OrderedDict[int, set[str]] = OrderedDict()

    def record(self, keys: Iterable[int], replica: str) -> None:
        """Note that a replica has prompts with these keys."""
        for key in keys:
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all replicas but these."""
        alive = set(replicas)
        for key in list(self._holders):
            self._holders[key] &= alive
            if not self._holders[key]:
                del self._holders[key]

    def has(self, key: int, replica: str) -> bool:
        """Whether a replica has seen a prefix."""
        return replica in self._holders.get(key, ())

    def depth(self, keys: Sequence[int], replica: str) -> int:
        """How many of a prompt's first keys a replica has seen."""
        return sum(1 for _ in takewhile(lambda key: self.has(key, replica), keys))

    def latest(self, most: int) -> list[int]:
        """The keys seen last, the oldest of them first."""
        keys = list(self._holders)
        return keys[max(0, len(keys) - most) :]
