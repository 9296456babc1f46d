"""Damage to JSON and to bytes, as fuzzers do it, by seed."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 7, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**30, 0.0, 1.5, -0.5, 1e300, float("inf"), float("nan"), "", "x", "F32", "BF16", "F8_E4M3",
    "../x", "/etc/passwd", "a\x00b", "\ud800", "\u202e", "x" * 10_000, [], [0], [1, 2], [[]],
    [None], [2**40] * 4, [0] * 1000, {}, {"": 0}, {"dtype": "F32"}, {"__metadata__": {}},
]  # fmt: skip


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    found, queue = [], [tree]
    while queue:
        node = queue.pop()
        keys = node.keys() if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                queue.append(node[key])
    return found


def damaged_tree(tree: Any, chance: random.Random) -> Any:
    """A copy of a JSON value with one to three changes."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.randint(1, 3)):
        places = _places(tree)
        if not places:
            break
        node, key = chance.choice(places)
        kind = chance.randrange(6)
        if kind == 0:
            node[key] = copy.deepcopy(chance.choice(ODD))
        elif kind == 1:
            del node[key]
        elif kind == 2:  # exchange two values
            other, name = chance.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                value = copy.deepcopy(other[name])
                other[name] = copy.deepcopy(node[key])
                node[key] = value
        elif kind == 3 and type(node[key]) is int:
            node[key] += chance.choice([-1, 1, -8, 8, 1 << chance.randrange(64)])
        elif isinstance(node, dict):
            node[chance.choice(["", "x", "__metadata__", f"{key}2"])] = copy.deepcopy(node[key])
        else:
            node.insert(key, copy.deepcopy(chance.choice(ODD)))
    return tree


def damaged_bytes(data: bytes, chance: random.Random) -> bytes:
    """A copy with bits flipped, bytes inserted, cut out, doubled, or the end cut off."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        length = chance.choice([1, 1, 2, 8, 64])
        kind = chance.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            out[at:at] = chance.randbytes(length)
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            out[at:at] = out[at : at + length]
        elif kind == 4:
            del out[at:]
        else:
            token = chance.choice(
                [b"NaN", b"Infinity", b"1e999", b"-0", b"[[[[", b"\\ud800", b'":{"']
            )
            out[at : at + len(token)] = token
    return bytes(out)


def dump(tree: Any) -> bytes:
    """JSON with all that Python can write, NaN and lone surrogates too."""
    return json.dumps(tree).encode()
