"""The flat forward pass: taken where it fits, equal to the general one, refused where it is not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw.models.checkpoint import Checkpoint
from pw.models.experts import expert_modules, is_joined
from pw.models.flat import FlatDecoder, flat_decoder
from pw.models.skeleton import Skeleton, general_forward, load_skeleton
from pw.models.testing import KINDS, PlainContext, make_checkpoint, streamed_experts
from pw_kernels import routers, step
from pw_kernels.slots import Choice
from pw_kernels.step import Routing

FLAT = (
    "qwen2_moe", "qwen2_moe_norm", "qwen2_moe_window", "mixtral", "qwen3_moe", "gemma4_text",
    "gemma4",
)  # fmt: skip
IDS = torch.randint(3, 97, (21,), generator=torch.Generator().manual_seed(5))


def load(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Skeleton:
    make_checkpoint(kind, folder, **settings)
    checkpoint = Checkpoint.open(folder)
    skeleton = load_skeleton(checkpoint, dtype)
    skeleton.bind_experts(streamed_experts(skeleton.model, checkpoint, dtype))
    return skeleton


def run(forward: Any) -> Tensor:
    context = PlainContext()
    context.begin([(0, 13), (1, 8)])
    positions = torch.cat((torch.arange(13), torch.arange(8)))
    with torch.inference_mode():
        logits: Tensor = forward(IDS, positions, context, torch.tensor([3, 12, 20]))
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_known_decoders_run_flat_and_others_do_not(kind: str, tmp_path: Path) -> None:
    assert (load(kind, tmp_path).flat is not None) == (kind in FLAT)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2_moe_norm", {"hidden_act": "gelu"}),
        ("qwen2_moe_window", {"qkv_bias": False, "tie_word_embeddings": True}),
        ("qwen3_moe", {"attention_bias": True, "num_attention_heads": 2}),
        ("mixtral", {"head_dim": 12}),
        ("gemma4", {}),
        ("gemma4_text", {"final_logit_softcapping": 3.0, "attention_k_eq_v": False}),
        ("gemma4_text", {"attention_bias": True, "hidden_activation": "silu"}),
    ],
)
def test_both_passes_give_the_same_logits_from_the_same_weights(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    skeleton = load(kind, tmp_path, **settings)
    assert skeleton.flat is not None
    general = run(partial(general_forward, skeleton.model))
    torch.testing.assert_close(run(skeleton.flat), general, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral"])
@pytest.mark.parametrize("takes", [False, True])
def test_experts_may_be_chosen_by_those_who_run_them(
    kind: str, takes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the launch that lists the tokens of each expert makes the choice."""
    skeleton = load(kind, tmp_path)
    flat = FlatDecoder(skeleton.model, kernels=True)
    expected, made = run(flat), []

    def choose(logits: Tensor, routing: Routing) -> tuple[Choice, None]:
        found = step.choose(logits, routing)
        ids, weights = (torch.zeros_like(tensor) for tensor in found)

        def launch(lists: object, _: int) -> None:
            made.append(lists)
            ids.copy_(found[0])
            weights.copy_(found[1])

        return Choice(ids, weights, len(routing.weight), launch), None

    class Experts:
        """Take a choice, and say that they listed it."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, *args: Any) -> Any:
            return self.inner(*args)

        def joined(
            self, slot: int, module: Any, x: Tensor, choice: Choice, weights: None, *, summed: bool
        ) -> Any:
            assert summed == (kind == "qwen2_moe")
            assert weights is None
            choice.launch("lists", 8)
            return self.inner(slot, module, x, choice.ids, choice.weights)

    monkeypatch.setattr(routers, "choose", choose)
    modules = [module for _, module in expert_modules(skeleton.model)]
    if takes:
        skeleton.bind_experts(Experts(modules[0].pw_experts))
    assert all(is_joined(module.pw_experts) == takes for module in modules)
    assert torch.equal(run(flat), expected)
    assert made == ["lists" if takes else None] * len(modules)


def test_bf16_runs_flat_too_and_shares_its_storage(tmp_path: Path) -> None:
    skeleton = load("qwen2_moe", tmp_path, torch.bfloat16)
    assert skeleton.flat is not None
    attention = skeleton.model.model.layers[0].self_attn
    assert (
        attention.q_proj.weight.untyped_storage().data_ptr()
        == attention.v_proj.weight.untyped_storage().data_ptr()
    )
    loaded = sum(
        tensor.nbytes
        for tensor in (*skeleton.model.parameters(), *skeleton.model.buffers())
        if not tensor.is_meta
    )
    assert skeleton.dense_bytes == loaded


def test_a_pass_that_differs_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load("mixtral", tmp_path).model

    def other(*args: Any) -> Tensor:
        return general_forward(model, *args) * 1.001

    assert flat_decoder(model, partial(general_forward, model)) is not None
    assert flat_decoder(model, other) is None
    assert "no flat forward pass for `mixtral`: it differs by 1.0e-03" in caplog.text


def test_columns_in_memory_leave_shapes_and_ties_alone(tmp_path: Path) -> None:
    model = load("olmoe", tmp_path, tie_word_embeddings=True).model
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert weight.shape == (32, 32)
    assert weight.stride() == (1, 32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.stride() == (1, 97)
