"""The small kernels of a step against their references, over shapes, dtypes, kinds of routing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import step
from pw_kernels.slots import SlotResults
from pw_kernels.step import Routing

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (3, 100), (2, 5, 24)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, weighted: bool) -> None:
    x = random(*shape, dtype=dtype)
    weight = random(shape[-1], dtype=dtype, seed=1) if weighted else None
    near(step.rms_norm(x, weight, 1e-6, backend="triton"), step.rms_norm(x, weight, 1e-6))
    strided = random(shape[0], 2 * shape[-1], dtype=dtype)[:, : shape[-1]]
    near(
        step.rms_norm(strided, weight, 1e-6, backend="triton"), step.rms_norm(strided, weight, 1e-6)
    )


KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, normalized": {"normalize": True},
    "softmax, scaled": {"scale": 2.5, "wide": True},
    "softmax in groups": {"groups": 4, "chosen_groups": 2, "wide": True},
    "of the chosen": {"score": "none", "bias": True},
    "sigmoid in groups of pairs": {
        "score": "sigmoid", "choice_bias": True, "groups": 4, "chosen_groups": 2, "pairs": True,
        "normalize": True, "scale": 1.8, "wide": True,
    },
    "scaled by expert": {"normalize": True, "expert_scale": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "size", "top_k"), [(8, 32, 2), (60, 100, 4), (128, 48, 8)])
def test_route(kind: str, experts: int, size: int, top_k: int) -> None:
    options = {
        name: random(experts, seed=3) if name.endswith(("bias", "_scale")) else value
        for name, value in KINDS[kind].items()
    }
    routing = Routing(random(experts, size, seed=1), top_k, torch.float32, **options)
    x = random(6, size, seed=2)
    ids, weights = step.route(x, routing, backend="triton")
    expected_ids, expected = step.route(x, routing, backend="torch")
    assert ids.dtype == torch.int64
    assert torch.equal(ids, expected_ids)
    near(weights, expected)
    wide = replace(routing, wide=not routing.wide)  # the same in fp32, by the other kernel
    assert torch.equal(step.route(x, wide, backend="triton")[0], expected_ids)
    logits = torch.nn.functional.linear(x, routing.weight, routing.bias)
    padded = torch.cat((logits, random(6, 5)), 1)[:, :experts]  # part of a larger product
    assert torch.equal(step.choose(padded, routing, backend="triton")[0], expected_ids)
    by_column = replace(routing, weight=routing.weight.t().contiguous().t())
    assert torch.equal(step.route(x, by_column, backend="triton")[0], expected_ids)
    narrow = replace(routing, dtype=torch.bfloat16)
    for backend in ("triton", "torch"):
        rounded = step.route(x, narrow, backend=backend)[1]
        widened = step.route(x, replace(narrow, widened=True), backend=backend)[1]
        assert (rounded.dtype, widened.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(widened, rounded.float())
    if options.get("normalize") and "expert_scale" not in options:
        near(weights.sum(-1), torch.full((6,), float(options.get("scale", 1.0))))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
def test_ties_and_numbers_that_are_none_still_name_experts() -> None:
    routing = Routing(torch.zeros(6, 8), 3, torch.float32)
    ids, weights = step.route(random(2, 8), routing, backend="triton")
    assert ids.tolist() == [[0, 1, 2]] * 2
    near(weights, torch.full((2, 3), 1 / 6))
    lost = Routing(torch.full((6, 8), float("nan")), 3, torch.float32)
    ids, weights = step.route(random(2, 8), lost, backend="triton")
    assert ids.min() >= 0
    assert ids.max() < 6
    assert weights.isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "tanh"}, "score must be"),
        ({"groups": 3}, "of 3 groups of 8"),
        ({"groups": 4, "chosen_groups": 1, "top_k": 3}, "top 3 of 8"),
    ],
)
def test_routing_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Routing(**{"weight": torch.zeros(8, 4), "top_k": 2, "dtype": torch.float32} | options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gate(activation: str, dtype: torch.dtype) -> None:
    wide = random(3, 2 * 37 + 1, dtype=dtype)
    near(step.gate(wide, 37, activation, backend="triton"), step.gate(wide, 37, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_join(gated: bool, dtype: torch.dtype) -> None:
    x, routed, shared = (random(3, 1030, dtype=dtype, seed=seed) for seed in range(3))
    share = random(3, 5, dtype=dtype, seed=4)[:, 4:] if gated else None
    near(step.join(x, routed, shared, share, backend="triton"), step.join(x, routed, shared, share))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be one of"):
        step.join(*[torch.zeros(1, 4)] * 3, None, backend="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 4, 32])
def test_on_a_gpu_in_the_shape_of_qwen(tokens: int, dtype: torch.dtype) -> None:
    """And captured in a graph: nothing in a call waits for the device."""

    def on_gpu(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, seed=seed).cuda()

    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    x, routed, shared = (on_gpu(tokens, 2048, seed=seed) for seed in range(3))
    norm, gate_up = on_gpu(2048, seed=3), on_gpu(tokens, 2 * 5632 + 1, seed=4)
    qkv, angles = on_gpu(tokens, 48 * 128), on_gpu(tokens, 64).repeat(1, 2)
    pages, slots = on_gpu(4, 16, 16, 128), torch.arange(tokens, device="cuda")
    routing = Routing(on_gpu(60, 2048, seed=5) * 0.02, 4, torch.float32)

    def run(backend: str) -> list[Tensor]:
        keys, values = torch.zeros_like(pages), torch.zeros_like(pages)
        q = step.rotate_store(
            qkv, angles.cos(), angles.sin(), keys, values, slots, head_size=128, backend=backend
        )
        normed = step.rms_norm(x, norm, 1e-6, backend=backend)
        weights = step.route(x, routing, backend=backend)[1]
        gated = step.gate(gate_up, 5632, "silu", backend=backend)
        joined = step.join(x, routed, shared, gate_up[:, -1:], backend=backend)
        where = torch.arange(tokens, device="cuda") * 4001
        turns = step.angles(where, angles[0, :64].float().abs(), 1.0, dtype, backend=backend)
        return [q, keys, values, normed, weights, gated, joined, *turns]

    expected = run("torch")
    run("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run("triton")
    graph.replay()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("live", [None, 2])
@pytest.mark.parametrize(("size", "top_k"), [(48, 1), (1100, 3)])
def test_slots_are_added(size: int, top_k: int, live: int | None) -> None:
    x = random(4, size).half()
    results = random(4 * top_k, size, seed=1)
    ids = torch.randint(0, 5, (4, top_k), generator=torch.Generator().manual_seed(2))
    ids[1, 0], ids[2, -1] = -1, 5  # no experts, and nobody computed them
    results[top_k], results[3 * top_k - 1] = torch.nan, torch.nan
    real = None if live is None else torch.tensor([live], dtype=torch.int32)
    slots = SlotResults(results, ids, 5, real)
    found = step.add_slots(x, slots, backend="triton")
    assert torch.equal(found, x + slots.sum(torch.float16))
    assert torch.equal(found, step.add_slots(x, slots))
    shared, share = random(4, size, seed=3).half(), random(4, 2, seed=4).half()[:, :1]
    joined = step.join(x, slots, shared, share, backend="triton")
    summed = slots.sum(torch.float16)
    assert torch.equal(joined, step.join(x, summed, shared, share, backend="triton"))
    near(joined, step.join(x, slots, shared, share))


COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pw_kernels import triton_rotation, triton_routers, triton_sandwich, triton_step

types = dict(positions="*i64", frequencies="*fp32", scaling="fp32", eps="fp32", scale="fp32",
             slots="*i64", ids="*i64", weights="*fp32",
             choice_bias="*fp32", **{name: "*bf16" for name in (
             "x", "weight", "out", "qkv", "cos", "sin", "norm", "q_out", "k_pages", "v_pages",
             "linear_bias", "expert_scale", "logits", "gate_up", "routed", "shared", "share",
             "first", "norms", "following", "normed")}, second="*fp32", cap="fp32",
             results="*fp32", live="*i32")
route = dict(EXPERTS=60, PADDED=64, TOP_K=4, PADDED_K=4, SIZE=2048, BLOCK=128, SCORE="softmax",
             GROUPS=1, CHOSEN_GROUPS=1, PAIRS=False, HAS_LINEAR_BIAS=False, HAS_CHOICE_BIAS=False,
             HAS_EXPERT_SCALE=False, NORMALIZE=False, DTYPE=tl.bfloat16)
choose = {k: v for k, v in route.items() if k not in ("SIZE", "BLOCK", "HAS_LINEAR_BIAS")}
grouped = route | dict(EXPERTS=64, SIZE=2048, SCORE="sigmoid", GROUPS=4, CHOSEN_GROUPS=2,
                       PAIRS=True, HAS_CHOICE_BIAS=True, NORMALIZE=True)
rotate = dict(Q_HEADS=16, KV_HEADS=16, SIZE=128, ROTATED=128, TOKENS=16, BLOCK=128)
sandwich = dict(SIZE=2816, BLOCK=4096, HAS_LIVE=True)
modules = (triton_step, triton_rotation, triton_routers, triton_sandwich)
for capability, name, sizes, warps in (
    (80, "route_kernel", route, 8), (90, "route_kernel", grouped, 8),
    (90, "choose_kernel", choose, 1),
    (90, "rotate_store_kernel", rotate | dict(NORMED=32, SHARED=False), 1),
    (90, "rotate_store_kernel", rotate | dict(NORMED=0, SHARED=False), 1),
    (90, "rotate_store_kernel", rotate | dict(KV_HEADS=2, SIZE=512, ROTATED=512, BLOCK=512,
                                              NORMED=20, SHARED=True), 1),
    (90, "normed_sum_kernel", sandwich | dict(NORMS=1, FOLLOWING=3, TOP_K=0), 8),
    (90, "normed_sum_kernel", sandwich | dict(NORMS=3, FOLLOWING=1, TOP_K=8), 8),
    (90, "softcap_kernel", dict(BLOCK=2048), 4),
    (90, "angles_kernel", dict(FREQUENCIES=64, BLOCK=64), 1),
    (90, "rms_norm_kernel", dict(SIZE=2048, BLOCK=2048, HAS_WEIGHT=True), 8),
    (90, "gate_kernel", dict(INNER=5632, BLOCK=1024, ACTIVATION="gelu_tanh"), 4),
    (100, "join_kernel", dict(SIZE=2048, BLOCK=1024, TOP_K=0, HAS_LIVE=False,
                               HAS_SHARE=True), 4),
    (90, "add_slots_kernel", dict(SIZE=4096, BLOCK=1024, TOP_K=2, HAS_LIVE=True), 4),
    (80, "add_slots_kernel", dict(SIZE=2048, BLOCK=1024, TOP_K=8, HAS_LIVE=False), 4),
):
    kernel = next(getattr(module, name) for module in modules if hasattr(module, name))
    sizes = sizes | dict(OVERLAP=capability >= 90)
    signature = {k: "constexpr" if k in sizes else types.get(k, "i32") for k in kernel.arg_names}
    source = ASTSource(kernel, signature, sizes)
    target = GPUTarget("cuda", capability, 32)
    built = triton.compile(source, target=target, options=dict(num_warps=warps))
    assert len(built.asm["cubin"]) > 1000
    # nothing spills to memory; the cosine of a large number has a table there
    assert name == "angles_kernel" or ".local" not in built.asm["ptx"], name
"""


@pytest.mark.skipif(not INTERPRETED, reason="needs no GPU: runs where the others are interpreted")
def test_compiles_ahead_of_time_for_three_generations(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": str(Path(step.__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
