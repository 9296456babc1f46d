"""Which tokens the next step computes. Decides; takes pages; touches no device.

Decodes come first, then prompts in chunks, both oldest first. When pages run out, relief comes in
the order of DESIGN section 6: planes are given up by plan, then the youngest sequence is
preempted and recomputed later. The oldest is never preempted, so it always advances; admission
makes sure that it fits alone.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from pw.engine.sequence import Chunk, Sequence
from pw.memory.kv_cache import KvCache
from pw.memory.pool import PagePool


class Relief(Protocol):
    """Who can make pages free (the precision controller)."""

    def release(self, pages: int, reason: str, *, last_resort: bool = False) -> int:
        """Free pages by giving up planes; how many came free (0 = no more to give).

        With `last_resort`, soft floors (hot experts, layers) do not hold.
        """

    def releasable(self) -> int:
        """Pages that `release` could free in all within the soft floors."""


class Scheduler:
    """Queues and admission.

    Args:
        kv: KV cache the sequences grow in.
        pool: Pages, shared with the weights.
        relief: Asked when pages run out.
        max_num_seqs: Running sequences at most.
        max_num_batched_tokens: Tokens of one step at most.
    """

    def __init__(
        self,
        kv: KvCache,
        pool: PagePool,
        relief: Relief,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._kv, self._pool, self._relief = kv, pool, relief
        self._max_seqs, self._max_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0

    def schedule(self) -> list[Chunk]:
        """Choose the chunks of the next step and give them pages. Empty when nothing can run."""
        chunks: dict[Sequence, Chunk] = {}
        for decoding in (True, False):
            for sequence in list(self.running):
                budget = self._max_tokens - sum(chunk.count for chunk in chunks.values())
                missing = sequence.length - sequence.computed
                preempted = sequence.kv is None
                if preempted or budget <= 0 or (missing == 1) != decoding:
                    continue
                self._grow(sequence, min(missing, budget), chunks)
        self._admit(chunks)
        return list(chunks.values())

    def pages_ahead(self, steps: int) -> int:
        """Pages that the running sequences will ask for within so many decode steps."""
        return sum(
            self._kv.pages_to_grow(seq.kv, min(seq.length + steps, seq.longest))
            for seq in self.running
            if seq.kv is not None
        )

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.kv is not None:
            self._kv.close(sequence.kv)
            sequence.kv = None

    def _grow(self, sequence: Sequence, count: int, chunks: dict[Sequence, Chunk]) -> bool:
        """Make room for `count` more tokens and schedule them, unless `sequence` must yield."""
        assert sequence.kv is not None
        end = sequence.computed + count
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
            if budget <= 0 or not self._fits(sequence):
                return
            self.waiting.popleft()
            sequence.kv = self._kv.open()
            self.running.append(sequence)
            if not self._grow(sequence, min(sequence.length, budget), chunks):
                return

    def _fits(self, sequence: Sequence) -> bool:
        """Whether a new sequence can be computed without taking pages from running ones."""
        if not self.running:
            return True
        needed = self._kv.pages_for_tokens(sequence.length + 1) + self.pages_ahead(1)
        return needed <= self._pool.free_count + self._relief.releasable()

    def _lacking(self, sequence: Sequence, tokens: int) -> int:
        assert sequence.kv is not None
        return self._kv.pages_to_grow(sequence.kv, tokens) - self._pool.free_count

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.kv is not None
        self.running.remove(sequence)
        self._kv.close(sequence.kv)
        sequence.kv = None
        sequence.computed = 0
        sequence.statistics = None
        self.preemptions += 1
        self.waiting.appendleft(sequence)
