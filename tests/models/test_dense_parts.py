"""Dense weights shared by two ranks give what the whole model gives. The ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw.errors import ConfigError, ModelError
from pw.models.checkpoint import Checkpoint
from pw.models.skeleton import Skeleton, load_skeleton
from pw.models.slicing import DensePart, Reduction
from pw.models.testing import PlainContext, make_checkpoint, streamed_experts

RANKS = 2
CHUNKS = ((0, 5), (1, 3))
IDS = torch.tensor([5, 9, 11, 40, 8, 61, 30, 17])
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])


class Meeting:
    """Adds up what the threads of all ranks bring, in the order of the ranks."""

    def __init__(self) -> None:
        self._brought: list[Tensor] = [torch.empty(0)] * RANKS
        self._barrier = threading.Barrier(RANKS, timeout=60)
        self.sums = 0

    def connect(self, rank: int, reduction: Reduction) -> None:
        """Let a rank's partial sums meet the others'."""

        def all_reduce(partial: Tensor) -> Tensor:
            self._brought[rank] = partial.clone()
            self._barrier.wait()
            self.sums += rank == 0
            total = self._brought[0] + self._brought[1]
            self._barrier.wait()
            return partial.copy_(total)

        reduction.connect(all_reduce)


def outputs(skeleton: Skeleton, experts: Any) -> Tensor:
    skeleton.bind_experts(experts)
    context = PlainContext()
    context.begin(CHUNKS)
    with torch.inference_mode():
        return skeleton.forward(IDS, POSITIONS, context, torch.arange(len(IDS)))


def no_experts(_slot: int, _module: Any, x: Tensor, _ids: Tensor, _weights: Tensor) -> Tensor:
    return torch.zeros_like(x)


@pytest.mark.parametrize(
    ("kind", "sums"),
    [
        ("qwen2_moe", 6),  # a layer: attention, then routed and shared experts together
        ("qwen2_moe_norm", 6),
        ("mixtral", 6),
        ("qwen3_moe", 6),
        ("granitemoe", 6),
        ("glm4_moe", 8),  # the first layer is dense; the others sum their shared experts apart
        ("gpt_oss", 6),
        ("deepseek_v2", 8),
        ("deepseek_v3", 8),
    ],
)
def test_two_ranks_give_the_whole_model(kind: str, sums: int, tmp_path: Path) -> None:
    model = make_checkpoint(kind, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    whole = load_skeleton(checkpoint, torch.float32)
    expected = outputs(whole, streamed_experts(model, checkpoint, torch.float32))
    meeting, ranks = Meeting(), []
    for rank in range(RANKS):
        reduction = Reduction()
        part = DensePart(checkpoint.architecture, rank, RANKS, reduction)
        ranks.append(load_skeleton(checkpoint, torch.float32, part=part))
        meeting.connect(rank, reduction)
        assert ranks[-1].dense_bytes < whole.dense_bytes
        heads = [sum(layer.kv_heads for layer in loaded.kv.layers) for loaded in (ranks[-1], whole)]
        assert heads[0] * RANKS == heads[1]
        assert (ranks[-1].flat is None) == (whole.flat is None)

    def run(rank: int) -> Tensor:
        experts = streamed_experts(model, checkpoint, torch.float32) if rank == 0 else no_experts
        return outputs(ranks[rank], experts)

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(run, range(RANKS)))
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0], found[1])  # so that both route alike
    assert meeting.sums == sums


@pytest.mark.parametrize(
    ("kind", "size", "error", "text"),
    [
        ("qwen2_moe", 3, ConfigError, "4 attention heads cannot be shared evenly by 3 ranks"),
        ("qwen2_moe", 4, ConfigError, "2 KV heads of layer 0 cannot be shared evenly by 4 ranks"),
        ("gemma4_text", 2, ConfigError, "1 KV heads of layer 3 cannot be shared evenly by 2"),
        ("olmoe", 2, ModelError, "`q_norm` over 32 numbers, all heads together"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_numbers(
    kind: str, size: int, error: type[Exception], text: str, tmp_path: Path
) -> None:
    make_checkpoint(kind, tmp_path)
    architecture = Checkpoint.open(tmp_path).architecture
    with pytest.raises(error, match=text):
        DensePart(architecture, 0, size, Reduction())
