"""Sums between norms and soft caps: the kernels against their references, and these by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pw_kernels.sandwich import NormedSum, normed_sum, softcap
from pw_kernels.slots import SlotResults

EPSILON = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(
    branches: str, size: int, dtype: torch.dtype, tokens: int = 4
) -> tuple[Tensor, Tensor, Tensor | SlotResults | None, NormedSum]:
    x, first = (random(tokens, size, dtype=dtype, seed=seed) for seed in range(2))
    second: Tensor | SlotResults | None = None
    if branches == "two":
        second = random(tokens, size, dtype=dtype, seed=2)
    elif branches != "one":
        ids = torch.randint(0, 5, (tokens, 3), generator=torch.Generator().manual_seed(2))
        ids[1 % tokens, 0] = -1
        results = random(tokens * 3, size, seed=2)
        results[3 * (1 % tokens)] = torch.nan  # nobody computed it
        live = torch.tensor([tokens - 1], dtype=torch.int32) if branches == "live slots" else None
        second = SlotResults(results, ids, 5, live)
    norms = random(1 if branches == "one" else 3, size, dtype=dtype, seed=3)
    following = random(3 if branches == "one" else 1, size, dtype=dtype, seed=4)
    return x, first, second, NormedSum(norms, following, EPSILON, 0.75)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [32, 100])
@pytest.mark.parametrize("branches", ["one", "two", "slots", "live slots"])
def test_sums_between_norms(branches: str, size: int, dtype: torch.dtype) -> None:
    x, first, second, joint = case(branches, size, dtype)
    expected = normed_sum(x, first, second, joint, backend="torch")
    found = normed_sum(x, first, second, joint, backend="triton")
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_reference_is_what_its_formula_says() -> None:
    def norm(rows: Tensor) -> Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + EPSILON).sqrt()

    x, first, second, joint = case("two", 32, torch.float32)
    assert isinstance(second, Tensor)
    value = norm(first) * joint.norms[0] + norm(second) * joint.norms[1]
    out = (x + norm(value) * joint.norms[2]) * 0.75
    found = normed_sum(x, first, second, joint)
    torch.testing.assert_close(found[0], out)
    torch.testing.assert_close(found[1][0], norm(out) * joint.following[0])


@pytest.mark.parametrize(("norms", "following", "text"), [(2, 1, "not 2"), (3, 4, "follow, not 4")])
def test_numbers_of_norms_that_cannot_be(norms: int, following: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NormedSum(torch.ones(norms, 4), torch.ones(following, 4), EPSILON)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_soft_caps(dtype: torch.dtype) -> None:
    logits = 40 * random(3, 1000, dtype=dtype)
    expected = 30 * torch.tanh(logits.float() / 30)
    for backend in ("torch", "triton"):
        found = softcap(logits.clone(), 30.0, backend=backend).float()
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize("branches", ["one", "two", "slots", "live slots"])
def test_on_a_gpu_in_the_shape_of_gemma(branches: str, tokens: int) -> None:
    """And captured in a graph: nothing in a call waits for the device."""
    dtype = torch.bfloat16
    x, first, second, joint = case(branches, 2816, dtype, tokens)
    joint = NormedSum(joint.norms.cuda(), joint.following.cuda(), EPSILON, joint.scale)
    if isinstance(second, SlotResults):
        live = None if second.live is None else second.live.cuda()
        second = SlotResults(second.results.cuda(), second.ids.cuda(), 5, live)
    elif second is not None:
        second = second.cuda()
    logits = 40 * random(tokens, 5000, dtype=dtype).cuda()

    def run(backend: str) -> list[Tensor]:
        given = (x.cuda(), first.cuda(), second, joint)
        capped = softcap(logits.clone(), 30.0, backend=backend)
        return [*normed_sum(*given, backend=backend), capped]

    expected = run("torch")
    run("triton")
    x, first = x.cuda(), first.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run("triton")
    graph.replay()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)
