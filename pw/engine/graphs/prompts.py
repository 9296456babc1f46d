"""Prompts that nobody sent: they make a new engine compile and load what prompts need.

Which kernels attention and products take depends on how many tokens a step has and how long its
sequences are, so there are a few of them. What they write goes nowhere, and no expert counts them.
"""

from __future__ import annotations

import torch

from pw.engine.context import StepBatch
from pw.engine.experts import RoutedExperts
from pw.memory.kv_cache import KvCache
from pw.memory.kv_layout import GroupBatch
from pw.models.skeleton import Skeleton
from pw.models.slicing import ranks_apart

_FEW = 96  # tokens: too few to fill a GPU
_LONG = 4096  # tokens before them, over which attention is split
_LEFT = (8, 4)  # tokens of what chunks leave; captured steps of so many take other products


class _NobodysPrompt(StepBatch):
    """A prompt of some tokens behind a context."""

    def __init__(self, tokens: int, context: int, kv: KvCache, device: torch.device) -> None:
        self._kv, self.spans = kv, ()
        self.live = torch.zeros(1, dtype=torch.int32, device=device)
        self.input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.positions = torch.arange(context, context + tokens, device=device)
        self._query_start = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        self._seq_lens = torch.tensor([context + tokens], dtype=torch.int32, device=device)
        self._groups = [
            GroupBatch(
                torch.zeros(
                    len(shape.layers), 1, shape.blocks(context + tokens), dtype=torch.int32,
                    device=device,
                ),
                torch.full((len(shape.layers), tokens), -1, device=device),
            )
            for shape in kv.shapes
        ]  # fmt: skip


@torch.inference_mode()
def rehearse_prompts(skeleton: Skeleton, experts: RoutedExperts, kv: KvCache) -> None:
    """Run the largest chunk of a prompt, a small one, one behind a long context, and ends of some.

    Each of several ranks does so by itself: one at which it breaks leaves no other waiting.

    Args:
        skeleton: The model, with `experts` bound.
        experts: What its experts modules call.
        kv: The cache; its pages are read, and not written.
    """
    longest = min(
        table.shape[2] * shape.tokens_per_page
        for table, shape in zip(kv.block_tables, kv.shapes, strict=True)
    )
    chunk = min(kv.chunk_tokens, longest)
    sequences = kv.block_tables[0].shape[0]
    few = min(max(_FEW, sequences + 1), chunk)  # more than a decode step has
    passes = [(chunk, 0), (few, 0), (few, min(_LONG, longest - few))]
    passes += [(min(left, chunk), 0) for left in _LEFT]
    for tokens, context in passes:
        batch = _NobodysPrompt(tokens, context, kv, skeleton.device)
        experts.batch = batch
        try:
            last = batch.positions.new_tensor([tokens - 1])
            with ranks_apart(skeleton.model):
                hidden = skeleton.hidden(batch.input_ids, batch.positions, batch, last)
                skeleton.logits(hidden)
        finally:
            experts.batch = None
