"""The skeleton with plain attention and experts gives transformers' own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pw.models.checkpoint import Checkpoint
from pw.models.resolve import resolve_model
from pw.models.skeleton import Skeleton, load_skeleton
from pw.models.testing import KINDS, PlainContext, make_checkpoint, streamed_experts

# Steps of three sequences: chunked prefill mixed with decoding, in changing order.
STEPS = (((0, 5),), ((1, 3), (0, 6)), ((0, 1), (2, 9), (1, 4)), ((2, 1), (1, 1), (0, 1)))
LENGTHS = (13, 8, 10)


def ready(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Checkpoint, Skeleton]:
    checkpoint = Checkpoint.open(folder)
    skeleton = load_skeleton(checkpoint, dtype)
    skeleton.bind_experts(streamed_experts(skeleton.model, checkpoint, dtype))
    return checkpoint, skeleton


@torch.inference_mode()
def packed_logits(skeleton: Skeleton, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of every token of each sequence, computed in `STEPS`."""
    context, done = PlainContext(), [0] * len(tokens)
    rows: list[list[torch.Tensor]] = [[] for _ in tokens]
    for step in STEPS:
        context.begin(step)
        ids = torch.cat([tokens[s][done[s] : done[s] + n] for s, n in step])
        positions = torch.cat([torch.arange(done[s], done[s] + n) for s, n in step])
        logits = skeleton.forward(ids, positions, context, torch.arange(len(ids)))
        for (s, n), part in zip(step, torch.split(logits, [n for _, n in step]), strict=True):
            rows[s].append(part)
            done[s] += n
    assert tuple(done) == LENGTHS
    return [torch.cat(parts) for parts in rows]


@torch.inference_mode()
def check_logits(skeleton: Skeleton, reference: Any, vocab: int) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(3, vocab, (n,), generator=generator) for n in LENGTHS]
    for got, sequence in zip(packed_logits(skeleton, tokens), tokens, strict=True):
        expected = reference(input_ids=sequence[None], use_cache=False).logits[0]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_steps_give_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    reference = make_checkpoint(kind, tmp_path)
    _, skeleton = ready(tmp_path)
    check_logits(skeleton, reference, 97)


def test_bundled_model_gives_the_logits_of_transformers() -> None:
    from transformers import AutoModelForCausalLM

    folder = resolve_model("tiny")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _, skeleton = ready(folder)
    check_logits(skeleton, reference, 4096)


def test_only_experts_stay_on_meta_and_bytes_are_counted_once(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, tie_word_embeddings=True)
    checkpoint, skeleton = ready(tmp_path)
    meta = {name for name, p in skeleton.model.named_parameters() if p.is_meta}
    assert meta == {
        f"model.layers.{layer}.mlp.experts.{leaf}"
        for layer in range(3)
        for leaf in ("gate_up_proj", "down_proj")
    }
    assert skeleton.model.lm_head.weight is skeleton.model.model.embed_tokens.weight
    weights = sum(checkpoint.read(key).nbytes for key in checkpoint.dense_keys())
    rope = sum(buffer.nbytes for buffer in skeleton.model.buffers())
    assert skeleton.dense_bytes == weights + rope


def test_dtype_applies_to_dense_weights_but_not_to_rope(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path, dtype=torch.bfloat16)
    _, skeleton = ready(tmp_path, torch.bfloat16)
    dtypes = {p.dtype for name, p in skeleton.model.named_parameters() if "mlp.gate" not in name}
    assert dtypes == {torch.bfloat16}
    assert skeleton.model.model.rotary_emb.inv_freq.dtype == torch.float32
    bias = skeleton.model.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32  # transformers keeps it wide


@pytest.mark.parametrize(("kind", "flag"), [("qwen2_moe", True), ("qwen2_moe", False)])
def test_routing_weights_follow_the_norm_flag(kind: str, flag: bool, tmp_path: Path) -> None:
    make_checkpoint(kind, tmp_path, norm_topk_prob=flag)
    _, skeleton = ready(tmp_path)
    sums: list[torch.Tensor] = []

    def note(slot: int, module: Any, x: Any, ids: Any, weights: torch.Tensor) -> torch.Tensor:
        sums.append(weights.sum(-1))
        return torch.zeros_like(x)

    skeleton.bind_experts(note)
    context = PlainContext()
    context.begin([(0, 7)])
    with torch.inference_mode():
        skeleton.forward(torch.arange(7), torch.arange(7), context, torch.tensor([6]))
    ones = torch.ones(7)
    assert len(sums) == 3
    assert all(torch.allclose(total, ones) == flag for total in sums)
