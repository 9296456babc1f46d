"""Attention of decode steps in CUDA C++ compiled at run time (`attention.cu`): one launch.

For batches in which each sequence has about one query, heads of 64, 128 or 256 and up to 16 query
heads of a key head; `triton_attention` takes all others. A query's keys are cut into parts of one
length, which are merged in order: with equal plans a token's result does not depend on the others.
Plans depend on the device and, in the number of parts, on how many queries there are. The grid
fills the device once, whatever the lengths are: its blocks share out the parts there are. Nothing
waits for the device. Blocks tell each other through counters which parts are done: calls that may
run at the same time need counters of their own. Lengths and tables are read while the launch before
this one ends: they have to be there when that one begins.

Axes as in `reference.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pw_kernels import nvrtc
from pw_kernels.attention_plans import (
    MOST_TOKENS,
    Arguments,
    Plan,
    choose_plan,
    constants_of,
    most_workspace_bytes,
    ring_bytes,
    shared_bytes,
    takes,
    threads_of,
    workspace_bytes,
)

__all__ = ["fits", "make_counters", "most_workspace_bytes", "paged_attention"]

WORKSPACE_BYTES = 128 << 20  # larger batches are for `triton_attention`
MOST_COUNTERS = 1 << 14  # queries times query heads of a call
_DTYPES = (torch.bfloat16, torch.float16)
_MOST_STRIDE = 1 << 31


def fits(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor) -> bool:
    """Whether the kernel can take a call."""
    tokens, heads, size = q.shape
    sequences, blocks = block_tables.shape
    page_tokens, kv_heads = k_pages.shape[1:3]
    return (
        q.device.type == "cuda"
        and 0 < tokens <= min(sequences, MOST_TOKENS)
        and tokens * heads <= MOST_COUNTERS
        and takes(heads, kv_heads, size)
        and v_pages.shape[3] == size
        and q.dtype in _DTYPES
        and q.dtype == k_pages.dtype == v_pages.dtype
        and all(_aligned(tensor) for tensor in (q, k_pages, v_pages))
        and workspace_bytes(tokens, heads, kv_heads, size, blocks * page_tokens) <= WORKSPACE_BYTES
        and _has_room(q, sequences, kv_heads)
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def make_counters(device: torch.device) -> Tensor:
    """[MOST_COUNTERS] int32 zeros, for all calls of one caller that follow each other."""
    return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)


def _has_room(q: Tensor, sequences: int, kv_heads: int) -> bool:
    """Whether the device has room for a block, and a block for the lengths of all sequences."""
    tokens, heads, size = q.shape
    room = nvrtc.shared_bytes(q.device.index or 0)
    plan = choose_plan(tokens, heads, kv_heads, size, room)
    constants = constants_of(plan, heads, kv_heads, size, 1, torch.bfloat16)
    fits_block = shared_bytes(constants, tokens) <= room
    return fits_block and 4 * (2 * sequences + 1) <= ring_bytes(constants)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    counters: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """As `reference.paged_attention`, where `fits`.

    `counters` are from `make_counters`; without them, zeros are written for this call. `plan` is
    taken in place of `choose_plan`.
    """
    tokens, heads, size = q.shape
    page_tokens, kv_heads = k_pages.shape[1:3]
    dense = block_tables.stride(1) == 1 and query_start.is_contiguous() and seq_lens.is_contiguous()
    if not dense:  # copies, which the launch must wait for
        block_tables = block_tables.contiguous()
        query_start, seq_lens = query_start.contiguous(), seq_lens.contiguous()
    out = q.new_empty(q.shape)
    index = nvrtc.index_of(q.device)
    if plan is None:
        plan = choose_plan(tokens, heads, kv_heads, size, nvrtc.shared_bytes(index))
    context = block_tables.shape[1] * page_tokens
    parts = plan.parts_of(min(context, window or context))
    if counters is None:
        counters = torch.zeros(tokens * heads, dtype=torch.int32, device=q.device)
    partial = q.new_empty(tokens * heads * parts * (size + 2), dtype=torch.float32)
    arguments = Arguments(
        *(t.data_ptr() for t in (q, k_pages, v_pages, block_tables, query_start, seq_lens)),
        out=out.data_ptr(), partial=partial.data_ptr(),
        extremes=partial[tokens * heads * parts * size :].data_ptr(),
        arrived=counters.data_ptr(),
        k_page=k_pages.stride(0), k_token=k_pages.stride(1), k_head=k_pages.stride(2),
        v_page=v_pages.stride(0), v_token=v_pages.stride(1), v_head=v_pages.stride(2),
        q_token=q.stride(0), q_head=q.stride(1), table_row=block_tables.stride(0),
        tokens=tokens, sequences=block_tables.shape[0], parts=parts, window=window or 0,
        scale=scale, softcap=softcap or 0.0,
    )  # fmt: skip
    if sinks is not None:
        sinks = sinks.float().contiguous()
        arguments.sinks = sinks.data_ptr()
    defines = constants_of(plan, heads, kv_heads, size, page_tokens, q.dtype) | {
        "WINDOW": int(window is not None), "SOFTCAP": int(softcap is not None),
        "SINKS": int(sinks is not None),
    }  # fmt: skip
    places = nvrtc.device_attribute("MULTIPROCESSOR_COUNT", index)
    nvrtc.kernel("attention.cu", "attention", tuple(defines.items()), index).launch(
        (min(places, tokens * defines["HEADS"] * parts), 1), threads_of(defines),
        shared_bytes(defines, tokens), arguments, overlap=dense,
    )  # fmt: skip
    return out


def _aligned(tensor: Tensor) -> bool:
    """Whether heads can be read 16 bytes at a time, and offsets counted in 32 bits."""
    *strides, last = tensor.stride()
    return (
        last == 1
        and not any(s % 8 or s >= _MOST_STRIDE for s in strides)
        and tensor.data_ptr() % 16 == 0
    )
