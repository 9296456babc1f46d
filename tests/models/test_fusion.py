"""Joint products, norms and routers as kernels: found in every architecture, equal, or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pw.models import fusion, routers
from pw.models.checkpoint import Checkpoint
from pw.models.experts import expert_modules
from pw.models.flat import FlatDecoder
from pw.models.fusion import fuse_linears, fuse_norms
from pw.models.probing import probe_logits, relative_difference
from pw.models.routers import fuse_routers, fused_route, router_of
from pw.models.sandwich import SandwichDecoder
from pw.models.skeleton import Skeleton, general_forward, load_skeleton
from pw.models.testing import KINDS, make_checkpoint

FLAT = ("qwen2_moe", "qwen2_moe_norm", "qwen2_moe_window", "mixtral", "qwen3_moe")
_QKV = {"q_proj", "k_proj", "v_proj"}
_GATED = {"gate_proj", "up_proj"}
JOINT: dict[str, list[set[str]]] = {  # of one layer with experts, attention first
    "olmoe": [_QKV],
    "gpt_oss": [_QKV],
    "granitemoe": [_QKV],
    "glm4_moe": [_QKV, _GATED],
    "deepseek_v2": [{"q_a_proj", "kv_a_proj_with_mqa"}, _GATED],
    "deepseek_v3": [{"q_a_proj", "kv_a_proj_with_mqa"}, _GATED],
    "gemma4_text": [_QKV, _GATED],
    "gemma4": [_QKV, _GATED],
}


def load(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Skeleton:
    """A skeleton none of whose parts are rewritten."""
    from pw.models import skeleton

    monkeypatch.setattr(skeleton, "flat_decoder", lambda *_: None)
    monkeypatch.setattr(skeleton, "fuse_linears", lambda *_: [])
    make_checkpoint(kind, folder, **settings)
    return load_skeleton(Checkpoint.open(folder), torch.float32)


def logits(skeleton: Skeleton) -> Tensor:
    return probe_logits(skeleton.model, partial(general_forward, skeleton.model))[0]


def leaves(product: fusion.JointProduct, model: nn.Module) -> tuple[set[str], int]:
    """Names of the maps of a product, and their layer."""
    names = {id(module): name for name, module in model.named_modules()}
    paths = [names[id(module)].split(".") for module in product._modules]
    return {path[-1] for path in paths}, int(next(part for part in paths[0] if part.isdigit()))


@pytest.mark.parametrize("kind", KINDS)
def test_maps_of_one_input_are_one_product(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = load(kind, tmp_path, monkeypatch)
    model, before = skeleton.model, logits(skeleton)
    stored = fusion_bytes(model)
    names = set(model.state_dict())
    joint = fuse_linears(model, partial(general_forward, model))
    found = [leaves(product, model) for product in joint]
    assert {layer for _, layer in found} == set(range(len(model.base_model.layers)))
    last = max(layer for _, layer in found)
    if kind in JOINT:
        sliding = [group for group, layer in found if layer == 0]
        full = [group for group, layer in found if layer == last]
        assert (sliding if kind.startswith("gemma4") else full) == JOINT[kind]
    torch.testing.assert_close(logits(skeleton), before, rtol=1e-5, atol=1e-5)
    assert fusion_bytes(model) == stored  # no byte is held twice
    assert set(model.state_dict()) == names
    assert all(product._input is None and product._parts == [] for product in joint)
    for product in joint:
        product.undo()
    torch.testing.assert_close(logits(skeleton), before, rtol=1e-5, atol=1e-5)


def fusion_bytes(model: nn.Module) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in model.parameters()
        if not tensor.is_meta
    }
    return sum(storages.values())


def test_a_shared_experts_gate_travels_with_its_projections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = load("qwen2_moe", tmp_path, monkeypatch)
    joint = fuse_linears(skeleton.model, partial(general_forward, skeleton.model))
    assert leaves(joint[1], skeleton.model)[0] == _GATED | {"shared_expert_gate"}


def test_each_call_sees_its_own_input() -> None:
    first, second = nn.Linear(4, 3), nn.Linear(4, 5)
    for module in (first, second):
        module.requires_grad_(False)
    xs = [torch.randn(2, 4) for _ in range(3)]
    expected = [(first(x), second(x)) for x in xs]
    fusion.JointProduct([first, second])
    for x, (one, two) in zip(xs, expected, strict=True):
        torch.testing.assert_close(first(x), one)
        torch.testing.assert_close(second(x), two)
    torch.testing.assert_close(second(xs[0]), expected[0][1])  # out of order, and of another input
    torch.testing.assert_close(first(xs[1]), expected[1][0])
    torch.testing.assert_close(second(xs[2]), expected[2][1])
    xs[2].mul_(2)  # the same tensor with other numbers: the first map starts anew
    torch.testing.assert_close(first(xs[2]), nn.functional.linear(xs[2], first.weight, first.bias))


def test_a_step_that_samples_nothing_has_no_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's chunks but the last: the head is handed no row."""
    skeleton = load("olmoe", tmp_path, monkeypatch)
    fuse_linears(skeleton.model, partial(general_forward, skeleton.model))
    none = torch.empty(0, skeleton.hidden_size)
    assert skeleton.logits(none).shape == (0, skeleton.vocab_size)


