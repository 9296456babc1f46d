"""Runs the model on the chunks of a step. Touches the device, decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pw.engine.context import StepBatch
from pw.engine.diagnosis import FiniteWatch
from pw.engine.experts import RoutedExperts
from pw.engine.graphs.decode import DecodeSteps
from pw.engine.graphs.start import capture_steps
from pw.engine.sampling.logprobs import Scored, score
from pw.engine.sequence import Chunk
from pw.memory.budget import SCORED_ROWS
from pw.memory.kv_cache import KvCache
from pw.memory.small_copies import to_device
from pw.models.skeleton import Skeleton
from pw_kernels.likeliest import likeliest

logger = logging.getLogger(__name__)

PromptLogits = Callable[[str, int, Tensor], None]
"""Gets a request's id, the index of the prompt token that row 0 predicts, and logits [n, V]."""

_ONE_THREAD_MULTIPLIES = 32_000_000  # below, waking a second CPU thread costs more than it saves


class ModelRunner:
    """The model with our experts and attention functions bound.

    Args:
        skeleton: The model without its routed experts.
        experts: What its experts modules call.
        kv: Cache that attention writes to and reads from.
        vocabulary: Tokens that have a text.

    Attributes:
        observer: Sees the logits of scored prompt tokens before they are dropped.
        steps: Decode steps of fixed shape, where there are any.
    """

    def __init__(
        self, skeleton: Skeleton, experts: RoutedExperts, kv: KvCache, vocabulary: int
    ) -> None:
        skeleton.bind_experts(experts)
        self._skeleton, self._experts, self._kv = skeleton, experts, kv
        self._vocabulary = vocabulary
        self.observer: PromptLogits | None = None
        self.steps: DecodeSteps | None = None
        weights = skeleton.dense_bytes // skeleton.dtype.itemsize
        on_cpu = skeleton.device.type == "cpu"
        self._one_thread_tokens = _ONE_THREAD_MULTIPLIES // weights if on_cpu else 0

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> tuple[Tensor, dict[Chunk, Scored]]:
        """Compute one step.

        Where there are `steps` of fixed shape, what decodes goes through them and the rest through
        a pass of its own.

        Returns:
            Logits [S, V] of the chunks that sample, in order, which the next run may overwrite, and
            for each chunk whose sequence wants them the log-probabilities of the prompt tokens that
            follow its tokens.
        """
        steps = self.steps
        decoding = [] if steps is None else [chunk for chunk in chunks if steps.takes(chunk)]
        if steps is None or not decoding:
            return self._run_packed(chunks)
        logits = steps.run(decoding, self._experts)
        if len(decoding) == len(chunks):
            return logits, {}
        others = [chunk for chunk in chunks if chunk not in set(decoding)]
        other_logits, scored = self._run_packed(others)
        ready = [*decoding, *(chunk for chunk in others if chunk.samples)]
        place = {chunk: row for row, chunk in enumerate(ready)}
        order = np.array([place[chunk] for chunk in chunks if chunk.samples])
        both = torch.cat((logits, other_logits))
        return both[to_device(order, both.device)], scored

    @torch.inference_mode()
    def run_ahead(self, chunks: list[Chunk], drawn: Tensor) -> Tensor:
        """Compute a decode step whose tokens [n] int64 lie on the device and were not read.

        Returns:
            Logits [n, V], which the next run may overwrite.
        """
        assert self.steps is not None
        return self.steps.run(chunks, self._experts, drawn)

    def wait(self, arrived: Callable[[], None]) -> None:
        """Let the results of a step arrive."""
        arrived()

    def capture(self, most: int) -> None:
        """Let decode steps of up to `most` sequences be replayed from CUDA graphs, if they can."""
        self.steps = capture_steps(self._skeleton, self._experts, self._kv, most)

    def compile_draw(self) -> None:
        """Compile what draws behind captured steps; for the rank that draws, once all have them."""
        if self.steps is None:
            return
        dtype, device = self._skeleton.dtype, self._skeleton.device
        try:
            logits = torch.zeros((1, self._skeleton.vocab_size), dtype=dtype, device=device)
            likeliest(logits, self._vocabulary)
        except Exception as error:  # whatever a compiler does; the first draw tries again
            logger.warning("draws are not compiled yet: %s: %s", type(error).__name__, error)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a device that is lost says so here

    def release(self) -> None:
        """Let decode steps run by calls from now on; their graphs are gone when this returns."""
        if self.steps is not None:
            self.steps.release()
            self.steps = None

    def _run_packed(self, chunks: list[Chunk]) -> tuple[Tensor, dict[Chunk, Scored]]:
        """`run` as one pass over the tokens of all chunks."""
        device = self._skeleton.device
        batch = StepBatch(chunks, self._kv, device)
        self._experts.batch = batch
        rows, samples, scored = self._rows(chunks)
        keep = to_device(np.array(rows, dtype=np.int64), device)
        try:
            hidden = self._skeleton.hidden(batch.input_ids, batch.positions, batch, keep)
        finally:
            self._experts.batch = None
        prompt_logprobs = {
            chunk: self._score(chunk, first, hidden[span]) for chunk, first, span in scored
        }
        index = to_device(np.array(samples, dtype=np.int64), device)
        return self._skeleton.logits(hidden[index]), prompt_logprobs

    def _score(self, chunk: Chunk, first: int, hidden: Tensor) -> Scored:
        """Log-probabilities of prompt tokens from `first` on, given hidden [n, H] before them.

        Few rows at a time: logits of a whole prompt would take more memory than the model's layers.
        """
        params = chunk.sequence.params
        scored: list[Scored] = []
        for start in range(0, len(hidden), SCORED_ROWS):
            logits = self._skeleton.logits(hidden[start : start + SCORED_ROWS])
            place = first + start
            if self.observer is not None:
                self.observer(chunk.sequence.request_id, place, logits)
            targets = chunk.sequence.tokens(place, place + len(logits))
            counts = [params.prompt_logprobs or 0] * len(targets)
            scored.append(score(logits, targets, counts, self._vocabulary))
        return lambda: [entry for part in scored for entry in part()]

    @torch.inference_mode()
    def first_not_finite(self, chunk: Chunk) -> str:
        """Where the numbers of a chunk stop being finite, for the log. Computes it again."""
        watch = FiniteWatch(self._experts, self._skeleton.geometry)
        self._skeleton.bind_experts(watch)
        try:
            batch = StepBatch([chunk], self._kv, self._skeleton.device)
            keep = to_device(np.array([chunk.count - 1]), self._skeleton.device)
            self._skeleton.hidden(batch.input_ids, batch.positions, batch, keep)
        except Exception:
            logger.exception("the place where numbers stop being finite was not found")
        finally:
            self._skeleton.bind_experts(self._experts)
        return watch.found or "behind the layers"

    @contextmanager
    def threads_for(self, chunks: list[Chunk]) -> Iterator[None]:
        """Keep torch to one CPU thread for a small step, from forward pass to sampling.

        Waiting for the other threads would take most of its time, ten times so where other jobs
        share the cores. A parallel call in between would pay for waking them again.
        """
        threads = torch.get_num_threads()
        small = sum(chunk.count for chunk in chunks) <= self._one_thread_tokens
        if not small or threads == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    @staticmethod
    def _rows(chunks: list[Chunk]) -> tuple[list[int], list[int], list[tuple[Chunk, int, slice]]]:
        """Rows of the batch whose hidden state is wanted, and what each of them is for.

        Returns:
            Rows of the batch; which of them sample; and for each chunk whose prompt is scored the
            first prompt token that it scores, and which rows do.
        """
        rows: list[int] = []
        samples: list[int] = []
        scored: list[tuple[Chunk, int, slice]] = []
        offset = 0
        for chunk in chunks:
            targets = chunk.scored_targets()
            if targets:
                scored.append((chunk, targets.start, slice(len(rows), len(rows) + len(targets))))
                before = offset - chunk.start - 1
                rows += range(before + targets.start, before + targets.stop)
            offset += chunk.count
            if chunk.samples:
                samples.append(len(rows))
                rows.append(offset - 1)
        # A step of prompt chunks alone samples nothing; the model still wants one row.
        return rows or [offset - 1], samples, scored
