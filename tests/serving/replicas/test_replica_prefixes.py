"""Keys of prompts, who has seen them, and which replica a request goes to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pw.serving.replicas.choice import Routing, ranked
from pw.serving.replicas.prefixes import FIRST_BYTES, LENGTHS, Directory, prefix_keys


def completion(prompt: object, **fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, **fields}).encode()


def chat(*contents: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"messages": messages, **fields}).encode()


def common(one: bytes, other: bytes) -> int:
    pairs = zip(prefix_keys(one), prefix_keys(other), strict=False)
    return sum(a == b for a, b in pairs)


def test_lengths_grow_by_a_quarter_to_megabytes() -> None:
    assert LENGTHS[:4] == (256, 320, 400, 500)
    assert 8 << 20 < LENGTHS[-1] <= 16 << 20
    assert len(LENGTHS) == 50


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_keys_are_common_as_far_as_prompts_are(shared: int, one: int, other: int) -> None:
    left, right = "s" * shared + "a" * one, "s" * shared + "b" * other
    same = min(len(left), len(right)) if left == right or not one or not other else shared
    expected = sum(length <= same for length in LENGTHS)
    assert common(completion(left), completion(right)) == expected


def test_the_next_turn_begins_like_the_last() -> None:
    first, second = chat("q" * 700), chat("q" * 700, "answer" * 100)
    assert common(first, second) == len(prefix_keys(first)) > 3
    spaced = json.dumps(json.loads(second), indent=2).encode()
    assert prefix_keys(spaced) == prefix_keys(second)


def test_what_stands_before_the_prompt_counts() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 300}}]
    assert common(chat("q" * 700), chat("q" * 700, tools=tools)) == 0
    assert prefix_keys(chat("q" * 700, temperature=0.3)) == prefix_keys(chat("q" * 700))


@pytest.mark.parametrize(
    "prompt", ["x" * 300, ["x" * 300, "y" * 300], list(range(200)), [list(range(200)), [1]]]
)
def test_all_forms_of_prompts_have_keys(prompt: object) -> None:
    assert len(prefix_keys(completion(prompt))) >= 1
    assert prefix_keys(completion(prompt)) == prefix_keys(completion(prompt, max_tokens=5))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b"{}", b'{"messages": 3}', b'{"prompt": {"a": 1}}', b"\xff",
     completion(""), completion([]), completion([[]]), completion("x" * (FIRST_BYTES - 1))],
)  # fmt: skip
def test_what_cannot_be_read_or_is_short_has_none(body: bytes) -> None:
    assert prefix_keys(body) == ()


def test_a_directory_knows_how_deep_and_forgets() -> None:
    directory = Directory(most=3)
    directory.record((1, 2, 3), "a")
    directory.record((1, 2), "b")
    assert [directory.depth((1, 2, 3, 4), name) for name in ("a", "b", "c")] == [3, 2, 0]
    assert directory.depth((2, 3), "a") == 2
    assert directory.latest(2) == [1, 2]
    directory.record((9,), "b")  # the least recently seen key goes
    assert directory.latest(9) == [1, 2, 9]
    directory.keep(["b"])
    assert [directory.depth((1, 2), name) for name in ("a", "b")] == [0, 2]
    directory.keep([])
    assert directory.latest(9) == []


KEYS = (1, 2, 3)


@pytest.mark.parametrize(
    ("queues", "routing", "order"),
    [
        ({"a": 3, "b": 1, "c": 2}, Routing(), "bca"),  # nothing known: the shortest queue
        ({"a": 3, "b": 1, "c": 2}, Routing((7, 8)), "bca"),
        ({"a": 3, "b": 1, "c": 2}, Routing(KEYS), "abc"),  # the holder, though it is busier
        ({"a": 4, "b": 1, "c": 2}, Routing(KEYS), "cba"),  # ... by too much: the next best holder
        ({"a": 9, "b": 1, "c": 9}, Routing(KEYS), "bac"),
        ({"a": 1, "b": 1, "c": 1}, Routing(KEYS, avoid=("a",)), "cba"),
        ({"a": 1, "b": 1, "c": 1}, Routing(KEYS, avoid=("a", "c")), "bac"),
        ({"a": 5, "c": 2}, Routing(KEYS, avoid=("a", "c")), "ca"),  # better than nobody
        ({"a": 1, "b": 0}, Routing(only="a"), "a"),
        ({"a": 1, "b": 0}, Routing(only="z"), ""),
        ({}, Routing(KEYS), ""),
    ],
)
def test_the_holder_is_preferred_within_bounds(
    queues: dict[str, int], routing: Routing, order: str
) -> None:
    directory = Directory()
    directory.record(KEYS, "a")
    directory.record(KEYS[:2], "c")
    assert "".join(ranked(queues, routing, directory, max_imbalance=2)) == order


def test_a_short_common_beginning_is_no_reason() -> None:
    """A tenth of the prompt must be held: below, the cache saves less than a longer queue costs."""
    directory = Directory()
    directory.record((1,), "a")
    enough = next(i for i, length in enumerate(LENGTHS) if 0.1 * length > FIRST_BYTES)
    for length, first in ((enough, "a"), (enough + 1, "b")):
        keys = tuple(range(1, length + 1))
        assert ranked({"a": 1, "b": 0}, Routing(keys), directory, 8)[0] == first