def test_a_product_that_changes_logits_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    skeleton = load("olmoe", tmp_path, monkeypatch)
    before = logits(skeleton)
    part = fusion.JointProduct._part
    monkeypatch.setattr(fusion.JointProduct, "_part", lambda *args: 1.01 * part(*args))
    assert fuse_linears(skeleton.model, partial(general_forward, skeleton.model)) == []
    assert caplog.messages[0].startswith("linear maps of `olmoe` stay apart: logits differ by")
    torch.testing.assert_close(logits(skeleton), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_one_kernel(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = load(kind, tmp_path, monkeypatch)
    model, before = skeleton.model, logits(skeleton)
    norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    assert fuse_norms(model, backend="triton") == len(norms) > 0
    torch.testing.assert_close(logits(skeleton), before, rtol=1e-5, atol=2e-5)


def test_a_norm_that_does_something_else_keeps_its_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class OtherRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8), requires_grad=False)
            self.variance_epsilon = 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * (1 + self.weight)

    model = nn.Sequential(OtherRMSNorm())
    assert fuse_norms(model) == 0
    assert caplog.messages == ["norm `0` keeps its own code"]
    assert "forward" not in model[0].__dict__


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_routers_are_one_kernel(
    kind: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "_TRIALS", 8)
    skeleton = load(kind, tmp_path, monkeypatch)
    model, before = skeleton.model, logits(skeleton)
    assert fuse_routers(model, backend=backend) == len(expert_modules(model)) > 0
    torch.testing.assert_close(logits(skeleton), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("deepseek_v2", {"topk_method": "greedy"}),
        ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 2.5}),
        ("glm4_moe", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
)
def test_settings_of_a_router_are_followed(
    kind: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = load(kind, tmp_path, monkeypatch, **settings)
    before = logits(skeleton)
    assert fuse_routers(skeleton.model) == len(expert_modules(skeleton.model))
    torch.testing.assert_close(logits(skeleton), before, rtol=1e-5, atol=1e-5)


def test_a_router_that_does_something_else_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    skeleton = load("mixtral", tmp_path, monkeypatch)
    model = skeleton.model
    name = expert_modules(model)[0][0]
    router: Any = router_of(model, name)
    own = type(router).forward

    class HalfRouter(type(router)):  # type: ignore[misc]
        def forward(self, hidden: Tensor) -> Any:
            logits, weights, ids = own(self, hidden)
            return logits, weights / 2, ids

    router.__class__ = HalfRouter
    assert fused_route(router, torch.float32) is None
    assert fuse_routers(model) == len(expert_modules(model)) - 1
    assert caplog.messages == [f"the router beside `{name}` keeps its own code"]


def test_gemma_s_flat_pass_with_kernels_is_the_same_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; layers with keys for values too."""
    skeleton = load("gemma4_text", tmp_path, monkeypatch, final_logit_softcapping=5.0)
    general = partial(general_forward, skeleton.model)
    flat = SandwichDecoder(skeleton.model, kernels=True)
    expected, stored = probe_logits(skeleton.model, general, flat)
    torch.testing.assert_close(stored, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", FLAT)
def test_the_flat_pass_with_kernels_is_the_same_pass(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: normed, rotated and stored in one call; routed, gated and summed in one each."""
    skeleton = load(kind, tmp_path, monkeypatch)
    general = partial(general_forward, skeleton.model)
    expected, plain = probe_logits(skeleton.model, general, FlatDecoder(skeleton.model, False))
    assert relative_difference(plain, expected) < 1e-5
    flat = FlatDecoder(skeleton.model, kernels=True)
    blocks: list[Any] = [layer._mlp for layer in flat._layers]
    assert all(block._route is not None for block in blocks if hasattr(block, "_route"))
    routed = [block for block in blocks if hasattr(block, "_route")]
    assert all(block._joined and bool(block._gated) == kind.startswith("qwen2") for block in routed)
    expected, stored = probe_logits(skeleton.model, general, flat)
    torch.testing.assert_close(stored, expected, rtol=1e-5, atol=2e-5)
