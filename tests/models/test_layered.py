"""The model that runs layer by layer: transformers' logits, and observations that add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pw.blocks import BlockKey
from pw.models.checkpoint import Checkpoint
from pw.models.dense import ExpertCall, ExpertObserver
from pw.models.layered import LayeredModel, SharedKv
from pw.models.testing import KINDS, make_checkpoint

IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


class Recorder(ExpertObserver):
    def __init__(self) -> None:
        self.layers: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self.calls: list[ExpertCall] = []

    def routed(self, slot: int, inputs: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.layers.append((slot, inputs, ids, weights))

    def expert(self, call: ExpertCall) -> None:
        self.calls.append(call)


@torch.no_grad()
def last_states(model: LayeredModel) -> Tensor:
    states, shared = model.embed(IDS), SharedKv()
    for layer in range(model.layers):
        states = model.layer(layer, IDS, states, shared)
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_layer_by_layer_gives_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    reference = make_checkpoint(kind, tmp_path)
    model = LayeredModel(Checkpoint.open(tmp_path), torch.float32, CPU, cache_bytes=0)
    with torch.no_grad():
        expected = reference(input_ids=IDS, use_cache=False).logits
        for _ in range(2):  # every layer loaded, dropped, loaded again
            states = last_states(model)
            got = torch.cat([model.head(IDS, states, k) for k in torch.arange(9).split(4)], 1)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("room", "loads"), [(0, [0, 1, 2, 1, 0]), (2, [0, 1, 2, 1]), (3, [0, 1, 2])]
)
def test_layers_stay_in_memory_while_there_is_room(
    room: int, loads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("mixtral", tmp_path, dtype=torch.bfloat16)
    one = 2 * (4 * 3 * 24 * 32 + 32 * (32 + 16 + 16 + 32) + 4 * 32 + 2 * 32)  # bytes of a layer
    model = LayeredModel(Checkpoint.open(tmp_path), torch.bfloat16, CPU, room * one)
    loaded: list[int] = []
    load = model._load_experts
    monkeypatch.setattr(model, "_load_experts", lambda i: (loaded.append(i), load(i))[1])
    for layer in (0, 1, 2, 2, 1, 0):
        model.layer(layer, IDS, torch.zeros(2, 9, 32, dtype=torch.bfloat16), SharedKv())
        assert len(model._tables) <= max(1, room)
    assert loaded == loads


def test_observations_are_the_blocks_own_inputs_and_outputs(tmp_path: Path) -> None:
    make_checkpoint("qwen2_moe_norm", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = LayeredModel(checkpoint, torch.float32, CPU, 1 << 30)
    seen = model.experts.observer = Recorder()
    last_states(model)
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
    model.experts.observer = None
    last_states(model)
    assert len(seen.layers) == 2


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_loaded_when_it_is_asked_for(tied: bool, tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, tie_word_embeddings=tied)
    model = LayeredModel(Checkpoint.open(tmp_path), torch.float32, CPU, cache_bytes=0)
    states = last_states(model)
    head = model._model.lm_head
    assert head.weight.is_meta is not tied  # the embedding is there from the start
    model.head(IDS, states, torch.arange(2))
    assert not head.weight.is_meta
