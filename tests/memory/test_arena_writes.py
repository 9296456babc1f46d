"""`Arena.write_all` through the buffer that it has on a GPU, which is put in place by hand here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from pw.memory.arena import Arena

PAGE = 4096


class Buffered(Arena):
    """An arena on the CPU that writes as one on a GPU, and notes the pages of each launch."""

    def __init__(self, num_pages: int, room: int) -> None:
        super().__init__(num_pages, PAGE, torch.device("cpu"))
        self._staging = torch.full((room, PAGE), 255, dtype=torch.uint8)
        self.puts: list[list[int]] = []

    def _put(self, page_ids: Tensor) -> None:
        self.puts.append(page_ids.tolist())
        super()._put(page_ids)


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Buffered]]:
    """Without pinned memory, which a machine without a GPU does not have."""
    plain = torch.tensor

    def unpinned(data: object, *, pin_memory: bool) -> Tensor:
        assert pin_memory
        return plain(data)

    with monkeypatch.context() as context:
        context.setattr(torch, "tensor", unpinned)
        yield Buffered


def parts_of(sizes: list[int], num_pages: int, seed: int = 0) -> list[tuple[list[int], Tensor]]:
    """Pages in no order, each once, with random bytes."""
    random = np.random.default_rng(seed)
    ids, parts = random.permutation(num_pages).tolist(), []
    for size in sizes:
        data = random.integers(256, size=(size, PAGE), dtype=np.uint8)
        parts.append(([ids.pop() for _ in range(size)], torch.from_numpy(data)))
    return parts


def check(arena: Buffered, parts: list[tuple[list[int], Tensor]]) -> None:
    expected = torch.zeros(arena.num_pages, PAGE, dtype=torch.uint8)
    for ids, data in parts:
        expected[ids] = data
    arena.write_all(parts)
    assert torch.equal(arena.pages, expected)


@pytest.mark.parametrize(
    ("sizes", "launches"),
    [
        ([2, 1, 1], [4]),  # full at the end of the last
        ([3, 3], [4, 2]),  # in the middle of a part, and a rest
        ([4, 4], [4, 4]),  # between two parts
        ([9], [4, 4, 1]),  # a part larger than the buffer
        ([0, 3, 0, 0, 2, 0], [4, 1]),  # parts of nothing, one of them last
        ([0, 4, 0], [4]),
        ([1], [1]),
        ([0, 0], []),
        ([], []),
    ],
)
def test_parts_share_the_buffer_and_nothing_stays_in_it(
    buffered: type[Buffered], sizes: list[int], launches: list[int]
) -> None:
    arena = buffered(16, room=4)
    parts = parts_of(sizes, 16)
    check(arena, parts)
    assert [len(put) for put in arena.puts] == launches
    written = [page for put in arena.puts for page in put]
    assert written == [page for ids, _ in parts for page in ids]


@pytest.mark.parametrize("room", [1, 2, 3, 7])
def test_any_parts_through_any_buffer(buffered: type[Buffered], room: int) -> None:
    random = np.random.default_rng(room)
    for seed in range(20):
        sizes = random.integers(0, 6, size=int(random.integers(1, 8))).tolist()
        arena = buffered(40, room)
        check(arena, parts_of(sizes, 40, seed))
        assert all(len(put) == room for put in arena.puts[:-1])


def test_one_write_is_one_part(buffered: type[Buffered]) -> None:
    arena = buffered(8, room=2)
    ((ids, data),) = parts_of([5], 8)
    arena.write(ids, data)
    assert torch.equal(arena.pages[ids], data)
    assert [len(put) for put in arena.puts] == [2, 2, 1]
