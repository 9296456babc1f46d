"""Dividing a budget: every byte has a class, and real models get good pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pw.blocks import MODULES, BlockShape, ExpertGeometry
from pw.config import format_bytes
from pw.errors import BudgetError
from pw.memory.arena import Arena, choose_page_bytes, pages_for
from pw.memory.budget import Demand, block_layouts, plan_memory
from pw.memory.layout import BlockLayout, choose_base_bits
from pw.models.geometry import KvGeometry, KvLayer
from pw_kernels.bitplane import lut_bytes, plane_bytes

GIB = 1 << 30


def moe(layers: int, experts: int, hidden: int, inner: int) -> ExpertGeometry:
    """Gated experts of a whole model."""
    up, down = BlockShape(2 * inner, hidden), BlockShape(hidden, inner)
    return ExpertGeometry(tuple(range(layers)), experts, 2, up, down)


def heads(layers: int, kv_heads: int, dim: int) -> list[KvLayer]:
    return [KvLayer(i, kv_heads, dim, dim, None, i) for i in range(layers)]


QWEN = moe(24, 60, 2048, 1408)
MIXTRAL = moe(32, 8, 4096, 14336)
GEMMA = moe(30, 128, 2816, 704)
GEMMA_KV = [
    KvLayer(i, 8, 256, 256, 1024, i) if i % 6 < 5 else KvLayer(i, 2, 512, 512, None, i)
    for i in range(30)
]
MODELS = {
    "qwen": (QWEN, heads(24, 16, 128)),
    "mixtral": (MIXTRAL, heads(32, 8, 128)),
    "gemma": (GEMMA, GEMMA_KV),
}


def demand(geometry: ExpertGeometry, kv: list[KvLayer], low: int = 2, high: int = 8) -> Demand:
    every = np.ones(geometry.blocks, dtype=np.int64)
    return Demand(
        geometry=geometry,
        kv=KvGeometry(tuple(kv)),
        kv_dtype=torch.bfloat16,
        dense=4 * GIB,
        experts_dense=0,
        workspace=GIB // 2,
        context_scratch=lambda tokens: 64 * tokens,
        least_bits=low * every,
        most_bits=high * every,
        stored_bits=(2, 8),
        max_model_len=8192,
        max_num_seqs=64,
        chunk_tokens=512,
    )


# Planes of Gemma-4 are 121 x 4 KiB and, padded to tiles, 66 x 4 KiB: 32 KiB pages would waste 7 %.
PAGES = {"qwen": 32, "mixtral": 256, "gemma": 16}


@pytest.mark.parametrize("name", MODELS)
def test_real_models_get_large_pages_and_little_padding(name: str) -> None:
    geometry, kv = MODELS[name]
    layouts = block_layouts(demand(geometry, kv))
    page = layouts[0].page_bytes
    assert page == PAGES[name] << 10
    for bits in range(2, 9):
        stored = sum(layout.resident_pages(bits) * page for layout in layouts)
        useful = sum(layout.useful_bytes(bits) for layout in layouts)
        assert stored / useful - 1 < 0.03, (bits, page)
    assert all(page % (layer.width * 2) == 0 for layer in kv)  # KV pages have no slack at all


@pytest.mark.parametrize("name", [*MODELS, "short rows"])
def test_base_tree_is_as_wide_as_its_cost_allows(name: str) -> None:
    """Real models can afford the tree up to 5 bits; rows of 256 columns cannot."""
    geometry = MODELS[name][0] if name in MODELS else moe(4, 8, 256, 128)
    shapes = [geometry.shape(module) for module in MODULES]
    base = choose_base_bits(shapes, 2, 8)
    assert base == (5 if name in MODELS else 2)

    def cost(widest: int) -> float:
        size = sum(lut_bytes(s.rows, b) for s in shapes for b in range(2, widest + 1))
        return size * 8 / sum(s.weights for s in shapes)

    assert cost(base) <= 0.75
    assert base == 5 or cost(base + 1) > 0.75


def test_base_tree_always_holds_the_least_width() -> None:
    assert choose_base_bits([BlockShape(64, 24)], 3, 8) == 3
    assert choose_base_bits([BlockShape(64, 1 << 16)], 2, 4) == 4


def test_layout_regions_add_up_and_never_straddle_pages() -> None:
    for base in (2, 4, 8):
        layout = BlockLayout(BlockShape(96, 200), 2, 8, base, 4096)
        assert layout.plane_bytes == plane_bytes(96, 200)
        for bits in range(2, 9):
            start, size = layout.lut_offset(bits), lut_bytes(96, bits)
            assert start % 512 == 0
            region = layout.base_pages if bits <= base else layout.lut_pages(bits)
            assert start + size <= region * 4096
            row = size // 96
            # No row of a LUT lies in two pages: kernels read it in one go.
            assert all(
                (start + r * row) // 4096 == (start + (r + 1) * row - 1) // 4096 for r in range(96)
            )
            assert layout.resident_pages(bits) == (
                bits * layout.plane_pages + layout.base_pages + layout.lut_pages(bits)
            )
        wide = sum(layout.lut_pages(bits) for bits in range(base + 1, 9))
        assert layout.stored_pages == 8 * layout.plane_pages + layout.base_pages + wide
        assert layout.resident_pages(8) <= layout.stored_pages


def test_page_size_follows_the_padding() -> None:
    assert choose_page_bytes([(4096, 9), (8192, 9)], [1024]) == 4096
    assert choose_page_bytes([(1 << 20, 9)], []) == 1 << 20
    assert choose_page_bytes([(1 << 20, 9)], [3 << 12]) == 1 << 19  # 42 tokens leave 1/64 over
    assert choose_page_bytes([(1 << 20, 9)], [1024]) == 1 << 16  # 64 tokens are enough
    assert choose_page_bytes([(1 << 20, 9)], [16]) == 4096
    assert choose_page_bytes([(4096, 1)], [6000]) == 8192  # a page holds at least one token
    with pytest.raises(ValueError, match="one token of one layer needs more"):
        choose_page_bytes([(4096, 1)], [3 << 20])
    with pytest.raises(ValueError, match="power of two from 4096: 5000"):
        Arena(1, 5000, torch.device("cpu"))
    assert [pages_for(n, 4096) for n in (0, 1, 4096, 4097)] == [0, 1, 1, 2]


@pytest.mark.parametrize("name", MODELS)
def test_plan_spends_at_most_the_budget_and_wastes_less_than_a_page(name: str) -> None:
    wanted = demand(*MODELS[name])
    for budget in (30 * GIB, 40 * GIB, 60 * GIB):
        plan = plan_memory(budget, wanted)
        spent = plan.dense + plan.workspace + plan.tables + plan.arena
        assert spent <= budget
        least = sum(
            layout.resident_pages(2) * wanted.geometry.blocks // 2 for layout in plan.layouts
        )
        kv = sum(-(-plan.max_model_len // (plan.page_bytes // (2 * layer.width)))
                 for layer in MODELS[name][1])  # fmt: skip
        assert least + kv <= plan.num_pages
        most = sum(
            layout.resident_pages(8) * wanted.geometry.blocks // 2 for layout in plan.layouts
        )
        assert budget - spent < plan.page_bytes or plan.num_pages >= most


def test_context_shrinks_to_what_fits_alone_and_the_least_is_named() -> None:
    wanted = demand(QWEN, heads(24, 16, 128))
    roomy = plan_memory(60 * GIB, wanted)
    assert roomy.max_model_len == 8192
    with pytest.raises(BudgetError, match=r"\(1,000 bytes\) .* are the least") as error:
        plan_memory(1000, wanted)
    told = error.value.message.split("too small: ")[1]
    least = int(told.split("(")[1].split(" bytes")[0].replace(",", ""))
    smallest = plan_memory(least, wanted)
    assert smallest.max_model_len >= 2
    with pytest.raises(BudgetError):
        plan_memory(least - 1, wanted)
    lengths = [plan_memory(least + extra * (1 << 26), wanted).max_model_len for extra in range(24)]
    assert lengths == sorted(lengths)
    assert 2 <= lengths[0] < lengths[-1] <= 8192


def test_widths_of_a_file_are_charged_as_they_are() -> None:
    wanted = demand(QWEN, heads(24, 16, 128), 2, 2)
    bits = np.full(QWEN.blocks, 2, dtype=np.int64)
    bits[::2] = 8  # every gate_up
    mixed = replace(wanted, least_bits=bits, most_bits=bits)
    tight = plan_memory(20 * GIB, mixed)
    pages = sum(
        layout.resident_pages(width) * QWEN.blocks // 2
        for layout, width in zip(tight.layouts, (8, 2), strict=True)
    )
    assert tight.num_pages >= pages
    with pytest.raises(BudgetError, match=f"least widths {format_bytes(pages * tight.page_bytes)}"):
        plan_memory(8 * GIB, mixed)
    plan_memory(9 * GIB, wanted)  # which two bits everywhere are happy with


def test_dense_experts_take_no_pages() -> None:
    wanted = replace(demand(QWEN, heads(24, 16, 128)), experts_dense=23 * GIB)
    plan = plan_memory(40 * GIB, wanted)
    kv = 64 * sum(-(-8192 // (plan.page_bytes // 8192)) for _ in range(24))
    assert plan.experts_dense == 23 * GIB
    assert plan.num_pages <= kv


def test_a_given_page_must_hold_a_token() -> None:
    wanted = demand(QWEN, heads(24, 16, 128))
    assert block_layouts(replace(wanted, page_bytes=65536))[0].page_bytes == 65536
    with pytest.raises(BudgetError, match="4096 bytes does not hold one token: 8192"):
        block_layouts(replace(wanted, page_bytes=4096))
