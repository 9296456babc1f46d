"""Which tokens the next step computes. Decides; takes pages; touches no device.

Decodes come first, then prompts in chunks, both oldest first. When pages run out, relief comes in
the order of DESIGN section 6: idle prefixes go (they count as free pages), planes are given up by
plan, then the youngest sequence is preempted and recomputed later, but for what the prefix cache
still has of it. The oldest is never preempted, so it always advances; admission makes sure that it
fits alone. Nobody overtakes: who is next waits at most for the longest rest of those that run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from pw.engine.sequence import Chunk, Sequence
from pw.memory.kv_cache import KvCache
from pw.memory.pool import PagePool
from pw.memory.prefix_cache import PrecisionTag, PrefixMatch

UNQUANTIZED = PrecisionTag(16.0, 16, b"unquantized")


class Forecast(NamedTuple):
    """KV pages that will soon be asked for, beyond those held now."""

    running: int  # by the sequences that run
    waiting: int  # by the next one in the queue, if there is a place for it


class Relief(Protocol):
    """Who can make pages free (the precision controller).

    Attributes:
        floor: Bits below which no block may fall while the running sequences run; 0 = none.
    """

    floor: int

    def release(self, pages: int, reason: str, *, last_resort: bool = False) -> int:
        """Free pages by giving up planes; how many came free (0 = no more to give).

        With `last_resort`, soft floors (hot experts, layers) do not hold.
        """

    def releasable(self) -> int:
        """Pages that `release` could free in all within the soft floors."""

    def holds(self, bits: int) -> bool:
        """Whether every block has at least so many bits now."""


class FloorWish(NamedTuple):
    """What the next sequence to be let in asks of the weights (`SamplingParams.min_bits`)."""

    sequence: Sequence
    bits: int  # least bits of every block
    pages: int  # that it and the running sequences need beside the weights
    alone: bool  # nothing runs


class Scheduler:
    """Queues and admission.

    Args:
        kv: KV cache the sequences grow in.
        pool: Pages, shared with the weights.
        relief: Asked when pages run out.
        max_num_seqs: Running sequences at most.
        max_num_batched_tokens: Tokens of one step at most.
        precision: Tells the widths of the experts now, for the prefix cache.

    Attributes:
        precision: The same.
    """

    def __init__(
        self,
        kv: KvCache,
        pool: PagePool,
        relief: Relief,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        precision: Callable[[], PrecisionTag] = lambda: UNQUANTIZED,
    ) -> None:
        self._kv, self._pool, self._relief = kv, pool, relief
        self.precision = precision
        self._max_seqs, self._max_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0

    def schedule(self) -> list[Chunk]:
        """Choose the chunks of the next step and give them pages. Empty when nothing can run."""
        chunks: dict[Sequence, Chunk] = {}
        taken = 0  # tokens of the chunks
        for decoding in (True, False):
            for sequence in list(self.running):
                budget, before = self._max_tokens - taken, self.preemptions
                missing = sequence.length - sequence.computed
                preempted = sequence.kv is None
                if preempted or budget <= 0 or (missing == 1) != decoding:
                    continue
                if self._grow(sequence, min(missing, budget), chunks):
                    taken += chunks[sequence].count
                if self.preemptions > before:  # chunks of others are gone
                    taken = sum(chunk.count for chunk in chunks.values())
        self._admit(chunks)
        return list(chunks.values())

    def schedule_ahead(self, flying: Iterable[Chunk]) -> list[Chunk] | None:
        """The decode step behind one whose tokens are not known yet, with pages for it.

        Args:
            flying: Chunks of that step, one token each, all at the ends of their sequences.

        Returns:
            A chunk for each sequence that may go on; None where somebody would have to be preempted
            for that. Who has been given pages keeps them.
        """
        chunks: list[Chunk] = []
        for chunk in flying:
            sequence, start = chunk.sequence, chunk.start + 1
            if sequence.kv is None or sequence.remaining <= 1:
                continue
            self._kv.slide(sequence.kv, start)
            while (lacking := self._lacking(sequence, start + 1)) > 0:
                if self._relief.release(lacking, "kv allocation") == 0:
                    return None
            self._kv.grow(sequence.kv, start + 1)
            chunks.append(Chunk(sequence, start, 1, ahead=True))
        return chunks

    def admits(self) -> bool:
        """Whether the next step would let in a sequence that waits."""
        if not self.waiting or len(self.running) >= self._max_seqs:
            return False
        sequence = self.waiting[0]
        if not self._relief.holds(sequence.params.min_bits or 0):
            return False
        return self._fits(sequence, self._find_prefix(sequence))

    def next_floor(self) -> FloorWish | None:
        """The wish of the next sequence, if it has one and there is a place for it."""
        if not self.waiting or len(self.running) >= self._max_seqs:
            return None
        sequence = self.waiting[0]
        if sequence.params.min_bits is None:
            return None
        pages = self._kv.pages_for_tokens(sequence.length + 1) + self.pages_ahead(1)
        return FloorWish(sequence, sequence.params.min_bits, pages, not self.running)

    def pages_ahead(self, steps: int) -> int:
        """Pages that the running sequences will ask for within so many decode steps."""
        return sum(
            self._kv.pages_ahead(seq.kv, min(seq.length + steps, seq.longest))
            for seq in self.running
            if seq.kv is not None
        )

    def forecast(self, steps: int) -> Forecast:
        """What will be asked for within so many decode steps."""
        waiting = 0
        if self.waiting and len(self.running) < self._max_seqs:
            head = self.waiting[0]
            waiting = self._kv.pages_for_tokens(min(head.length + steps, head.longest))
        return Forecast(self.pages_ahead(steps), waiting)

    def book(self, chunk: Chunk, tag: PrecisionTag) -> None:
        """The tokens of a chunk are in the cache now, computed at the widths of `tag`."""
        sequence, end = chunk.sequence, chunk.start + chunk.count
        sequence.computed = end
        if self._kv.prefix is not None:
            assert sequence.kv is not None
            if sequence.chain is None:
                sequence.chain = self._kv.prefix.chain()
            sequence.chain.extend(sequence.tokens, end)
            self._kv.record(sequence.kv, end, sequence.chain, tag)

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Forget a sequence, wherever it is, and free its pages.

        Args:
            sequence: The sequence.
            keep: False where its KV may be wrong: nobody shall use it again.
        """
        if sequence in self.running:
            self.running.remove(sequence)
            self._set_floor()
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.kv is not None:
            self._kv.close(sequence.kv, keep=keep)
            sequence.kv = None

    def _grow(self, sequence: Sequence, count: int, chunks: dict[Sequence, Chunk]) -> bool:
        """Make room for `count` more tokens and schedule them, unless `sequence` must yield."""
        assert sequence.kv is not None
        end = sequence.computed + count
        self._kv.slide(sequence.kv, sequence.computed)
        while (lacking := self._lacking(sequence, end)) > 0:
            if self._relief.release(lacking, "kv allocation") > 0:
                continue
            victim = self.running[-1]
            if victim is not self.running[0]:
                self._preempt(victim)
                chunks.pop(victim, None)
                if victim is sequence:
                    return False
            elif self._relief.release(lacking, "last resort", last_resort=True) == 0:
                raise AssertionError("the oldest sequence does not fit alone")
        self._kv.grow(sequence.kv, end)
        chunks[sequence] = Chunk(sequence, sequence.computed, count)
        return True

    def _admit(self, chunks: dict[Sequence, Chunk]) -> None:
        while self.waiting and len(self.running) < self._max_seqs:
            budget = self._max_tokens - sum(chunk.count for chunk in chunks.values())
            sequence = self.waiting[0]
            if budget <= 0 or not self._relief.holds(sequence.params.min_bits or 0):
                return
            match = self._find_prefix(sequence)
            if not self._fits(sequence, match):
                return
            self.waiting.popleft()
            self.running.append(sequence)
            self._set_floor()
            self._let_in(sequence, match)
            if not self._grow(sequence, min(sequence.length - match.tokens, budget), chunks):
                return

    def _find_prefix(self, sequence: Sequence) -> PrefixMatch:
        """What need not be computed; the last token is always, for the logits after it."""
        prefix, params, needed = self._kv.prefix, sequence.params, sequence.length - 1
        if prefix is None:
            return PrefixMatch()
        if params.prompt_logprobs is not None and sequence.seen < len(sequence.prompt):
            needed = max(0, params.prompt_logprobs_start - 1)  # from there on for theirs
        if sequence.chain is None:
            sequence.chain = prefix.chain()
        sequence.chain.extend(sequence.tokens, sequence.length)
        digests = sequence.chain.digests[: min(needed, sequence.length - 1) // self._kv.unit]
        return prefix.match(digests, self.precision(), params.min_bits)

    def _let_in(self, sequence: Sequence, match: PrefixMatch) -> None:
        sequence.kv = self._kv.open(match)
        sequence.computed = sequence.reused = match.tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = match.tokens
            if self._kv.prefix is not None:
                self._kv.prefix.queries += len(sequence.prompt)
                self._kv.prefix.hits += match.tokens

    def _fits(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether a new sequence can be computed without taking pages from running ones."""
        if not self.running:
            return True
        own = self._kv.pages_for_tokens(sequence.length + 1) - match.held
        needed = own + self.pages_ahead(1)
        return needed <= self._pool.free_count + self._relief.releasable()

    def _set_floor(self) -> None:
        self._relief.floor = max((seq.params.min_bits or 0 for seq in self.running), default=0)

    def _lacking(self, sequence: Sequence, tokens: int) -> int:
        assert sequence.kv is not None
        return self._kv.pages_to_grow(sequence.kv, tokens) - self._pool.free_count

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.kv is not None
        self.running.remove(sequence)
        self._set_floor()
        self._kv.close(sequence.kv)
        sequence.kv = None
        sequence.computed = sequence.reused = 0
        sequence.statistics = None
        self.preemptions += 1
        self.waiting.appendleft(sequence)
