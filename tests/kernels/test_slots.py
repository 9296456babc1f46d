"""Results of experts before their sum: what the sum is, and that a product adds up the same."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import dispatch, products, step, testing
from pw_kernels.slots import SlotResults

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"


def test_a_slot_without_an_expert_adds_nothing() -> None:
    results = torch.arange(12.0).view(6, 2)
    results[3], results[5] = torch.nan, torch.nan
    ids = torch.tensor([[0, 3], [1, -1], [2, 4]])
    slots = SlotResults(results, ids, 4)
    assert slots.sum(torch.float32).tolist() == [[2, 4], [4, 5], [8, 9]]
    live = SlotResults(results, ids, 4, torch.tensor([2], dtype=torch.int32))
    assert live.sum(torch.bfloat16).tolist() == [[2, 4], [4, 5], [0, 0]]


def call(tokens: int, device: str = "cpu") -> tuple[list[Any], dict[str, Any]]:
    """Arguments of `fused_moe`: 60 experts of 3 and 5 bits, the last id is no expert."""
    arena = testing.ScatteredArena(2000, 4096)
    bits = [3, 5] * 30
    blocks = [testing.random_blocks(arena, *shape, bits) for shape in ((128, 256), (256, 64))]
    if device == "cuda":
        blocks = [
            replace(b, **{name: getattr(b, name).cuda() for name in (
                "bits", "plane_pages", "lut_pages", "lut_offset",
            )}) for b in blocks
        ]  # fmt: skip
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 60, generator=generator).argsort(1)[:, :4]
    ids[-1, -1] = -1
    x = torch.randn(tokens, 256, generator=generator).bfloat16()
    weights = torch.rand(tokens, 4, generator=generator)
    tensors = [tensor.to(device) for tensor in (x, ids, weights, arena.data)]
    return [*tensors, *blocks], {"lut_dtype": torch.bfloat16, "activation": "silu"}


def test_elsewhere_sums_come_at_once() -> None:
    given, options = call(3)
    found = dispatch.fused_moe_slots(*given, **options)
    assert isinstance(found, Tensor)
    assert torch.equal(found, dispatch.fused_moe(*given, **options))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_a_product_adds_them_up_on_a_gpu(tokens: int) -> None:
    given, options = call(tokens, "cuda")
    live = torch.tensor([max(1, tokens - 1)], dtype=torch.int32).cuda()
    summed = dispatch.fused_moe(*given, **options, live=live)
    slots = dispatch.fused_moe_slots(*given, **options, live=live)
    assert isinstance(slots, SlotResults)
    sums = slots.sum(torch.bfloat16)
    assert (sums.float() - summed.float()).norm() <= 1e-2 * summed.float().norm()
    assert not sums[int(live) :].any()
    assert not summed[int(live) :].any()
    assert torch.equal(step.add_slots(given[0], slots), given[0] + summed)
    weight = (torch.randn(256, 512) / 22).bfloat16().cuda()
    y, x = torch.randn(tokens, 512).bfloat16().cuda(), given[0]
    share = torch.randn(tokens, 1).bfloat16().cuda()
    assert products.takes_slots(y, weight)
    found = products.product(y, weight, add=(x, slots), share=share, backend="cuda")
    expected = products.product(y, weight, add=(x, summed), share=share, backend="cuda")
    assert torch.equal(found, expected)
