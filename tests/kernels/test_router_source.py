"""The sources of router and choice, run on a CPU as `test_cuda_source.py` does for the MoE."""

import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import cuda_routers, step
from pw_kernels.cuda_routing import Lists
from pw_kernels.step import Routing
from support.cuda_source import LOADS, CudaSource

SOURCE = CudaSource("router.cu", "router_on_cpu.h", [  # defined by the headers
    *LOADS, "rank_in_cluster", "push", "cluster_arrive",
    "cluster_wait", "most_of_warp", "least_of_warp", "power", "divide",
])  # fmt: skip
CHOICE = CudaSource("choice.cu", "router_on_cpu.h", [
    *LOADS, "most_of_warp", "least_of_warp", "power", "divide",
])  # fmt: skip
ROUTE = CudaSource("routing.cu", "cuda_on_cpu.h", [])
DTYPE = torch.bfloat16

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def run(
    folder: Path,
    x: Tensor,
    weight: Tensor,
    first: int,
    routing: Routing,
    lists: Lists | None = None,
    size: int = 0,
    norm: Tensor | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, top_k = len(x), routing.top_k
    ids, weights = torch.full((tokens, top_k), -7), torch.full((tokens, top_k), torch.nan)
    others = torch.full((tokens, max(first, 1)), torch.nan).to(DTYPE)
    arguments = cuda_routers.Arguments(
        x.data_ptr(), weight.data_ptr(), others.data_ptr(), ids.data_ptr(), weights.data_ptr(),
        None if routing.expert_scale is None else routing.expert_scale.data_ptr(),
        None if norm is None else norm.data_ptr(), None if normed is None else normed.data_ptr(),
        tokens, x.stride(0), routing.scale, 1e-3,
    )  # fmt: skip
    shape = (weight.shape[0], weight.shape[1])
    constants = cuda_routers.constants_of(
        shape, DTYPE, first, tokens, routing, size, norm=norm is not None
    )
    where = 0 if lists is None else ctypes.addressof(lists)
    given = f"*(const Routing*){where}ull" if lists else "Routing{}"
    kernel = SOURCE.compile(folder, f"router(*(const Arguments*)all, {given});", constants)
    kernel.run(ctypes.byref(arguments), constants["CLUSTER"], 1, constants["THREADS"])
    return ids, weights, others[:, :first]


def choose(
    folder: Path, logits: Tensor, routing: Routing, lists: Lists | None = None, size: int = 0
) -> tuple[Tensor, Tensor]:
    tokens, top_k = len(logits), routing.top_k
    ids, weights = torch.full((tokens, top_k), -7), torch.full((tokens, top_k), torch.nan)
    arguments = cuda_routers.Logits(
        logits.data_ptr(), ids.data_ptr(), weights.data_ptr(),
        None if routing.expert_scale is None else routing.expert_scale.data_ptr(),
        tokens, logits.stride(0), routing.scale,
    )  # fmt: skip
    constants = cuda_routers.logits_constants(DTYPE, tokens, routing, size)
    given = f"*(const Routing*){ctypes.addressof(lists)}ull" if lists else "Routing{}"
    kernel = CHOICE.compile(folder, f"choose(*(const Arguments*)all, {given});", constants)
    kernel.run(ctypes.byref(arguments), 1 if size else tokens, 1, constants["THREADS"])
    return ids, weights


def spread(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Weights by expert: equal ones may come in any order."""
    return torch.zeros(len(ids), experts).scatter_(1, ids, weights.float())


@pytest.mark.parametrize(
    ("tokens", "cols", "first", "experts", "top_k", "options"),
    [
        (9, 512, 1, 60, 4, {}),
        (16, 544, 0, 128, 8, {"normalize": True}),  # the last part has less
        (3, 1024, 2, 8, 2, {"score": "none"}),
        (8, 96, 1, 20, 6, {"normalize": True, "scale": 2.5}),  # some parts have nothing
        (2, 64, 0, 24, 4, {"normalize": True, "expert_scale": random(24, seed=5).abs()}),
    ],
)
def test_experts_are_those_of_a_product_and_a_choice(
    tmp_path: Path,
    tokens: int,
    cols: int,
    first: int,
    experts: int,
    top_k: int,
    options: dict[str, Any],
) -> None:
    x = random(tokens, cols + 8, seed=1)[:, :cols]
    weight = random(first + experts + 3, cols, seed=2) / cols**0.5
    own = weight[first : first + experts]
    routing = Routing(own, top_k, DTYPE, widened=True, **options)
    ids, weights, others = run(tmp_path, x, weight, first, routing)
    product = (x.float() @ weight.float().t()).to(DTYPE)
    expected_ids, expected = step.choose(product[:, first : first + experts], routing)
    found = spread(ids, weights, experts)
    torch.testing.assert_close(found, spread(expected_ids, expected, experts), rtol=8e-3, atol=0)
    if "expert_scale" not in options:
        assert (weights.diff(dim=1) <= 0).all()  # the best first
    torch.testing.assert_close(others, product[:, :first], rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize(("tokens", "cols"), [(1, 512), (5, 544), (11, 96)])
def test_a_norm_is_taken_along(tmp_path: Path, tokens: int, cols: int) -> None:
    x, gain = 3 * random(tokens, cols, seed=1), random(cols, seed=3)
    weight, normed = random(24, cols, seed=2) / cols**0.5, torch.full_like(x, torch.nan)
    routing = Routing(weight[1:21], 4, DTYPE, widened=True)
    ids, weights, others = run(tmp_path, x, weight, 1, routing, norm=gain, normed=normed)
    expected = step.rms_norm(x, gain, 1e-3)
    torch.testing.assert_close(normed, expected, rtol=8e-3, atol=0)
    (tmp_path / "plain").mkdir()
    plain = run(tmp_path / "plain", normed, weight, 1, routing)
    assert all(torch.equal(a, b) for a, b in zip((ids, weights, others), plain, strict=True))


def test_ties_and_numbers_that_are_none_still_name_experts(tmp_path: Path) -> None:
    x, weight = random(2, 64, seed=1), torch.zeros(8, 64, dtype=DTYPE)
    x[1] = torch.nan
    routing = Routing(weight, 3, DTYPE, widened=True)
    ids, weights, _ = run(tmp_path, x, weight, 0, routing)
    assert ids[0].tolist() == [0, 1, 2]
    torch.testing.assert_close(weights[0], torch.full((3,), 0.125))
    assert sorted(ids[1].tolist()) == sorted(set(ids[1].tolist()) & set(range(8)))


def test_a_token_s_experts_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    x, weight = random(17, 512, seed=1), random(60, 512, seed=2) / 20
    routing = Routing(weight, 4, torch.float32, widened=True)
    found = []
    for tokens in (5, 17):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        found.append([part[:5] for part in run(folder, x[:tokens], weight, 0, routing)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("experts", [5, 60, 200])
def test_a_choice_from_logits(tmp_path: Path, experts: int) -> None:
    logits = random(3, experts + 4, seed=1)[:, 1 : experts + 1]
    scale = random(experts, seed=3).abs() if experts == 60 else None
    routing = Routing(
        random(experts, 8), 4, DTYPE, widened=True, normalize=experts == 60, expert_scale=scale
    )
    ids, weights = choose(tmp_path, logits, routing)
    expected = step.choose(logits, routing)
    found = spread(ids, weights, experts)
    torch.testing.assert_close(found, spread(*expected, experts), rtol=8e-3, atol=0)


@pytest.mark.parametrize("live", [None, 5])
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(("source", "experts"), [("router", 20), ("router", 140), ("choice", 20)])
def test_lists_are_those_of_the_launch_that_makes_them_alone(
    tmp_path: Path, source: str, experts: int, live: int | None, size: int
) -> None:
    tokens, top_k = 9, 3
    x, weight = random(tokens, 256, seed=1), random(experts, 256, seed=2) / 10
    routing = Routing(weight, top_k, DTYPE, widened=True)
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(2, 7, (2, experts), generator=generator).int()
    offsets = torch.randint(0, 9, (2, experts), generator=generator).int() * 512
    count = tokens * top_k
    groups = count // size + experts
    found = []
    real = None if live is None else torch.tensor([live], dtype=torch.int32)
    pair, two = ctypes.c_void_p * 2, ctypes.c_int * 2
    ids = weights = None
    for name in (source, "route"):
        work = torch.full((2, 2, groups, 4), -9).int()
        slots, ranks = torch.full((groups, size), -9).int(), torch.full((count,), -9).int()
        counts, progress = torch.full((experts,), -9).int(), torch.full((groups + 4,), -9).int()
        statistics = torch.ones(2, experts)
        lists = Lists(
            0 if ids is None else ids.data_ptr(), 0 if weights is None else weights.data_ptr(),
            pair(bits[0].data_ptr(), bits[1].data_ptr()),
            pair(offsets[0].data_ptr(), offsets[1].data_ptr()),
            pair(work[0].data_ptr(), work[1].data_ptr()), slots.data_ptr(), ranks.data_ptr(),
            counts.data_ptr(), statistics.data_ptr(), 0 if real is None else real.data_ptr(),
            progress.data_ptr(), count, groups, 4, groups + 4, two(2, 2), two(6, 6),
        )  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        if name == "router":
            ids, weights, _ = run(folder, x, weight, 0, routing, lists, size)
        elif name == "choice":
            logits = (x.float() @ weight.float().t()).to(DTYPE)
            ids, weights = choose(folder, logits, routing, lists, size)
        else:
            constants = {
                "EXPERTS": experts, "TOKENS": size, "THREADS": 160, "TOP_K": top_k, "FLOAT16": 0,
            }  # fmt: skip
            kernel = ROUTE.compile(folder, "route(*(const Routing*)all);", constants)
            kernel.run(ctypes.byref(lists), 1, 1, 160)
        found.append((work, slots, counts, progress, statistics))
    for one, other in zip(found[0][2:], found[1][2:], strict=True):
        assert torch.equal(one, other)
    assert found[0][2].sum() == (tokens if live is None else live) * top_k
    assert unordered(*found[0][:2]) == unordered(*found[1][:2])


def unordered(work: Tensor, slots: Tensor) -> list[list[tuple[object, ...]]]:
    """Each list with the slots of its groups; widths are in order, groups and slots are not."""
    found = []
    for of_class in work.flatten(0, 1).tolist():
        listed = [entry for entry in of_class if entry[1] >= 0]
        widths = [width for _, _, width, _ in listed]
        assert widths == sorted(widths, reverse=True)
        assert all(entry == [0, -1, 0, 0] for entry in of_class[len(listed) :])
        found.append(sorted((*rest, *sorted(slots[group].tolist())) for group, *rest in listed))
    return found
