"""The observed dense model: transformers' logits, and observations that add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw.blocks import BlockKey
from pw.models.checkpoint import Checkpoint
from pw.models.dense import ExpertCall, ExpertObserver, load_dense, observe_experts
from pw.models.testing import make_checkpoint

IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))


class Recorder(ExpertObserver):
    def __init__(self) -> None:
        self.layers: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self.calls: list[ExpertCall] = []
        self.gradients: dict[tuple[int, int, str], Tensor] = {}

    def routed(self, slot: int, inputs: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.layers.append((slot, inputs, ids, weights))

    def expert(self, call: ExpertCall) -> None:
        self.calls.append(call)
        if torch.is_grad_enabled():
            for name, tensor in (("gate_up", call.gate_up), ("down", call.output)):
                key = (call.slot, call.expert, name)
                hooked: Any = tensor
                hooked.register_hook(lambda g, key=key: self.gradients.__setitem__(key, g))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_moe_norm", "gemma4", "gpt_oss"])
def test_dense_model_gives_the_logits_of_transformers(
    kind: str, stream: bool, tmp_path: Path
) -> None:
    reference = make_checkpoint(kind, tmp_path)
    model = load_dense(Checkpoint.open(tmp_path), torch.float32, stream=stream)
    with torch.inference_mode():
        expected = reference(input_ids=IDS, use_cache=False).logits
        got = model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)


def test_observations_are_the_blocks_own_inputs_and_outputs(tmp_path: Path) -> None:
    make_checkpoint("qwen2_moe_norm", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = load_dense(checkpoint, torch.float32)
    seen = Recorder()
    observe_experts(model, seen)
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    assert [layer[0] for layer in seen.layers] == [0, 1]
    for slot, inputs, ids, weights in seen.layers:
        calls = [call for call in seen.calls if call.slot == slot]
        assert sum(len(call.tokens) for call in calls) == ids.numel()
        assert [call.expert for call in calls] == sorted(set(ids.flatten().tolist()))
        for call in calls:
            layer = checkpoint.geometry.layers[slot]
            gate_up = checkpoint.expert_weight(BlockKey(layer, call.expert, "gate_up"))
            down = checkpoint.expert_weight(BlockKey(layer, call.expert, "down"))
            assert torch.equal(call.inputs, inputs[call.tokens])
            assert torch.equal(
                call.weights.sort().values, weights[ids == call.expert].sort().values
            )
            torch.testing.assert_close(call.gate_up, call.inputs @ gate_up.T)
            torch.testing.assert_close(call.output, call.hidden @ down.T)
    observe_experts(model, None)
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    assert len(seen.layers) == 2


def test_hooked_gradients_are_those_of_a_finite_difference(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = load_dense(checkpoint, torch.float32)
    seen = Recorder()
    observe_experts(model, seen)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    keys = {(call.slot, call.expert, name) for call in seen.calls for name in ("gate_up", "down")}
    assert seen.gradients.keys() == keys  # the first MoE layer included

    call = next(call for call in seen.calls if call.slot == 1)
    down = checkpoint.expert_weight(BlockKey(1, call.expert, "down"))
    for name, output in (("gate_up", call.gate_up), ("down", call.output)):
        gradient = seen.gradients[call.slot, call.expert, name]
        direction = gradient / gradient.norm()
        step = 1e-2
        losses = []
        for sign in (1, -1):
            by = sign * step * direction
            shift = _Shift(call.expert, by, None if name == "down" else down)
            observe_experts(model, shift)
            with torch.no_grad():
                losses.append(model(input_ids=IDS, labels=IDS, use_cache=False).loss.item())
            assert shift.done
        slope = (losses[0] - losses[1]) / (2 * step)
        assert output.shape == gradient.shape
        assert slope == pytest.approx(gradient.norm().item(), rel=0.05)


class _Shift(ExpertObserver):
    """Moves one block's output in layer 1 in place, as no real observer may."""

    def __init__(self, expert: int, by: Tensor, down: Tensor | None) -> None:
        self.expert_id, self.by, self.down, self.done = expert, by, down, False

    def expert(self, call: ExpertCall) -> None:
        if (call.slot, call.expert) != (1, self.expert_id):
            return
        self.done = True
        if self.down is None:
            call.output.add_(self.by)
        else:
            gate, up = (call.gate_up + self.by).chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate) * up
            call.output.add_((hidden - call.hidden) @ self.down.T)
