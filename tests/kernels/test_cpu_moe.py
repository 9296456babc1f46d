"""The numba MoE against its torch meaning: every width, ragged shapes, any batch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import pages, reference, testing

cpu_moe = pytest.importorskip("pw_kernels.cpu_moe")
TOLERANCE = 2e-6  # relative; the reference sums in another order


class Layer:
    """A layer of random experts of mixed widths in a scattered arena, and a batch for it."""

    def __init__(
        self,
        bits: list[int],
        hidden: int = 256,
        inner: int = 128,
        tokens: int = 5,
        top_k: int = 2,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.arena = testing.ScatteredArena(1200, 4096)
        self.gate_up = testing.random_blocks(self.arena, 2 * inner, hidden, bits, dtype)
        self.down = testing.random_blocks(self.arena, hidden, inner, bits[::-1], dtype)
        self.dtype = dtype
        self.x = torch.randn(tokens, hidden)
        picks = [torch.randperm(len(bits))[:top_k] for _ in range(tokens)]
        self.ids = torch.stack(picks) if picks else torch.zeros(0, top_k, dtype=torch.int64)
        self.weights = torch.rand(tokens, top_k)

    def run(
        self,
        module: Any = cpu_moe,
        rows: slice = slice(None),
        activation: str = "silu",
        **more: Any,
    ) -> Tensor:
        return module.fused_moe(  # type: ignore[no-any-return]
            self.x[rows],
            self.ids[rows],
            self.weights[rows],
            self.arena.data,
            self.gate_up,
            self.down,
            lut_dtype=self.dtype,
            activation=activation,
            **more,
        )

    def check(self, **more: Any) -> None:
        want, got = self.run(reference, **more), self.run(**more)
        assert got.dtype == want.dtype
        assert (got - want).norm() <= TOLERANCE * want.norm()
        assert want.norm() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", range(2, 9))
def test_every_width(bits: int, dtype: torch.dtype) -> None:
    Layer([bits] * 3, dtype=dtype).check()


@pytest.mark.parametrize(("hidden", "inner"), [(128, 32), (33, 17), (200, 100), (384, 72), (16, 8)])
def test_ragged_shapes_and_mixed_widths(hidden: int, inner: int) -> None:
    Layer([2, 3, 4, 5, 6, 7, 8], hidden, inner, tokens=9, top_k=3).check()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_and_biases(activation: str) -> None:
    layer = Layer([3, 4], inner=40)
    biases = {"gate_up_bias": torch.randn(2, 80), "down_bias": torch.randn(2, 256)}
    layer.check(activation=activation, **biases)


def test_a_token_gives_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer([2, 4, 6, 8], tokens=33)
    whole = layer.run()
    for token in (0, 7, 32):
        alone = layer.run(rows=slice(token, token + 1))
        assert torch.equal(alone[0], whole[token])
    monkeypatch.setattr(cpu_moe.threads, "WORTH_NANOSECONDS", 0)  # threads even for little work
    assert torch.equal(layer.run(), whole)
    monkeypatch.setattr(cpu_moe, "WORKSPACE_BYTES", 1)  # one token a turn
    assert torch.equal(layer.run(), whole)


def test_committed_bits_are_read_at_the_call() -> None:
    """Lowering a block in place, as the memory manager does, changes the next result."""
    codes = torch.randint(0, 16, (2, 64, 128), dtype=torch.uint8)
    luts = {b: torch.randn(2, 64, 1 << b).bfloat16() for b in (2, 4)}
    arena = testing.ScatteredArena(300, 4096)
    gate_up = testing.store_blocks(arena, codes, luts, [4, 4])
    down = testing.random_blocks(arena, 128, 32, [4, 4])
    args = (torch.randn(3, 128), torch.tensor([[0], [1], [0]]), torch.ones(3, 1), arena.data)
    kwargs: dict[str, Any] = {"lut_dtype": torch.bfloat16, "activation": "silu"}
    before = cpu_moe.fused_moe(*args, gate_up, down, **kwargs)
    gate_up.bits[0] = 2
    gate_up.lut_offset[0] = 0  # the 2-bit table opens the region
    gate_up.plane_pages[0, 2:] = pages.NO_PAGE
    after = cpu_moe.fused_moe(*args, gate_up, down, **kwargs)
    want = reference.fused_moe(*args, gate_up, down, **kwargs)
    assert (after - want).norm() <= TOLERANCE * want.norm()
    assert torch.equal(after[1], before[1])
    assert not torch.allclose(after[0], before[0])


def test_slots_without_an_expert_add_nothing() -> None:
    layer = Layer([4, 4])
    layer.ids[0] = torch.tensor([-1, 1])
    layer.ids[1] = torch.tensor([2, -1])
    layer.check()
    assert not layer.run()[1].any()


def test_observer_sees_what_the_reference_shows() -> None:
    layer = Layer([4, 4, 4], tokens=6)
    layer.ids[2] = torch.tensor([-1, 3])
    shown: dict[str, list[tuple[Any, ...]]] = {"cpu": [], "reference": []}
    layer.run(observer=lambda *call: shown["cpu"].append(call))
    layer.run(reference, observer=lambda *call: shown["reference"].append(call))
    assert len(shown["cpu"]) == len(shown["reference"]) > 1
    for (expert, *got), (want_expert, *want) in zip(*shown.values(), strict=True):
        assert expert == want_expert
        for tensor, expected in zip(got, want, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-6)


def test_observer_of_a_batch_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_moe, "WORKSPACE_BYTES", 1)  # one token a turn
    layer, seen = Layer([4, 4], tokens=3), []
    layer.run(observer=lambda expert, token, *rest: seen.append((int(token), expert)))
    assert sorted(seen) == [(token, expert) for token in range(3) for expert in range(2)]


def test_half_precision_inputs_and_empty_batches() -> None:
    layer = Layer([4, 4])
    layer.x = layer.x.bfloat16()
    got = layer.run()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, layer.run(reference), rtol=1e-2, atol=1e-3)
    assert Layer([4, 4], tokens=0).run().shape == (0, 256)


def test_cpu_without_avx512(tmp_path: Path) -> None:
    """Compile for a plain CPU: table lookups turn into loads, the result stays right."""
    code = """
import torch
from pw_kernels import cpu_moe, reference, testing
arena = testing.ScatteredArena(600, 4096)
bits = [2, 4, 5, 6, 8]
blocks = [testing.random_blocks(arena, *shape, bits) for shape in ((64, 128), (128, 32))]
args = torch.randn(9, 128), torch.arange(9)[:, None] % 5, torch.ones(9, 1), arena.data, *blocks
kwargs = dict(lut_dtype=torch.bfloat16, activation="silu")
want, got = (m.fused_moe(*args, **kwargs) for m in (reference, cpu_moe))
assert (got - want).norm() < 2e-6 * want.norm()
assert "zmm" not in next(iter(cpu_moe._experts.inspect_asm().values()))
"""
    env = os.environ | {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(reference.__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
