"""The Triton MoE: logic by the interpreter, code by real compilation, neither with a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pw_kernels import reference, testing
from pw_kernels.pages import WeightPages

triton_moe = pytest.importorskip("pw_kernels.triton_moe")


def compare(
    bits: list[int],
    hidden: int,
    inner: int,
    *,
    tokens: int = 3,
    lut_dtype: torch.dtype = torch.bfloat16,
    x_dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-6,
    device: str = "cpu",
    **kwargs: Any,
) -> None:
    arena = testing.ScatteredArena(800, 4096)
    blocks = [
        testing.random_blocks(arena, 2 * inner, hidden, bits, lut_dtype),
        testing.random_blocks(arena, hidden, inner, bits[::-1], lut_dtype),
    ]
    ids = torch.arange(2 * tokens).view(tokens, 2) % (len(bits) + 1)  # the last id is no expert
    x, weights = torch.randn(tokens, hidden, dtype=x_dtype), torch.rand(tokens, 2)
    args: list[Any] = [x, ids, weights, arena.data]
    kwargs = {"activation": "silu", **kwargs, "lut_dtype": lut_dtype}
    want = reference.fused_moe(*args, *blocks, **kwargs)
    moved = [arg.to(device) for arg in args]
    moved_blocks = [move(pages, device) for pages in blocks]
    kwargs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    got = triton_moe.fused_moe(*moved, *moved_blocks, **kwargs).cpu()
    assert got.dtype == want.dtype
    assert want.norm() > 0
    assert (got.float() - want.float()).norm() <= tolerance * want.float().norm()


def move(pages: WeightPages, device: str) -> WeightPages:
    tensors = (pages.bits, pages.plane_pages, pages.lut_pages, pages.lut_offset)
    return WeightPages(pages.rows, pages.cols, *(tensor.to(device) for tensor in tensors))


@pytest.mark.parametrize("lut_dtype", [torch.bfloat16, torch.float16])
def test_all_widths_in_one_launch(lut_dtype: torch.dtype) -> None:
    compare([2, 3, 4, 5, 6, 7, 8], 40, 24, tokens=4, lut_dtype=lut_dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_ragged_shapes_biases_and_activations(activation: str) -> None:
    biases: dict[str, Any] = {"gate_up_bias": torch.randn(2, 66), "down_bias": torch.randn(2, 140)}
    compare([3, 6], 140, 33, activation=activation, **biases)


def test_more_slots_than_one_group() -> None:
    compare([4, 2], 32, 16, tokens=40)


def test_half_precision_inputs() -> None:
    compare([4, 5], 64, 32, lut_dtype=torch.float16, x_dtype=torch.float16, tolerance=2e-3)


def test_groups_hold_every_slot_once() -> None:
    ids = torch.randint(-1, 6, (50, 3))  # experts 0..4, and -1 and 5 outside
    expert, slots = triton_moe.group_slots(ids, 5, 8)
    flat = ids.flatten()
    seen = []
    for owner, group in zip(expert.tolist(), slots.tolist(), strict=True):
        places = [slot for slot in group if slot < 150]
        assert places == sorted(places)
        assert all(flat[slot] == owner for slot in places)
        assert bool(places) == (owner < 5)
        seen += places
    assert sorted(seen) == ((flat >= 0) & (flat < 5)).nonzero().flatten().tolist()


@pytest.mark.gpu
@pytest.mark.skipif("os.environ['TRITON_INTERPRET'] == '1'", reason="needs TRITON_INTERPRET=0")
@pytest.mark.parametrize("lut_dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(lut_dtype: torch.dtype) -> None:
    compare(
        [2, 3, 4, 5, 6, 7, 8],
        384,
        200,
        tokens=70,
        lut_dtype=lut_dtype,
        x_dtype=lut_dtype,
        tolerance=1e-2,
        device="cuda",
    )


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pw_kernels import triton_moe

table = dict(bits_table="*i32", plane_pages="*i32", lut_pages="*i32", lut_offset="*i32",
             group_expert="*i32", group_slots="*i32", words="*i32", entries="*i16", bias="*fp32",
             topk_weights="*fp32", slots="*fp32", ids="*i64", slot_count="i32")
sizes = dict(EXPERTS=60, TOP_K=4, COLS=2048, WIDTH=1408, COL_TILES=16, PLANES=6, PP=22, LP=44,
             PAGE=32768, LUT_FP16=False, HAS_BIAS=False, KIND=0, SLOTS=16, ROWS=32, BLOCK=256)
# down_kernel is built from the parts of gate_up_kernel: one generation of it is enough
for capability, names in (
    (80, ["gate_up_kernel"]),
    (90, ["gate_up_kernel", "down_kernel", "combine_kernel"]),
    (100, ["gate_up_kernel"]),
):
    for name in names:
        kernel = getattr(triton_moe, name)
        types = table | dict(x="*bf16", hidden="*bf16",
                             out="*fp32" if name == "down_kernel" else "*bf16")
        constants = {k: v for k, v in sizes.items() if k in kernel.arg_names}
        signature = {k: types.get(k, "constexpr") for k in kernel.arg_names}
        target = GPUTarget("cuda", capability, 32)
        built = triton.compile(ASTSource(kernel, signature, constants), target=target)
        multiplies = any(word in built.asm["ptx"] for word in ("mma.sync", "wgmma", "tcgen05"))
        assert multiplies == (name != "combine_kernel"), name
        assert len(built.asm["cubin"]) > 1000
"""


def test_compiles_ahead_of_time_for_three_generations(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": str(Path(reference.__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
