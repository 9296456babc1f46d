"""One step's numbers: forward pass, draw, log-probabilities. Books nothing.

A pass that raises has changed nothing that counts: tokens are booked after it, and what it wrote of
keys and values is written again. So a step that breaks is computed in halves, and theirs in halves
again, until what breaks is one token of one sequence alone, twice: that one fails. Against a lack
of memory the halves help by themselves.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import torch

from pw.engine.precision.quality import Quality
from pw.engine.request import TokenLogprob
from pw.engine.runner import ModelRunner
from pw.engine.sampling.sampler import Sampler
from pw.engine.sequence import Chunk, Sequence
from pw.errors import EngineLostError
from pw.memory.small_copies import to_host, wait_for

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
    failed: list[tuple[Sequence, str]] = field(default_factory=list)  # with a line on the reason


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

    def run(self, chunks: list[Chunk]) -> Computed:
        """Compute a step, in parts if it must be.

        Raises:
            EngineLostError: The device is lost, or step after step breaks whole.
        """
        computed = Computed()
        todo, alone = [chunks], set[Sequence]()
        while todo:
            part = todo.pop()
            reason = self._try(part, computed, first=part is chunks)
            if reason is None:
                continue
            if len(part) > 1:
                middle = -(-len(part) // 2)
                todo += [part[middle:], part[:middle]]
                continue
            (chunk,) = part
            if chunk.count > 1 or chunk.sequence not in alone:
                alone.add(chunk.sequence)
                todo.append([Chunk(chunk.sequence, chunk.start, -(-chunk.count // 2))])
            else:
                computed.failed.append((chunk.sequence, reason))
        self._lost_steps = 0 if computed.chunks else self._lost_steps + 1
        if self._lost_steps >= LOST_AFTER:
            raise EngineLostError(f"{LOST_AFTER} steps in a row: {computed.failed[-1][1]}")
        return computed

    def _try(self, chunks: list[Chunk], computed: Computed, *, first: bool) -> str | None:
        """Add what comes out of a pass over `chunks`, or tell in a line why nothing does."""
        try:
            self._compute(chunks, computed)
        except torch.AcceleratorError as error:
            raise EngineLostError(f"the device is lost: {error}") from error
        except EngineLostError:
            raise  # of several ranks: they are no longer in step
        except Exception as error:
            text = "a forward pass over %d sequences broke: %r"
            logger.error(text, len(chunks), error, exc_info=error if first else None)
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

    def _compute(self, chunks: list[Chunk], computed: Computed) -> None:
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.started is None:
                sequence.started = time.monotonic()
            if self._quality is not None:
                self._quality.open_prompt(sequence, chunk.start)
        at_end = [chunk for chunk in chunks if chunk.samples]
        ready = [chunk.sequence for chunk in at_end]
        with self._runner.threads_for(chunks):
            logits, scored = self._runner.run(chunks)
            chosen = self._sampler.choose(ready, logits)
            scores = self._sampler.score(ready, logits, chosen)
            tokens = to_host(chosen)
            if self._quality is not None:
                self._quality.note_pass(sum(chunk.count for chunk in chunks))
            if at_end or scored or self._quality is not None:
                wait_for(logits.device)
        computed.chunks += chunks
        computed.scored |= {chunk: entries() for chunk, entries in scored.items()}
        computed.ready += at_end
        computed.tokens += [None if token < 0 else token for token in tokens.tolist()]
        logprobs = scores()
        computed.logprobs += [logprobs.get(row) for row in range(len(at_end))]
