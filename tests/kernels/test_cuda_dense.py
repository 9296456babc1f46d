"""Unquantized experts in fixed grids beside the plain loop over experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pw_kernels import dense, dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Call:
    """Random arguments on the GPU."""

    def __init__(
        self, tokens: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        experts, hidden, inner, top_k = 7, 96, 80, 2

        def normal(*shape: int) -> Any:
            return (torch.randn(*shape) / shape[-1] ** 0.5).to("cuda", dtype)

        self.x = torch.randn(tokens, hidden).to("cuda", dtype)
        self.ids = torch.rand(tokens, experts).topk(top_k).indices.cuda()
        self.weights = torch.rand(tokens, top_k).cuda()
        self.matrices = (normal(experts, 2 * inner, hidden), normal(experts, hidden, inner))
        self.kwargs: dict[str, Any] = {"activation": "silu"}
        if bias:
            self.kwargs["gate_up_bias"] = normal(experts, 2 * inner)
            self.kwargs["down_bias"] = normal(experts, hidden)

    def __call__(self, function: Any = dispatch.dense_moe, **extra: Any) -> torch.Tensor:
        return function(self.x, self.ids, self.weights, *self.matrices, **self.kwargs, **extra)


def assert_near(found: torch.Tensor, expected: torch.Tensor, error: float = 1e-2) -> None:
    assert (found.float() - expected.float()).norm() <= error * expected.float().norm()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
def test_results_are_those_of_the_plain_loop(tokens: int, bias: bool) -> None:
    call = Call(tokens, bias)
    assert_near(call(), call(dense.dense_moe))


@pytest.mark.parametrize("tokens", [5, 300])
def test_of_fp32_all_digits_count(tokens: int) -> None:
    call = Call(tokens, bias=True, dtype=torch.float32)
    assert_near(call(), call(dense.dense_moe), 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padding_is_zero_and_a_graph_follows_its_inputs(dtype: torch.dtype) -> None:
    call = Call(8, dtype=dtype)
    live = torch.tensor([8], dtype=torch.int32).cuda()
    call(live=live)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(live=live)
    other = Call(8, dtype=dtype)
    call.x.copy_(other.x)
    call.ids.copy_(other.ids)
    live.fill_(5)
    graph.replay()
    assert_near(out[:5], call(dense.dense_moe)[:5])
    assert not out[5:].any()


def test_a_rehearsal_reads_no_lists_that_nobody_wrote() -> None:
    """Routing is not run there, the products behind it are."""
    nvrtc = pytest.importorskip("pw_kernels.nvrtc")
    call = Call(8)
    for size in (8, 12, 16, 20):  # what is freed is given out again, as it was left
        torch.full((1 << size,), 0x3FFFFFF0, dtype=torch.int32, device="cuda")
    with nvrtc.Rehearsal():
        call()
    torch.cuda.synchronize()
    assert_near(call(), call(dense.dense_moe))
