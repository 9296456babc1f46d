"""Attention modules of other models that run as the flat pass's: which, and with which result."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw.models import skeleton as skeletons
from pw.models.checkpoint import Checkpoint
from pw.models.decoder import Turn
from pw.models.flat_attention import fuse_attention
from pw.models.fusion import fuse_linears
from pw.models.probing import probe_logits
from pw.models.skeleton import general_forward, load_skeleton
from pw.models.testing import KINDS, PlainContext, make_checkpoint, streamed_experts

OTHERS = {"gpt_oss", "deepseek_v2", "deepseek_v3", "gemma4_shared"}
IDS = torch.randint(3, 97, (13,), generator=torch.Generator().manual_seed(5))


def load(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """A model none of whose parts are rewritten, with its experts."""
    monkeypatch.setattr(skeletons, "flat_decoder", lambda *_: None)
    make_checkpoint(kind, folder, **settings)
    checkpoint = Checkpoint.open(folder)
    model = load_skeleton(checkpoint, torch.float32).model
    return model, streamed_experts(model, checkpoint, torch.float32)


def run(model: Any) -> Tensor:
    """Logits of a sequence in two steps."""
    context, found = PlainContext(), []
    for start, end in ((0, 8), (8, 13)):
        context.begin([(0, end - start)])
        step = (IDS[start:end], torch.arange(start, end), context, torch.arange(end - start))
        with torch.inference_mode():
            found.append(general_forward(model, *step))
    return torch.cat(found)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_usual_attention_runs_as_one_and_logits_stay(
    kind: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, experts = load(kind, tmp_path, monkeypatch)
    skeletons.bind_experts(model, experts)
    expected = run(model)
    forward = partial(general_forward, model)
    layers = int(model.config.num_hidden_layers)
    assert fuse_attention(model, forward, kernels=kernels) == (0 if kind in OTHERS else layers)
    stored = probe_logits(model, forward)[0]
    fuse_linears(model, forward)  # the other maps are put together as before
    skeletons.bind_experts(model, experts)
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(probe_logits(model, forward)[0], stored, rtol=1e-5, atol=2e-5)


def test_a_part_of_each_head_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model, experts = load("glm4_moe", tmp_path, monkeypatch, rope_parameters=rope)
    skeletons.bind_experts(model, experts)
    expected = run(model)
    assert fuse_attention(model, partial(general_forward, model))
    skeletons.bind_experts(model, experts)
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-4)


def test_attention_that_differs_keeps_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, experts = load("granitemoe", tmp_path, monkeypatch)
    attention = model.model.layers[1].self_attn
    own = type(attention).forward

    class Halved(type(attention)):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            out, weights = own(self, *args, **options)
            return out / 2, weights

    attention.__class__ = Halved
    skeletons.bind_experts(model, experts)
    expected = run(model)
    assert fuse_attention(model, partial(general_forward, model)) == 0
    assert "attention of `granitemoe` keeps its own code: logits differ by" in caplog.text
    skeletons.bind_experts(model, experts)
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-4)


def test_bounds_that_a_probe_may_not_reach_keep_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load("olmoe", tmp_path, monkeypatch, clip_qkv=1e3)
    assert fuse_attention(model, partial(general_forward, model)) == 0


def test_what_lies_beyond_the_angles_is_not_turned() -> None:
    angles = torch.rand(3, 4).repeat(1, 2)
    heads = torch.rand(3, 2, 12)
    found = Turn(angles.cos(), angles.sin())(heads)
    assert torch.equal(found[..., 8:], heads[..., 8:])
    left, right = heads[..., :8].chunk(2, -1)
    turned = torch.cat((-right, left), -1)
    expected = heads[..., :8] * angles.cos()[:, None] + turned * angles.sin()[:, None]
    torch.testing.assert_close(found[..., :8], expected)
