"""Runs the model on the chunks of a step. Touches the device, decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pw.engine.context import StepBatch
from pw.engine.experts import RoutedExperts
from pw.engine.logprobs import score
from pw.engine.request import TokenLogprob
from pw.engine.sequence import Chunk
from pw.memory.kv_cache import KvCache
from pw.models.skeleton import Skeleton

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
    """

    def __init__(
        self, skeleton: Skeleton, experts: RoutedExperts, kv: KvCache, vocabulary: int
    ) -> None:
        skeleton.bind_experts(experts)
        self._skeleton, self._experts, self._kv = skeleton, experts, kv
        self._vocabulary = vocabulary
        self.observer: PromptLogits | None = None
        weights = skeleton.dense_bytes // skeleton.dtype.itemsize
        on_cpu = skeleton.device.type == "cpu"
        self._one_thread_tokens = _ONE_THREAD_MULTIPLIES // weights if on_cpu else 0

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> tuple[Tensor, dict[Chunk, list[TokenLogprob]]]:
        """Compute one step.

        Returns:
            Logits [S, V] of the chunks that sample, in order, and for each chunk whose sequence
            wants them the log-probabilities of the prompt tokens that follow its tokens.
        """
        device = self._skeleton.device
        batch = StepBatch(chunks, self._kv, device)
        self._experts.batch = batch
        rows, samples, scored = self._rows(chunks)
        keep = torch.tensor(rows, dtype=torch.int64, device=device)
        logits = self._skeleton.forward(batch.input_ids, batch.positions, batch, keep)
        self._experts.batch = None
        prompt_logprobs = {
            chunk: self._score(chunk, logits[span]) for chunk, span in scored.items()
        }
        return logits[samples], prompt_logprobs

    def _score(self, chunk: Chunk, logits: Tensor) -> list[TokenLogprob]:
        """Log-probabilities of the prompt tokens that follow those of a chunk: logits [n, V]."""
        if self.observer is not None:
            self.observer(chunk.sequence.request_id, chunk.start + 1, logits)
        count = chunk.sequence.params.prompt_logprobs or 0
        targets = chunk.sequence.tokens(chunk.start + 1, chunk.start + 1 + len(logits))
        return score(logits, targets, [count] * len(targets), self._vocabulary)

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
    def _rows(chunks: list[Chunk]) -> tuple[list[int], list[int], dict[Chunk, slice]]:
        """Rows of the batch that need logits, and what each of them is for."""
        rows: list[int] = []
        samples: list[int] = []
        scored: dict[Chunk, slice] = {}
        start = 0
        for chunk in chunks:
            following = min(chunk.start + chunk.count, len(chunk.sequence.prompt) - 1) - chunk.start
            if chunk.sequence.params.prompt_logprobs is not None and following > 0:
                scored[chunk] = slice(len(rows), len(rows) + following)
                rows += range(start, start + following)
            start += chunk.count
            if chunk.samples:
                samples.append(len(rows))
                rows.append(start - 1)
        # A step of prompt chunks alone samples nothing; the model still wants one row.
        return rows or [start - 1], samples, scored
