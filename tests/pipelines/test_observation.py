"""Reading and back-propagating layer by layer: what the whole model at once would give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pw.blocks import MODULES, BlockKey, ExpertGeometry
from pw.models.checkpoint import Checkpoint
from pw.models.dense import ExpertCall, ExpertObserver
from pw.models.experts import expert_modules, gate_first
from pw.models.testing import KINDS, make_checkpoint
from pw_pipelines import activations, observation
from pw_pipelines.moments import MomentSums
from pw_pipelines.observation import ObservedModel
from pw_pipelines.savepoint import Savepoint
from pw_pipelines.sensitivity import GradientSums

ROOT = Path(__file__).parents[2]
WINDOWS = torch.randint(3, 97, (5, 12), generator=torch.Generator().manual_seed(1))


class WeightGradients(ExpertObserver):
    """Loss gradient of every block's weight [N, K], from its inputs and output gradients."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int, str], Tensor] = {}

    def expert(self, call: ExpertCall) -> None:
        for module, x, y in (
            ("gate_up", call.inputs, call.gate_up),
            ("down", call.hidden, call.output),
        ):
            key, inputs = (call.slot, call.expert, module), x.detach()
            hooked: Any = y
            hooked.register_hook(lambda g, k=key, x=inputs: self.add(k, g.T @ x))

    def add(self, key: tuple[int, int, str], gradient: Tensor) -> None:
        self.found[key] = self.found.get(key, torch.zeros(())) + gradient


def expected_gradients(model: Any) -> dict[tuple[int, int, str], Tensor]:
    """The same from transformers' own backward pass over all windows at once."""
    logits = model(input_ids=WINDOWS, use_cache=False).logits[:, :-1].flatten(0, 1)
    cross_entropy(logits, WINDOWS[:, 1:].flatten(), reduction="sum").backward()
    found = {}
    for slot, (_, module) in enumerate(expert_modules(model)):
        part: Any = module
        for name in MODULES:
            table = getattr(part, f"{name}_proj").grad
            table = table.transpose(1, 2) if part.is_transposed else table
            for expert, gradient in enumerate(table):
                rows = gate_first(gradient, part) if name == "gate_up" else gradient
                found[slot, expert, name] = rows
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make_checkpoint(kind, tmp_path)
    expected = expected_gradients(reference)
    monkeypatch.setattr(
        observation, "_TOKENS_PER_BATCH", {"cpu": 24}
    )  # batches of 2, 2 and 1 windows
    monkeypatch.setattr(observation, "LOGITS_AT_ONCE", {"cpu": 97 * 2 * 5})
    monkeypatch.setattr(activations, "MEMORY_BYTES", 0)
    model = ObservedModel(Checkpoint.open(tmp_path), "cpu", scratch=tmp_path, cache_bytes=0)
    seen, steps = WeightGradients(), []
    model.backward(WINDOWS, seen, steps.append)
    assert sum(steps) == model.backward_units(5)
    for key, gradient in expected.items():
        got = seen.found.get(key, torch.zeros_like(gradient))
        scale = gradient.abs().max().item()
        torch.testing.assert_close(got, gradient, rtol=1e-3, atol=1e-4 * max(1.0, scale))


def test_a_changed_block_changes_what_follows_and_nothing_else(tmp_path: Path) -> None:
    reference = make_checkpoint("gemma4_shared", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = ObservedModel(checkpoint, "cpu")
    keys = [BlockKey(1, 2, "down"), BlockKey(1, 0, "gate_up"), BlockKey(3, 1, "down")]
    weights = {key: torch.randn_like(checkpoint.expert_weight(key)) for key in keys}
    changes = {key: (lambda w=weight: w) for key, weight in weights.items()}
    plain, changed = model.branches(WINDOWS, changes, lambda _: None)
    with torch.no_grad():
        expected = reference(input_ids=WINDOWS, use_cache=False).logits
        got = torch.cat(list(model.logits(WINDOWS, plain)), 1)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)
        for key, weight in weights.items():
            table = reference.model.layers[key.layer].experts.get_parameter(f"{key.module}_proj")
            old = table[key.expert].clone()
            table[key.expert] = weight
            expected = reference(input_ids=WINDOWS, use_cache=False).logits
            table[key.expert] = old
            got = torch.cat(list(model.logits(WINDOWS, changed[key])), 1)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


