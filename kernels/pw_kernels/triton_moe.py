"""Fused MoE in plain Triton: runs on any GPU that Triton knows, and on the CPU by its interpreter.

Three launches: gate_up with activation, down with router weight, and the sum over the experts of
a token in slot order. Width, page ids and table of a block are read from its page table inside the
kernel, so a launch captured in a CUDA graph stays valid while bits change, and widths mix freely.
Nothing here waits for the device. Tile sizes do not depend on the batch, so neither does the result
of a token.

Axes as in `reference.py`. A slot is one (token, expert) pair, S = T * k of them. A program works on
one group: up to BLOCK_SLOTS slots of one expert, by BLOCK_ROWS rows of its block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pw_kernels.bitplane import TILE_COLS
from pw_kernels.pages import WeightPages

BLOCK_SLOTS = 16  # the least that a matrix unit takes
BLOCK_ROWS = 32
BLOCK_COMBINE = 256
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def _table_rows(
    lut_pages,  # [E, LP] int32
    lut_offset,  # [E] int32
    expert,
    rows,  # [R] rows of the block
    bits,
    LP: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Index of each row's table among the 2-byte entries of the arena, [R] int64."""
    byte = tl.load(lut_offset + expert) + (rows << (bits + 1))
    page = tl.load(lut_pages + expert * LP + byte // PAGE).to(tl.int64)
    return page * (PAGE // 2) + (byte % PAGE) // 2


@triton.jit
def _merge(
    words,  # int32 view of the arena
    pages,  # page table of the expert, [B, PP]
    byte,  # [R] byte of each row's first word in a plane
    bits,
    FIRST: tl.constexpr,
    PLANES: tl.constexpr,
    PP: tl.constexpr,
    PAGE: tl.constexpr,
):
    """4-bit indices from planes FIRST to FIRST + 3 of one column tile, [R, 4 s, 4 c, 8 j]."""
    s = tl.arange(0, 4)[None, :, None]
    c = tl.arange(0, 4)[None, None, :]
    # signed words only shift arithmetically, so masks and rotations are on uint32
    merged = tl.zeros((byte.shape[0], 4, 4), dtype=tl.uint32)
    for p in tl.static_range(FIRST, min(FIRST + 4, PLANES)):
        present = tl.full((byte.shape[0],), p, tl.int32) < bits
        page = tl.load(pages + p * PP + byte // PAGE, mask=present, other=0).to(tl.int64)
        at = page * (PAGE // 4) + (byte % PAGE) // 4
        word = tl.load(words + at[:, None, None] + 4 * c, mask=present[:, None, None], other=0)
        mask = (tl.full((1, 4, 1), 0x11111111, tl.uint32)) << ((s + p) & 3).to(tl.uint32)
        merged |= word.to(tl.uint32, bitcast=True) & mask
    turn = ((s + FIRST) & 31).to(tl.uint32)
    merged = (merged >> turn) | (merged << ((32 - turn) & 31))
    j = tl.arange(0, 8)[None, None, None, :].to(tl.uint32)
    return ((merged[:, :, :, None] >> (4 * j)) & 15).to(tl.int32)


@triton.jit
def _decode(
    words,
    entries,  # int16 view of the arena
    pages,
    tables,  # [R] first entry of each row's table
    rows,  # [R]
    tile,  # column tile
    bits,
    COL_TILES: tl.constexpr,
    PLANES: tl.constexpr,
    PP: tl.constexpr,
    PAGE: tl.constexpr,
    LUT_FP16: tl.constexpr,
    dtype: tl.constexpr,
):
    """Weights of one column tile, [R, 128] in `dtype`."""
    lane_row, i = rows % 8, rows % 32 // 8
    byte = ((rows // 32) * COL_TILES + tile) * 512 + lane_row * 64 + i * 4
    # word 4 * L + i with L = 4 * r + c: the four words of a row are 16 bytes apart
    index = _merge(words, pages, byte, bits, 0, PLANES, PP, PAGE)
    if bits > 4:
        index |= _merge(words, pages, byte, bits, 4, PLANES, PP, PAGE) << 4
    index = tl.reshape(index, (rows.shape[0], 128))
    raw = tl.load(entries + tables[:, None] + index)
    if LUT_FP16:
        return raw.to(tl.float16, bitcast=True).to(dtype)
    if dtype == tl.bfloat16:
        return raw.to(tl.bfloat16, bitcast=True)
    return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _activate(gate, up, KIND: tl.constexpr):
    if KIND == 1:
        return gate * 0.5 * (1 + tl.erf(gate * 0.7071067811865476)) * up
    if KIND == 2:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(inner) * up
    return gate * tl.sigmoid(gate) * up


@triton.jit
def gate_up_kernel(
    x,  # [T, H]
    words,  # arena as int32
    entries,  # arena as int16
    bits_table,  # [E] int32
    plane_pages,  # [E, B, PP] int32
    lut_pages,  # [E, LP] int32
    lut_offset,  # [E] int32
    bias,  # [E, 2I] fp32, or anything if not HAS_BIAS
    group_expert,  # [G] int32, E for an unused group
    group_slots,  # [G, BLOCK_SLOTS] int32, S for an unused place
    hidden,  # [S, I], written
    slot_count,  # S
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    COLS: tl.constexpr,  # H
    WIDTH: tl.constexpr,  # I
    COL_TILES: tl.constexpr,
    PLANES: tl.constexpr,
    PP: tl.constexpr,
    LP: tl.constexpr,
    PAGE: tl.constexpr,
    LUT_FP16: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """hidden[slot] = act(gate x) * (up x)."""
    expert = tl.load(group_expert + tl.program_id(1))
    if expert >= EXPERTS:
        return
    bits = tl.load(bits_table + expert)
    pages = plane_pages + expert * (PLANES * PP)
    slots = tl.load(group_slots + tl.program_id(1) * SLOTS + tl.arange(0, SLOTS))
    used = slots < slot_count
    columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate_rows = tl.minimum(columns, WIDTH - 1)
    up_rows = gate_rows + WIDTH
    gate_tables = _table_rows(lut_pages, lut_offset, expert, gate_rows, bits, LP, PAGE)
    up_tables = _table_rows(lut_pages, lut_offset, expert, up_rows, bits, LP, PAGE)
    x_rows = x + (slots // TOP_K).to(tl.int64)[:, None] * COLS
    gate = tl.zeros((SLOTS, ROWS), dtype=tl.float32)
    up = tl.zeros((SLOTS, ROWS), dtype=tl.float32)
    for tile in range(COL_TILES):
        k = tile * 128 + tl.arange(0, 128)[None, :]
        inputs = tl.load(x_rows + k, mask=used[:, None] & (k < COLS), other=0.0)
        weights = _decode(
            words, entries, pages, gate_tables, gate_rows, tile, bits,
            COL_TILES, PLANES, PP, PAGE, LUT_FP16, x.dtype.element_ty,
        )  # fmt: skip
        gate = tl.dot(inputs, tl.trans(weights), gate, input_precision="ieee")
        weights = _decode(
            words, entries, pages, up_tables, up_rows, tile, bits,
            COL_TILES, PLANES, PP, PAGE, LUT_FP16, x.dtype.element_ty,
        )  # fmt: skip
        up = tl.dot(inputs, tl.trans(weights), up, input_precision="ieee")
    if HAS_BIAS:
        gate += tl.load(bias + expert * (2 * WIDTH) + gate_rows)[None, :]
        up += tl.load(bias + expert * (2 * WIDTH) + up_rows)[None, :]
    target = hidden + slots.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    result = _activate(gate, up, KIND).to(hidden.dtype.element_ty)
    tl.store(target, result, mask=used[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def down_kernel(
    hidden,  # [S, I]
    words,
    entries,
    bits_table,
    plane_pages,
    lut_pages,
    lut_offset,
    bias,  # [E, H] fp32, or anything if not HAS_BIAS
    topk_weights,  # [S] fp32
    group_expert,
    group_slots,
    out,  # [S, H] fp32, written
    slot_count,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,  # I
    WIDTH: tl.constexpr,  # H
    COL_TILES: tl.constexpr,
    PLANES: tl.constexpr,
    PP: tl.constexpr,
    LP: tl.constexpr,
    PAGE: tl.constexpr,
    LUT_FP16: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out[slot] = router weight * (down hidden[slot])."""
    expert = tl.load(group_expert + tl.program_id(1))
    if expert >= EXPERTS:
        return
    bits = tl.load(bits_table + expert)
    pages = plane_pages + expert * (PLANES * PP)
    slots = tl.load(group_slots + tl.program_id(1) * SLOTS + tl.arange(0, SLOTS))
    used = slots < slot_count
    columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(columns, WIDTH - 1)
    tables = _table_rows(lut_pages, lut_offset, expert, rows, bits, LP, PAGE)
    hidden_rows = hidden + slots.to(tl.int64)[:, None] * COLS
    total = tl.zeros((SLOTS, ROWS), dtype=tl.float32)
    for tile in range(COL_TILES):
        k = tile * 128 + tl.arange(0, 128)[None, :]
        inputs = tl.load(hidden_rows + k, mask=used[:, None] & (k < COLS), other=0.0)
        weights = _decode(
            words, entries, pages, tables, rows, tile, bits,
            COL_TILES, PLANES, PP, PAGE, LUT_FP16, hidden.dtype.element_ty,
        )  # fmt: skip
        total = tl.dot(inputs, tl.trans(weights), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + expert * WIDTH + rows)[None, :]
    total *= tl.load(topk_weights + slots, mask=used, other=0.0)[:, None]
    target = out + slots.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(target, total, mask=used[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def combine_kernel(
    slots,  # [S, H] fp32
    ids,  # [S] int64
    out,  # [T, H], written
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = the slots of t added in order; slots without an expert add nothing."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(TOP_K):
        slot = token * TOP_K + j
        expert = tl.load(ids + slot)
        width = tl.where((expert >= 0) & (expert < EXPERTS), WIDTH, 0)
        total += tl.load(slots + slot * WIDTH + columns, mask=columns < width, other=0.0)
    tl.store(out + token * WIDTH + columns, total.to(out.dtype.element_ty), mask=columns < WIDTH)


def group_slots(ids: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor]:
    """Cut the slots of each expert into groups, without waiting for the device.

    Args:
        ids: [T, k] int64; ids outside [0, E) belong to no group.
        experts: E.
        size: Slots of a group.

    Returns:
        Expert of each group, [G] int32, E for an unused group; and its slots in ascending order,
        [G, size] int32, S for an unused place. G depends on shapes alone.
    """
    flat = torch.where((ids >= 0) & (ids < experts), ids, experts).flatten()
    count = flat.numel()
    groups = min(count, count // size + experts)
    order = torch.argsort(flat, stable=True)
    per_expert = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    per_expert.scatter_add_(0, flat, torch.ones_like(flat))
    first_slot = per_expert.cumsum(0) - per_expert
    last_group = ((per_expert[:experts] + size - 1) // size).cumsum(0)
    group = torch.arange(groups, device=ids.device)
    expert = torch.searchsorted(last_group, group, right=True)  # E past the last group
    before = torch.nn.functional.pad(last_group, (1, 0))[expert]
    place = (group - before)[:, None] * size + torch.arange(size, device=ids.device)
    used = (expert < experts)[:, None] & (place < per_expert[expert][:, None])
    index = (first_slot[expert][:, None] + place).clamp(max=max(count - 1, 0))
    slots = torch.where(used, order[index], count)
    return expert.int(), slots.int()


def _block_arguments(
    arena: Tensor, pages: WeightPages
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Kernel arguments that describe the blocks of one module: tensors, then constants."""
    tensors = (
        arena.view(torch.int32),
        arena.view(torch.int16),
        pages.bits,
        pages.plane_pages,
        pages.lut_pages,
        pages.lut_offset,
    )
    constants = {
        "EXPERTS": pages.experts,
        "COLS": pages.cols,
        "COL_TILES": -(-pages.cols // TILE_COLS),
        "PLANES": pages.plane_pages.shape[1],
        "PP": pages.plane_pages.shape[2],
        "LP": pages.lut_pages.shape[1],
        "PAGE": arena.shape[1],
        "SLOTS": BLOCK_SLOTS,
        "ROWS": BLOCK_ROWS,
    }
    return tensors, constants


def fused_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    arena: Tensor,
    gate_up: WeightPages,
    down: WeightPages,
    *,
    lut_dtype: torch.dtype,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """As `reference.fused_moe`, for gated experts with a named activation.

    Products are in the dtype of `x` with fp32 sums; the activation is rounded to that dtype.
    """
    tokens, top_k = topk_ids.shape
    out = torch.empty(tokens, down.rows, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    count = tokens * top_k
    hidden = torch.empty(count, down.cols, dtype=x.dtype, device=x.device)
    results = torch.empty(count, down.rows, dtype=torch.float32, device=x.device)
    weights = topk_weights.float().contiguous()
    expert, slots = group_slots(topk_ids, gate_up.experts, BLOCK_SLOTS)
    is_fp16 = lut_dtype == torch.float16
    tensors, constants = _block_arguments(arena, gate_up)
    bias = weights if gate_up_bias is None else gate_up_bias.float().contiguous()
    gate_up_kernel[(triton.cdiv(down.cols, BLOCK_ROWS), len(expert))](
        x.contiguous(), *tensors, bias, expert, slots, hidden, count,
        TOP_K=top_k, WIDTH=down.cols, LUT_FP16=is_fp16, HAS_BIAS=gate_up_bias is not None,
        KIND=KINDS[activation], **constants,
    )  # fmt: skip
    tensors, constants = _block_arguments(arena, down)
    bias = weights if down_bias is None else down_bias.float().contiguous()
    down_kernel[(triton.cdiv(down.rows, BLOCK_ROWS), len(expert))](
        hidden, *tensors, bias, weights, expert, slots, results, count,
        WIDTH=down.rows, LUT_FP16=is_fp16, HAS_BIAS=down_bias is not None, **constants,
    )  # fmt: skip
    combine_kernel[(tokens, triton.cdiv(down.rows, BLOCK_COMBINE))](
        results, topk_ids.contiguous(), out,
        EXPERTS=gate_up.experts, TOP_K=top_k, WIDTH=down.rows, BLOCK=BLOCK_COMBINE,
    )  # fmt: skip
    return out
