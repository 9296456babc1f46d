"""Shared prefixes: what is found, who owns its pages, in which order they are given up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pw.memory.arena import Arena
from pw.memory.kv_cache import KvCache, KvSequence
from pw.memory.pool import OutOfPagesError, PagePool
from pw.memory.prefix_cache import PrecisionTag, PrefixChain, PrefixMatch
from pw.models.geometry import KvGeometry, KvLayer

FULL = (KvLayer(0, 2, 32, 32, None, 0),)  # 8 tokens a page, so units of 16 are 2 pages
MIXED = (*FULL, KvLayer(1, 2, 16, 16, 20, 1))  # ... and one page of a layer that sees 20 tokens
SIX, FIVE = PrecisionTag(6.0, 6, b"six"), PrecisionTag(5.0, 4, b"five")


class Bench:
    """A KV cache with a prefix cache, fed with tokens instead of requests."""

    def __init__(
        self, layers: tuple[KvLayer, ...] = FULL, pages: int = 24, rule: str = "not-worse"
    ) -> None:
        arena, self.pool = Arena(pages, 4096, torch.device("cpu")), PagePool(pages)
        self.kv = KvCache(
            KvGeometry(layers), torch.float32, arena, self.pool, 4, 128, 100, prefix_rule=rule
        )
        assert self.kv.prefix is not None
        self.prefix = self.kv.prefix

    def chain(self, tokens: Sequence[int]) -> PrefixChain:
        chain = self.prefix.chain()
        chain.extend(lambda start, end: tokens[start:end], len(tokens))
        return chain

    def match(self, tokens: Sequence[int], now: PrecisionTag = SIX, least: int = 0) -> PrefixMatch:
        return self.prefix.match(self.chain(tokens).digests, now, least)

    def compute(self, tokens: Sequence[int], now: PrecisionTag = SIX, step: int = 16) -> KvSequence:
        """Run a sequence to its last token, reusing what there is."""
        match = self.match(tokens[:-1], now)
        sequence = self.kv.open(match)
        for start in range(match.tokens, len(tokens), step):
            self.kv.slide(sequence, start)
            end = min(start + step, len(tokens))
            self.kv.grow(sequence, end)
            self.kv.record(sequence, end, self.chain(tokens), now)
            self.check()
        return sequence

    def run(self, tokens: Sequence[int], now: PrecisionTag = SIX) -> None:
        self.kv.close(self.compute(tokens, now))
        self.check()

    def table(self, sequence: KvSequence, group: int = 0) -> list[int]:
        return [p for p in self.kv._groups[group].table[sequence.row, 0].tolist() if p >= 0]

    def check(self) -> None:
        self.pool.check_integrity()
        self.kv.check_integrity()
        assert self.pool.used_count == self.kv.used_pages + int((self.pool.owner == 5).sum())


TEXT = list(range(1000, 1100))


def test_whole_units_are_found_again_and_nothing_else() -> None:
    bench = Bench()
    bench.run(TEXT[:50])  # three whole units and two tokens
    assert bench.pool.idle_count == 6
    assert bench.pool.free_count == 24
    assert [bench.match(TEXT[:n]).tokens for n in (15, 16, 47, 48, 100)] == [0, 16, 32, 48, 48]
    assert bench.match([1, *TEXT[1:]]).tokens == 0  # another first token: another context
    assert bench.match([*TEXT[:20], 0, *TEXT[21:]]).tokens == 16
    assert bench.match(TEXT[16:]).tokens == 0  # the same tokens elsewhere


def test_a_prefix_in_use_is_shared_and_counted_once() -> None:
    bench = Bench()
    a = bench.compute(TEXT[:50])
    b = bench.compute([*TEXT[:40], *range(20)])
    assert bench.table(a)[:4] == bench.table(b)[:4]
    assert not set(bench.table(a)[4:]) & set(bench.table(b)[4:])
    assert bench.kv.used_pages == 4 + 3 + 4
    assert bench.match(TEXT).held == 6  # pages of its prefix that cost nobody a free page
    bench.kv.close(a)
    assert (bench.kv.used_pages, bench.pool.idle_count) == (8, 2)
    assert bench.match(TEXT).held == 4
    bench.kv.close(b)
    bench.check()
    assert (bench.kv.used_pages, bench.pool.idle_count, bench.pool.free_count) == (0, 8, 24)


def test_blank_pages_go_first_then_the_least_recently_used_its_end_before_its_start() -> None:
    bench = Bench()
    bench.run(TEXT[:48])
    bench.run(list(range(48)))
    bench.run([*TEXT[:16], 7])  # the first unit of TEXT is the latest used
    assert bench.pool.idle_count == 12
    bench.pool.take(12, 5)  # blank ones
    assert bench.pool.idle_count == 12
    remaining = []
    for _ in range(6):
        bench.pool.take(2, 5)
        remaining.append((bench.match(TEXT).tokens, bench.match(list(range(99))).tokens))
    assert remaining == [(32, 48), (16, 48), (16, 32), (16, 16), (16, 0), (0, 0)]
    assert bench.pool.free_count == 0
    with pytest.raises(OutOfPagesError):
        bench.pool.take(1, 5)


def test_what_runs_is_never_evicted() -> None:
    bench = Bench(pages=8)
    sequence = bench.compute(TEXT[:33])
    with pytest.raises(OutOfPagesError, match="4 pages asked for, 3 free"):
        bench.pool.take(4, 5)
    assert bench.match(TEXT).tokens == 32
    assert len(bench.table(sequence)) == 5
    bench.check()


def test_two_sequences_with_the_same_text_at_the_same_time_keep_their_own_pages() -> None:
    bench = Bench()
    kv, tokens = bench.kv, TEXT[:32]
    a, b = kv.open(), kv.open()
    for sequence in (a, b):
        kv.grow(sequence, 32)
        kv.record(sequence, 32, bench.chain(tokens), SIX)
        bench.check()
    assert kv.used_pages == 8
    kv.close(b)
    assert bench.pool.idle_count == 0  # nothing of b can be found
    kv.close(a)
    assert bench.pool.idle_count == 4


@pytest.mark.parametrize(
    ("rule", "at", "now", "found"),
    [
        ("not-worse", SIX, SIX, True),
        ("not-worse", SIX, FIVE, True),
        ("not-worse", FIVE, SIX, False),
        ("not-worse", PrecisionTag(5.9, 4, b"x"), SIX, True),  # a trade of planes, not a loss
        ("not-worse", PrecisionTag(5.85, 4, b"x"), SIX, False),
        ("any", FIVE, SIX, True),
        ("exact", SIX, SIX, True),
        ("exact", SIX, FIVE, False),
        ("exact", FIVE, SIX, False),
        ("exact", PrecisionTag(6.0, 6, None), PrecisionTag(6.0, 6, None), False),
    ],
)
def test_what_may_be_used_after_widths_have_changed(
    rule: str, at: PrecisionTag, now: PrecisionTag, found: bool
) -> None:
    bench = Bench(rule=rule)
    bench.run(TEXT[:33], at)
    assert bench.match(TEXT, now).tokens == (32 if found else 0)


def test_an_entry_is_as_good_as_the_worst_that_went_into_it() -> None:
    bench = Bench()
    kv, tokens = bench.kv, TEXT[:64]
    sequence = kv.open()
    for end, tag in ((16, SIX), (24, FIVE), (64, SIX)):
        kv.grow(sequence, end)
        kv.record(sequence, end, bench.chain(tokens), tag)
    tags = [entry.tag for entry in sequence.units if entry is not None]
    worst = PrecisionTag(5.0, 4, None)
    assert tags == [SIX, worst, worst, worst]  # the third and fourth have seen the second
    assert bench.match(tokens, SIX).tokens == 16
    assert bench.match(tokens, FIVE).tokens == 64
    assert bench.match(tokens, FIVE, least=5).tokens == 16  # a request's own floor
    # Computed again at six bits, from what was good enough, it takes the place of the worse.
    kv.close(sequence)
    bench.run([*tokens, 1])
    assert bench.match(tokens, SIX).tokens == 64
    assert bench.pool.idle_count == 8


def test_a_worse_copy_takes_nobodys_place() -> None:
    bench = Bench(rule="any")
    first = bench.compute(TEXT[:33], SIX)
    other = bench.kv.open()
    bench.kv.grow(other, 32)
    bench.kv.record(other, 32, bench.chain(TEXT[:32]), FIVE)
    assert other.units == [None, None]
    bench.kv.close(other)
    bench.kv.close(first)
    bench.check()
    assert bench.match(TEXT).entries[0].tag == SIX


def test_a_better_copy_leaves_the_worse_one_to_its_users() -> None:
    bench = Bench()
    old = bench.compute(TEXT[:33], FIVE)
    pages = bench.table(old)
    new = bench.compute(TEXT[:33], SIX)
    assert not set(pages) & set(bench.table(new))
    assert bench.table(old) == pages
    bench.kv.close(old)
    bench.check()
    assert bench.pool.idle_count == 0  # nobody can find the old one any more
    bench.kv.close(new)
    assert bench.pool.idle_count == 4


def test_a_sequence_that_went_wrong_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.run(TEXT[:33])
    sequence = bench.compute([*TEXT[:40], *range(30)])
    bench.kv.close(sequence, keep=False)
    bench.check()
    assert bench.pool.idle_count == 0
    assert bench.match(TEXT).tokens == 0


def test_clearing_forgets_what_is_idle_and_leaves_what_is_used() -> None:
    bench = Bench()
    bench.run(list(range(33)))
    sequence = bench.compute(TEXT[:33])
    pages = bench.table(sequence)
    bench.prefix.clear()
    bench.check()
    assert bench.pool.idle_count == 0
    assert bench.match(TEXT).tokens == bench.match(list(range(40))).tokens == 0
    assert bench.table(sequence) == pages
    bench.kv.close(sequence)
    bench.check()
    assert bench.pool.free_count == 24


def test_notes_go_to_every_unit_and_come_back_with_the_deepest() -> None:
    bench = Bench()
    kv, tokens = bench.kv, TEXT[:64]
    sequence = kv.open()
    kv.grow(sequence, 64)
    kv.record(sequence, 40, bench.chain(tokens), SIX)
    kv.annotate(sequence, "prompt")
    kv.record(sequence, 64, bench.chain(tokens), SIX)
    assert [entry.note for entry in sequence.units if entry] == ["prompt"] * 4
    again = kv.open(bench.match(tokens))
    assert again.note == "prompt"


def test_windows_need_the_pages_that_the_next_token_sees_and_no_others() -> None:
    bench = Bench(MIXED, pages=40)
    bench.run(TEXT)  # 6 units: 12 pages of the full layer, all 6 of the sliding one were seen off
    assert bench.pool.idle_count == 18
    sequence = bench.kv.open(bench.match(TEXT))
    # The next token is at 96 and sees from 77 on: unit 4, tokens 64 to 79, is the first needed.
    assert (sequence.first, sequence.blocks) == ([0, 4], [12, 6])
    assert len(bench.table(sequence, 1)) == 2
    bench.kv.close(sequence)
    bench.check()
    # Pages that the window left behind were let go first, so they are the first to be taken.
    bench.pool.take(40 - 18 + 3, 5)
    assert bench.match(TEXT).tokens == 96
    assert bench.match(TEXT[:33]).tokens == 0  # token 32 sees unit 0, whose sliding page is gone
    bench.check()


def test_digests_are_keyed_and_chained() -> None:
    one, other = Bench(), Bench()
    assert one.chain(TEXT).digests != other.chain(TEXT).digests
    digests = one.chain(TEXT).digests
    assert len(set(digests)) == len(digests) == 6
    grown = one.prefix.chain()
    for length in (5, 16, 17, 70, 100):
        grown.extend(lambda start, end: TEXT[start:end], length)
    assert grown.digests == digests


class Machine(RuleBasedStateMachine):
    """Random sequences over a small alphabet of units, with precision that comes and goes."""

    @initialize(rule=st.sampled_from(["not-worse", "any", "exact"]))
    def start(self, rule: str) -> None:
        self.bench = Bench(MIXED, pages=60, rule=rule)
        self.running: list[tuple[KvSequence, list[int], int]] = []
        self.tag = SIX
        # What each page holds is written down when a unit is computed and read when it is reused.
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(tag=st.sampled_from([SIX, FIVE, PrecisionTag(3.0, 2, b"three")]))
    def change(self, tag: PrecisionTag) -> None:
        self.tag = tag

    @rule(units=st.lists(st.integers(0, 1), min_size=1, max_size=4), tail=st.integers(1, 15))
    def begin(self, units: list[int], tail: int) -> None:
        tokens = [t for u in units for t in range(u * 16, u * 16 + 16)] + [99] * tail
        match = self.bench.match(tokens, self.tag)
        needed = self.bench.kv.pages_for_tokens(len(tokens)) - match.held
        if len(self.running) == 4 or needed > self.bench.pool.free_count:
            return
        sequence = self.bench.kv.open(match)
        for unit, page in enumerate(self.bench.table(sequence)[::2]):
            assert self.content[page] == tuple(tokens[: 16 * (unit + 1)])
        self.running.append((sequence, tokens, match.tokens))

    @rule(which=st.integers(0, 3), count=st.integers(1, 40))
    def advance(self, which: int, count: int) -> None:
        if which >= len(self.running):
            return
        sequence, tokens, computed = self.running[which]
        end = min(computed + count, len(tokens))
        kv = self.bench.kv
        kv.slide(sequence, computed)
        if kv.pages_to_grow(sequence, end) > self.bench.pool.free_count:
            return
        kv.grow(sequence, end)
        pages = self.bench.table(sequence)
        for unit in range(computed // 16, end // 16):
            self.content[pages[2 * unit]] = tuple(tokens[: 16 * (unit + 1)])
        kv.record(sequence, end, self.bench.chain(tokens), self.tag)
        self.running[which] = (sequence, tokens, end)

    @rule(which=st.integers(0, 3), keep=st.booleans())
    def end(self, which: int, keep: bool) -> None:
        if which < len(self.running):
            self.bench.kv.close(self.running.pop(which)[0], keep=keep)

    @rule(count=st.integers(1, 20))
    def weights_come_and_go(self, count: int) -> None:
        if count <= self.bench.pool.free_count:
            pages = self.bench.pool.take(count, 5)
            for page in pages:
                self.content.pop(page, None)
            self.bench.pool.give_back(pages, 5)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()


TestRandomSequences = Machine.TestCase
TestRandomSequences.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_slots_of_a_reused_prefix_are_those_of_its_pages() -> None:
    bench = Bench()
    first = bench.compute(TEXT[:33])
    pages = bench.table(first)
    again = bench.compute([*TEXT[:32], 5, 6])
    rows = np.array([again.row])
    batch = bench.kv.batch(rows, np.zeros(2, dtype=np.int64), np.array([32, 33]), 34)[0]
    assert batch.block_tables[0, 0, :4].tolist() == pages[:4]
    own = int(batch.block_tables[0, 0, 4])
    assert own not in pages
    assert batch.slots[0].tolist() == [own * 8, own * 8 + 1]