class Stops(MomentSums):
    """Measures, and is interrupted when a layer begins its second batch."""

    def __init__(self, geometry: ExpertGeometry, at: int | None) -> None:
        super().__init__(geometry)
        self.at, self.slots = at, [0] * len(geometry.layers)

    def routed(self, slot: int, inputs: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.slots[slot] += 1
        if (slot, self.slots[slot]) == (self.at, 2):
            raise KeyboardInterrupt
        super().routed(slot, inputs, ids, weights)


class StopsBackward(GradientSums):
    """The same on the way back."""

    def __init__(self, geometry: ExpertGeometry, at: int | None) -> None:
        generator = torch.Generator().manual_seed(5)
        errors = {
            key: torch.randn(
                2, geometry.shape(key.module).rows, geometry.shape(key.module).cols,
                generator=generator,
            )
            for key in geometry.keys()
        }  # fmt: skip
        super().__init__(geometry, 2, errors.__getitem__)
        self.at, self.slots = at, [0] * len(geometry.layers)

    def routed(self, slot: int, inputs: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.slots[slot] += 1
        if (slot, self.slots[slot]) == (self.at, 2):
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("way", ["read", "backward"])
def test_a_stopped_reading_goes_on_at_its_layer(
    way: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("mixtral", tmp_path / "model")
    monkeypatch.setattr(observation, "_TOKENS_PER_BATCH", {"cpu": 24})
    monkeypatch.setattr(activations, "MEMORY_BYTES", 0)
    checkpoint = Checkpoint.open(tmp_path / "model")

    def go(observer: Any, inputs: dict[str, str] | None) -> int:
        model = ObservedModel(checkpoint, "cpu", scratch=tmp_path)
        saved = None if inputs is None else Savepoint(tmp_path / "a.pw", way, inputs)
        if way == "read":
            model.read(WINDOWS, [observer] * 3, savepoint=saved)
        else:
            model.backward(WINDOWS, observer, savepoint=saved)
        return sum(observer.slots)

    kind = Stops if way == "read" else StopsBackward
    whole, stopped, resumed = (kind(checkpoint.geometry, n) for n in (None, at, None))
    everything = go(whole, None)
    with pytest.raises(KeyboardInterrupt):
        go(stopped, {"text": "a"})
    layers_done = at if way == "read" else 2 - at
    assert go(resumed, {"text": "a"}) == everything - 3 * layers_done
    for name, tensor in whole.state().items():
        assert torch.equal(resumed.state()[name], tensor), name
    other = kind(checkpoint.geometry, None)
    assert go(other, {"text": "b"}) == everything  # what other inputs left is not used
    Savepoint(tmp_path / "a.pw", way, {}).clear()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


_PROBE = """
import sys
from pathlib import Path
import torch
from pw.models.checkpoint import Checkpoint
from pw.models.dense import ExpertObserver
from pw_pipelines import activations
from pw_pipelines.observation import ObservedModel

torch.set_num_threads(1)
activations.MEMORY_BYTES = 0
status = lambda key: int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0])
model = ObservedModel(Checkpoint.open(Path(sys.argv[1])), "cpu", scratch=Path(sys.argv[1]),
                      cache_bytes=0)
windows = torch.randint(3, 97, (4, 24))
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = status("VmRSS")
model.read(windows)
model.backward(windows, ExpertObserver())
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "pipelines"))
    probes = {}
    for layers in (2, 7):
        folder = tmp_path / str(layers)
        make_checkpoint(
            "mixtral", folder, num_hidden_layers=layers, num_local_experts=8, hidden_size=256,
            intermediate_size=512, dtype=torch.bfloat16,
        )  # fmt: skip  # 6.3 MB a layer
        probes[layers] = subprocess.Popen(
            [sys.executable, "-c", _PROBE, str(folder)],
            env={**os.environ, "PYTHONPATH": paths, "MALLOC_MMAP_THRESHOLD_": "65536"},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    grown = {layers: int(probe.communicate(timeout=100)[0]) for layers, probe in probes.items()}
    assert grown[7] - grown[2] < 6_300, grown  # KB, one layer; five more hold 31 MB
