"""One step's numbers: forward pass, draw, log-probabilities. Books nothing.

A step is launched, then read. In between it is a flight: on a GPU the next decode step can be
launched behind it, with the tokens that it has drawn on the device.

A pass that raises has changed nothing that counts: tokens are booked after it, and what it wrote of
keys and values is written again. So a step that breaks is computed in halves, and theirs in halves
again, until what breaks is one token of one sequence alone, twice: that one fails. Against a lack
of memory the halves help by themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.engine.precision.quality import Quality, RoutedPass
from pw.engine.request import TokenLogprob
from pw.engine.runner import ModelRunner
from pw.engine.sampling.logprobs import Scored
from pw.engine.sampling.sampler import Sampler
from pw.engine.sequence import Chunk, Sequence
from pw.errors import EngineLostError
from pw.memory.prefix_cache import PrecisionTag
from pw.memory.small_copies import mark, to_device, to_host

logger = logging.getLogger(__name__)

LOST_AFTER = 3  # steps in a row of which nothing could be computed


@dataclass
class Computed:
    """What came out of a step."""

    chunks: list[Chunk] = field(default_factory=list)  # in the cache now
    scored: dict[Chunk, list[TokenLogprob]] = field(default_factory=dict)  # prompt tokens
    ready: list[Chunk] = field(default_factory=list)  # those that sample ...
    tokens: list[int | None] = field(default_factory=list)  # their tokens; None: not finite
    logprobs: list[TokenLogprob | None] = field(default_factory=list)  # theirs, where wanted
    passes: list[RoutedPass] = field(default_factory=list)  # for `Quality.after_step`
    failed: list[tuple[Sequence, str]] = field(default_factory=list)  # with a line on the reason


@dataclass
class Results:
    """What a pass leaves on the device, and where it will be on the host."""

    ready: list[Chunk]  # [S] that sample
    drawn: Tensor  # [S] int64, their tokens on the device; -1 where logits are not finite
    tokens: NDArray[Any]  # [S] the same on the host, as all below when `arrived` returns
    scored: dict[Chunk, Scored]
    scores: Callable[[], dict[int, TokenLogprob]]
    routed: RoutedPass | None
    arrived: Callable[[], None] | None  # waits; None: nothing is read


@dataclass(eq=False)
class Flight:
    """A step that has been launched and not been read.

    Attributes:
        chunks: What it computes.
        tag: Widths of the experts that it computes with.
        results: Of its pass.
        broken: Why there are none, in a line.
    """

    chunks: list[Chunk]
    tag: PrecisionTag
    results: Results | None = None
    broken: str | None = None


class StepComputer:
    """Computes steps.

    Args:
        runner: Runs the model.
        sampler: Draws tokens.
        quality: Learns from prompts, if anything does.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, quality: Quality | None) -> None:
        self._runner, self._sampler, self._quality = runner, sampler, quality
        self._lost_steps = 0  # in a row

    def launch(self, chunks: list[Chunk], tag: PrecisionTag, after: Flight | None = None) -> Flight:
        """Start a step. It waits for the device only where prompts are learned from.

        Args:
            chunks: What to compute.
            tag: Widths of the experts now.
            after: The step before, if it has not been read: all chunks are `ahead` then, and of
                sequences that sample in it.

        Raises:
            EngineLostError: The device is lost.
        """
        flight = Flight(chunks, tag)
        flight.broken = self._try(flight, lambda: self._start(flight, after), loud=True)
        return flight

    def read(self, flight: Flight) -> Computed:
        """Wait for a step and take its results; what broke is computed again, in parts.

        Raises:
            EngineLostError: The device is lost, or step after step breaks whole.
        """
        computed, alone = Computed(), set[Sequence]()
        todo: list[list[Chunk]] = []
        self._finish(flight, computed)
        part = flight
        while True:
            if part.broken is not None:
                known = [replace(chunk, ahead=False) for chunk in part.chunks if chunk.lives]
                smaller = _smaller(known, alone)
                if known and not smaller:
                    computed.failed.append((known[0].sequence, part.broken))
                todo += smaller
            if not todo:
                break
            part = self._again(todo.pop(), flight.tag, computed)
        self._lost_steps = self._lost_steps + 1 if computed.failed and not computed.chunks else 0
        if self._lost_steps >= LOST_AFTER:
            raise EngineLostError(f"{LOST_AFTER} steps in a row: {computed.failed[-1][1]}")
        return computed

    def _again(self, chunks: list[Chunk], tag: PrecisionTag, computed: Computed) -> Flight:
        """Compute a part of a step that broke, and wait for it."""
        flight = Flight(chunks, tag)

        def compute() -> None:
            self._start(flight, None)
            self._take(flight, computed)

        flight.broken = self._try(flight, compute, loud=False)
        return flight

    def _finish(self, flight: Flight, computed: Computed) -> None:
        if flight.broken is None:
            flight.broken = self._try(flight, lambda: self._take(flight, computed), loud=True)

    def _try(self, flight: Flight, work: Callable[[], None], *, loud: bool) -> str | None:
        """Do something for a pass, or tell in a line why it broke."""
        chunks = flight.chunks
        try:
            work()
        except torch.AcceleratorError as error:
            raise EngineLostError(f"the device is lost: {error}") from error
        except EngineLostError:
            raise  # of several ranks: they are no longer in step
        except Exception as error:
            text = "a forward pass over %d sequences broke: %r"
            logger.error(text, len(chunks), error, exc_info=error if loud else None)
            reason = f"the forward pass failed: {type(error).__name__}"
            scarce = isinstance(error, torch.OutOfMemoryError)
        else:
            return None
        if scarce and torch.cuda.is_available():
            torch.cuda.empty_cache()  # the error is gone, and the tensors that it held
        for chunk in chunks:
            chunk.sequence.statistics = None  # half taken in
        if self._quality is not None:
            self._quality.drop_pass()
        return reason

    def _start(self, flight: Flight, after: Flight | None) -> None:
        """Launch the pass of a flight."""
        chunks, scored = flight.chunks, dict[Chunk, Scored]()
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.started is None:
                sequence.started = time.monotonic()
            if self._quality is not None:
                self._quality.open_prompt(sequence, chunk.start)
        ready = [chunk for chunk in chunks if chunk.samples]
        sequences = [chunk.sequence for chunk in ready]
        with self._runner.threads_for(chunks):
            if after is None:
                logits, scored = self._runner.run(chunks)
            else:
                logits = self._runner.run_ahead(chunks, _drawn_by(after, chunks))
            drawn = self._sampler.choose(sequences, logits, unread=0 if after is None else 1)
            scores = self._sampler.score(sequences, logits, drawn)
            tokens, routed = to_host(drawn), None
            if self._quality is not None:
                routed = self._quality.read_pass(sum(chunk.count for chunk in chunks))
            arrived = mark(logits.device) if ready or scored or routed else None
        flight.results = Results(ready, drawn, tokens, scored, scores, routed, arrived)

    def _take(self, flight: Flight, computed: Computed) -> None:
        """Wait for the results of a pass, and add them."""
        results = flight.results
        assert results is not None
        if results.arrived is not None:
            self._runner.wait(results.arrived)
        scored = {chunk: entries() for chunk, entries in results.scored.items()}
        logprobs = results.scores()
        computed.chunks += flight.chunks
        computed.scored |= scored
        computed.ready += results.ready
        computed.tokens += [None if token < 0 else token for token in results.tokens.tolist()]
        computed.logprobs += [logprobs.get(row) for row in range(len(results.ready))]
        if results.routed is not None:
            computed.passes.append(results.routed)


def _smaller(chunks: list[Chunk], alone: set[Sequence]) -> list[list[Chunk]]:
    """Parts of a pass that broke, the first one last; none of a token that broke alone before.

    Args:
        chunks: Of the pass.
        alone: Sequences that broke alone; is added to.
    """
    if len(chunks) > 1:
        middle = -(-len(chunks) // 2)
        return [chunks[middle:], chunks[:middle]]
    if not chunks or (chunks[0].count == 1 and chunks[0].sequence in alone):
        return []
    alone.add(chunks[0].sequence)
    return [[replace(chunks[0], count=-(-chunks[0].count // 2))]]


def _drawn_by(flight: Flight, chunks: list[Chunk]) -> Tensor:
    """Tokens [n] int64, on the device, that a step has drawn for the sequences of some chunks."""
    results = flight.results
    assert results is not None
    row_of = {chunk.sequence: row for row, chunk in enumerate(results.ready)}
    rows = [row_of[chunk.sequence] for chunk in chunks]
    if rows == list(range(len(rows))):
        return results.drawn[: len(rows)]
    return results.drawn[to_device(np.array(rows), results.drawn.device)]
