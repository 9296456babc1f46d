"""The grouped matmul of prompts: logic by the interpreter, code by real compilation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pw_kernels import reference

grouped = pytest.importorskip("pw_kernels.triton_grouped")

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
SLOTS = 16


@pytest.mark.parametrize("gated", [True, False])
def test_chunks_of_experts_fill_their_slots_alone(gated: bool) -> None:
    experts, top_k, cols, rows = 4, 2, 40, 48
    ids = torch.tensor([[0, 2], [2, 1], [2, 0], [1, 9]])  # expert 3 has no tokens, slot 7 no expert
    flat = ids.flatten()
    count, width = flat.numel(), rows // 2 if gated else rows
    used = [e for e in range(experts) if (flat == e).any()]
    work = torch.tensor([[g, e, 0, 0] for g, e in enumerate(used)] + [[0, -1, 0, 0]]).int()
    slots = torch.full((len(work), SLOTS), count, dtype=torch.int32)
    for group, expert in enumerate(used):
        mine = (flat == expert).nonzero().flatten()
        slots[group, : len(mine)] = mine.int()
    matrices, bias = torch.randn(experts, rows, cols), torch.randn(experts, rows)
    x, weights = torch.randn(4 if gated else count, cols), torch.rand(count)
    out = torch.full((count, width), float("nan"))
    moved = [t.to(DEVICE) for t in (x, out, work, slots, bias, weights)]
    for first, last in ((0, 2), (2, 4)):
        grouped.grouped_kernel[(-(-width // (16 if gated else 32)), len(work))](
            moved[0], matrices[first:last].contiguous().to(DEVICE), *moved[1:], count, first, last,
            TOP_K=top_k if gated else 1, COLS=cols, ALL_ROWS=rows, WIDTH=width, SLOTS=SLOTS,
            ROWS=32, STEP=32, GATED=gated, KIND=0, HAS_BIAS=True,
        )  # fmt: skip
    got = moved[1].cpu()
    for slot, expert in enumerate(flat.tolist()):
        if expert >= experts:
            assert got[slot].isnan().all()
            continue
        want = matrices[expert] @ x[slot // top_k if gated else slot] + bias[expert]
        want = reference.activate(want, "silu", width) if gated else want * weights[slot]
        assert (got[slot] - want).norm() <= 1e-5 * want.norm()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pw_kernels.triton_grouped import grouped_kernel as kernel

sizes = dict(TOP_K=4, COLS=2048, ALL_ROWS=2816, WIDTH=1408, SLOTS=128, ROWS=128, STEP=64,
             GATED=True, KIND=0, HAS_BIAS=False)
types = dict(x="*bf16", matrices="*bf16", out="*bf16", work="*i32", group_slots="*i32",
             bias="*fp32", weights="*fp32")
signature = {k: "constexpr" if k in sizes else types.get(k, "i32") for k in kernel.arg_names}
plain = signature | dict(x="*fp32", matrices="*fp32", out="*fp32")
few = sizes | dict(SLOTS=16, ROWS=64, STEP=32)
built = triton.compile(ASTSource(kernel, plain, few), options=dict(num_warps=4, num_stages=2),
                       target=GPUTarget("cuda", 90, 32))
assert "mma" not in built.asm["ptx"]
for capability in (80, 90, 100):
    built = triton.compile(ASTSource(kernel, signature, sizes), options=dict(num_warps=8),
                           target=GPUTarget("cuda", capability, 32))
    assert any(word in built.asm["ptx"] for word in ("mma.sync", "wgmma", "tcgen05"))
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="needs no GPU: runs where the others are interpreted")
def test_compiles_ahead_of_time_for_three_generations(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": str(Path(reference.__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
