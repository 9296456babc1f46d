"""Which tokens run, who makes room for whom: the scheduler alone, with fakes for the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pw.engine.request import SamplingParams
from pw.engine.scheduler import Scheduler
from pw.engine.sequence import Chunk, Sequence
from pw.memory.arena import Arena
from pw.memory.kv_cache import KvCache
from pw.memory.pool import PagePool
from pw.models.geometry import KvGeometry, KvLayer


class Weights:
    """Pages that weights hold; gives some up when asked, never more than `soft`, or `hard`."""

    def __init__(self, pool: PagePool, soft: int, hard: int) -> None:
        self.pool, self.soft, self.hard = pool, soft, hard
        self.pages = pool.take(soft + hard, 0)
        self.calls: list[tuple[int, str, bool]] = []
        self.floor = 0

    def release(self, pages: int, reason: str, *, last_resort: bool = False) -> int:
        self.calls.append((pages, reason, last_resort))
        count = min(pages, self.soft + (self.hard if last_resort else 0))
        self.hard -= max(0, count - self.soft)
        self.soft -= min(count, self.soft)
        self.pool.give_back([self.pages.pop() for _ in range(count)], 0)
        return count

    def releasable(self) -> int:
        return self.soft

    def holds(self, bits: int) -> bool:
        return True


class Bench:
    """A scheduler over one layer whose pages hold four tokens."""

    def __init__(
        self, pages: int, soft: int = 0, hard: int = 0, seqs: int = 8, tokens: int = 16
    ) -> None:
        layer = KvLayer(0, 4, 32, 32, None, 0)  # 1,024 bytes a token in float32
        arena = Arena(pages, 4096, torch.device("cpu"))
        self.pool = PagePool(pages)
        self.kv = KvCache(KvGeometry((layer,)), torch.float32, arena, self.pool, seqs, 64, 1)
        self.weights = Weights(self.pool, soft, hard)
        self.scheduler = Scheduler(self.kv, self.pool, self.weights, seqs, tokens)

    def add(self, name: str, prompt: int, max_tokens: int = 20) -> Sequence:
        nothing: Any = None
        sequence = Sequence(name, list(range(prompt)), SamplingParams(), max_tokens, nothing, None)
        self.scheduler.waiting.append(sequence)
        return sequence

    def step(self) -> list[tuple[str, int, int]]:
        """One step: (request, start, count) of each chunk; sequences at their end get a token."""
        chunks = self.scheduler.schedule()
        for chunk in chunks:
            chunk.sequence.computed = chunk.start + chunk.count
            if chunk.samples:
                chunk.sequence.output.append(0)
        self.kv.check_integrity()
        self.pool.check_integrity()
        return [(c.sequence.request_id, c.start, c.count) for c in chunks]

    @property
    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.waiting]


def test_prompts_run_in_chunks_and_decodes_come_first() -> None:
    bench = Bench(pages=40)
    bench.add("a", 6)
    assert bench.step() == [("a", 0, 6)]
    bench.add("b", 30)
    bench.add("c", 3)
    assert bench.step() == [("a", 6, 1), ("b", 0, 15)]
    assert bench.step() == [("a", 7, 1), ("b", 15, 15)]
    assert bench.step() == [("a", 8, 1), ("b", 30, 1), ("c", 0, 3)]
    assert bench.running[0] == "a"


def test_chunks_say_what_they_are() -> None:
    bench = Bench(pages=40)
    sequence = bench.add("a", 6)
    first = Chunk(sequence, 0, 4)
    assert (first.is_prompt, first.samples, list(first.token_ids())) == (True, False, [0, 1, 2, 3])
    sequence.output += [7, 8]
    both = Chunk(sequence, 4, 4)
    assert (both.is_prompt, both.samples, list(both.token_ids())) == (True, True, [4, 5, 7, 8])
    last = Chunk(sequence, 7, 1)
    assert (last.is_prompt, last.samples, list(last.token_ids())) == (False, True, [8])


def test_no_more_sequences_run_than_allowed() -> None:
    bench = Bench(pages=40, seqs=2)
    for name in "abc":
        bench.add(name, 2)
    assert [name for name, _, _ in bench.step()] == ["a", "b"]
    assert bench.waiting == ["c"]
    bench.scheduler.finish(bench.scheduler.running[0])
    assert [name for name, _, _ in bench.step()] == ["b", "c"]


def test_admission_leaves_running_sequences_their_next_page() -> None:
    bench = Bench(pages=4)
    bench.add("a", 8)
    bench.step()  # a holds two pages and needs a third for its next token
    bench.add("b", 4)  # two pages with its first answer
    bench.step()
    assert bench.running == ["a"]
    small = Bench(pages=5)
    small.add("a", 8)
    small.step()
    small.add("b", 4)
    small.step()
    assert small.running == ["a", "b"]


def test_relief_comes_in_order_planes_then_the_youngest_then_the_last_resort() -> None:
    bench = Bench(pages=8, soft=2, hard=2)
    bench.add("a", 7)
    bench.add("b", 7)
    assert bench.step() == [("a", 0, 7), ("b", 0, 7)]
    assert bench.weights.calls == []
    while "b" in bench.running:
        bench.step()
    # Planes first, each time as many pages as lack, then nobody but the youngest yields.
    assert bench.weights.calls[:2] == [(1, "kv allocation", False)] * 2
    assert bench.weights.soft == 0
    assert bench.weights.hard == 2
    assert bench.running == ["a"]
    assert bench.waiting == ["b"]
    assert bench.scheduler.preemptions == 1
    a, b = bench.scheduler.running[0], bench.scheduler.waiting[0]
    assert (b.computed, b.kv) == (0, None)
    assert len(b.output) > 0
    while a.length < 29:
        bench.step()
    assert bench.weights.calls[-1] == (1, "last resort", True)
    assert bench.running == ["a"]


def test_a_preempted_sequence_computes_prompt_and_answer_again() -> None:
    bench = Bench(pages=6)
    bench.add("a", 7)
    bench.add("b", 7)
    while bench.scheduler.preemptions == 0:
        bench.step()
    b = bench.scheduler.waiting[0]
    length = b.length
    bench.scheduler.finish(bench.scheduler.running[0])
    assert bench.step() == [("b", 0, length)]
    assert list(Chunk(b, 0, length).token_ids()) == [*range(7), *[0] * (length - 7)]


def test_the_oldest_is_never_preempted_and_always_advances() -> None:
    bench = Bench(pages=9, tokens=8)
    for number in range(6):
        bench.add(f"r{number}", 5 + number, max_tokens=20)
    done: list[str] = []
    for _ in range(1000):
        if not (bench.scheduler.running or bench.scheduler.waiting):
            break
        before = bench.scheduler.running[:1]
        computed = [sequence.computed for sequence in before]
        bench.step()
        for sequence, old in zip(before, computed, strict=True):
            assert sequence.computed > old
            assert bench.scheduler.running[0] is sequence
        for sequence in list(bench.scheduler.running):
            if sequence.remaining <= 0:
                done.append(sequence.request_id)
                bench.scheduler.finish(sequence)
        order = [*bench.running, *bench.waiting]
        assert order == sorted(order)  # nobody overtakes
    assert sorted(done) == [f"r{number}" for number in range(6)]
    assert done[0] == "r0"
    assert bench.scheduler.preemptions > 0
    assert bench.pool.free_count == 9


def test_a_long_prompt_waits_for_room_and_then_runs_before_later_ones() -> None:
    bench = Bench(pages=10)
    bench.add("small", 4, max_tokens=4)
    bench.step()
    bench.add("long", 36)
    bench.add("later", 2)
    bench.step()
    assert bench.waiting == ["long", "later"]
    bench.scheduler.finish(bench.scheduler.running[0])
    assert bench.step() == [("long", 0, 16)]
    assert bench.running == ["long"]


def test_finish_frees_pages_wherever_the_sequence_is() -> None:
    bench = Bench(pages=8)
    a, b = bench.add("a", 20), bench.add("b", 20)
    bench.step()
    assert b.kv is None
    bench.scheduler.finish(b)
    bench.scheduler.finish(a)
    assert bench.pool.free_count == 8
    assert not bench.scheduler.running
    assert not bench.scheduler.waiting


def test_pages_ahead_stop_at_the_longest_that_a_sequence_may_become() -> None:
    bench = Bench(pages=20)
    bench.add("a", 6, max_tokens=4)  # nine tokens in the cache at most, three pages
    bench.step()
    assert bench.scheduler.pages_ahead(1) == 0
    assert bench.scheduler.pages_ahead(100) == 1


def test_what_cannot_be_is_a_fault_not_a_hang() -> None:
    bench = Bench(pages=2)
    bench.add("a", 12)
    with pytest.raises(AssertionError, match="does not fit alone"):
        bench.step()


def test_the_next_in_the_queue_is_foreseen_if_there_is_a_place_for_it() -> None:
    bench = Bench(pages=20, seqs=2)
    bench.add("a", 6, max_tokens=4)
    assert bench.scheduler.forecast(100) == (0, 3)  # nothing runs; nine tokens of the first
    bench.step()
    assert bench.scheduler.forecast(100) == (1, 0)
    bench.add("b", 40)
    assert bench.scheduler.forecast(2) == (1, 11)
    bench.step()
    bench.add("c", 4)
    assert bench.scheduler.forecast(2).waiting == 0  # no more may run
