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

CHUNKS = ((0, 5), (1, 3))
IDS = torch.tensor([5, 9, 11, 40, 8, 61, 30, 17])
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])


class Meeting:
    """Adds up what the threads of all ranks bring, in the order of the ranks."""

    def __init__(self, ranks: int) -> None:
        self._brought: list[Tensor] = [torch.empty(0)] * ranks
        self._barrier = threading.Barrier(ranks, timeout=60)
        self.sums = 0

    def connect(self, rank: int, reduction: Reduction) -> None:
        """Let a rank's partial sums meet the others'."""

        def all_reduce(partial: Tensor, add: Tensor | None = None) -> Tensor:
            self._brought[rank] = partial.clone()
            self._barrier.wait()
            self.sums += rank == 0
            total = torch.stack(self._brought).sum(0)
            self._barrier.wait()
            partial.copy_(total)
            return partial if add is None else add + partial

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
    check_parts(kind, tmp_path, ranks=2, sums=sums)


@pytest.mark.parametrize(
    ("kind", "ranks", "settings"),
    [
        ("qwen2_moe", 4, {}),  # two heads: ranks 0 and 1 have the first, 2 and 3 the other
        ("mixtral", 2, {"num_key_value_heads": 1}),
        ("gemma4_text", 2, {}),  # layers with two heads beside one with one
    ],
)
def test_ranks_may_have_the_same_kv_head(
    kind: str, ranks: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    check_parts(kind, tmp_path, ranks=ranks, **settings)


def check_parts(
    kind: str, folder: Path, *, ranks: int, sums: int | None = None, **settings: Any
) -> None:
    """All ranks together give what the whole model gives."""
    model = make_checkpoint(kind, folder, **settings)
    checkpoint = Checkpoint.open(folder)
    whole = load_skeleton(checkpoint, torch.float32)
    expected = outputs(whole, streamed_experts(model, checkpoint, torch.float32))
    meeting, parts = Meeting(ranks), []
    for rank in range(ranks):
        reduction = Reduction()
        part = DensePart(checkpoint.architecture, rank, ranks, reduction)
        parts.append(load_skeleton(checkpoint, torch.float32, part=part))
        meeting.connect(rank, reduction)
        assert parts[-1].dense_bytes < whole.dense_bytes
        own = [max(1, layer.kv_heads // ranks) for layer in whole.kv.layers]
        assert [layer.kv_heads for layer in parts[-1].kv.layers] == own
        assert (parts[-1].flat is None) == (whole.flat is None)

    def run(rank: int) -> Tensor:
        experts = streamed_experts(model, checkpoint, torch.float32) if rank == 0 else no_experts
        return outputs(parts[rank], experts)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(run, range(ranks)))
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(found[0], other) for other in found[1:])  # so that all route alike
    assert sums is None or meeting.sums == sums


@pytest.mark.parametrize(
    ("kind", "size", "error", "text"),
    [
        ("qwen2_moe", 3, ConfigError, "4 attention heads cannot be shared evenly by 3 ranks"),
        ("odd", 3, ConfigError, "2 KV heads of layer 0 cannot be shared evenly by 3 ranks"),
        ("olmoe", 2, ModelError, "`q_norm` over 32 numbers, all heads together"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_numbers(
    kind: str, size: int, error: type[Exception], text: str, tmp_path: Path
) -> None:
    settings = {"num_attention_heads": 6, "hidden_size": 48} if kind == "odd" else {}
    make_checkpoint("qwen2_moe" if kind == "odd" else kind, tmp_path, **settings)
    architecture = Checkpoint.open(tmp_path).architecture
    with pytest.raises(error, match=text):
        DensePart(architecture, 0, size, Reduction())
