"""Attention of decode steps in CUDA C++ compiled at run time (`attention.cu`): one launch.

For batches in which each sequence has about one query, heads of 64 to 512 and few query heads of a
key head; `triton_attention` takes all others. Keys are cut into parts at fixed places, which are
merged in order, so a token's result does not depend on the batch. Nothing waits for the device.

Axes as in `reference.py`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pw_kernels import nvrtc
from pw_kernels.attention_plans import Arguments, constants_of, programs_of, shared_bytes

_COUNTERS = 1 << 14
_SIZES = (64, 128, 256, 512)
_WORKSPACE_BYTES = 128 << 20  # larger batches are for `triton_attention`
_DTYPES = (torch.bfloat16, torch.float16)


def fits(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor) -> bool:
    """Whether the kernel can take a call."""
    tokens, heads, size = q.shape
    kv_heads = k_pages.shape[2]
    parts = programs_of(1, 1, block_tables.shape[1] * k_pages.shape[1])[0]
    return (
        q.device.type == "cuda"
        and 0 < tokens <= block_tables.shape[0]
        and tokens * kv_heads <= _COUNTERS
        and size in _SIZES
        and v_pages.shape[3] == size
        and heads // kv_heads <= 4
        and heads // kv_heads * size <= 512
        and q.dtype in _DTYPES
        and q.dtype == k_pages.dtype == v_pages.dtype
        and all(_aligned(tensor) for tensor in (q, k_pages, v_pages))
        and 4 * tokens * heads * parts * (size + 2) <= _WORKSPACE_BYTES
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


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
) -> Tensor:
    """As `reference.paged_attention`, where `fits`."""
    tokens, heads, size = q.shape
    page_tokens, kv_heads = k_pages.shape[1:3]
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    query_start, seq_lens = query_start.contiguous(), seq_lens.contiguous()
    out = q.new_empty(q.shape)
    parts, programs = programs_of(tokens, kv_heads, block_tables.shape[1] * page_tokens)
    partial = q.new_empty(tokens * heads * parts * (size + 2), dtype=torch.float32)
    arguments = Arguments(
        *(t.data_ptr() for t in (q, k_pages, v_pages, block_tables, query_start, seq_lens)),
        out=out.data_ptr(), partial=partial.data_ptr(),
        extremes=partial[tokens * heads * parts * size :].data_ptr(),
        arrived=_arrived(q.device).data_ptr(),
        k_page=k_pages.stride(0), k_token=k_pages.stride(1), k_head=k_pages.stride(2),
        v_page=v_pages.stride(0), v_token=v_pages.stride(1), v_head=v_pages.stride(2),
        q_token=q.stride(0), q_head=q.stride(1), table_row=block_tables.stride(0),
        sequences=block_tables.shape[0], parts=parts, programs=programs, window=window or 0,
        scale=scale, softcap=softcap or 0.0,
    )  # fmt: skip
    if sinks is not None:
        sinks = sinks.float().contiguous()
        arguments.sinks = sinks.data_ptr()
    defines = constants_of(heads, kv_heads, size, page_tokens, q.dtype) | {
        "WINDOW": int(window is not None), "SOFTCAP": int(softcap is not None),
        "SINKS": int(sinks is not None),
    }  # fmt: skip
    index = torch.cuda.current_device() if q.device.index is None else q.device.index
    nvrtc.kernel("attention.cu", "attention", tuple(defines.items()), index).launch(
        (tokens * programs, kv_heads), 32 * defines["WARPS"], shared_bytes(defines), arguments,
        overlap=True,
    )  # fmt: skip
    return out


def _aligned(tensor: Tensor) -> bool:
    """Whether heads can be read 16 bytes at a time."""
    *strides, last = tensor.stride()
    return last == 1 and not any(s % 8 for s in strides) and tensor.data_ptr() % 16 == 0


@cache
def _arrived(device: torch.device) -> Tensor:
    """Counters of blocks that have done their parts of a query: zeros between launches."""
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
