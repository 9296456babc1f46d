"""Decode attention with rotation and store before it, in one launch (`joint_attention.cu`, NVRTC).

For steps of few sequences, each of which has one query, heads of 64, 128, 256 or 512 and up to
eight query heads of a key head, from compute capability 9.0 on. Keys and values of earlier steps
are read before the launch waits for the one before it: they have to be there when that one begins,
and so have lengths and tables. Of this step the kernel takes queries, keys and values themselves,
as the product gives them. The blocks that share a query's keys are a cluster, whose parts meet in
shared memory: there is no workspace. How many they are depends on shapes alone, so with equal plans
a token's result does not depend on the others.

Axes as in `step.rotate_store` and `reference.paged_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pw_kernels import nvrtc
from pw_kernels.joint_attention_plans import (
    Arguments,
    Plan,
    choose_plan,
    constants_of,
    shared_bytes,
    threads_of,
)

_LEAST_CAPABILITY = (9, 0)  # clusters
_DTYPES = (torch.bfloat16, torch.float16)
_MOST_STRIDE = 1 << 31


def fits(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    norm: Tensor | None,
    shared_values: bool,
) -> bool:
    """Whether the kernel can take a call, and is the faster way."""
    page_tokens, kv_heads, size = k_pages.shape[1:]
    heads = _heads(qkv, k_pages, shared_values)
    plan = choose_plan(len(qkv), heads, kv_heads, size)
    return (
        _on_a_gpu(qkv)
        and plan is not None
        and 0 < len(qkv) == len(block_tables)
        and cos.shape[1] == v_pages.shape[3] == size
        and qkv.dtype in _DTYPES
        and qkv.dtype == cos.dtype == sin.dtype == k_pages.dtype == v_pages.dtype
        and cos.stride() == sin.stride()
        and (norm is None or (norm.dtype == qkv.dtype and norm.is_contiguous()))
        and block_tables.stride(1) == 1
        and all(_aligned(tensor, 8) for tensor in (k_pages, v_pages))
        and all(_aligned(tensor, 2) for tensor in (qkv, cos, sin))
        and torch.cuda.get_device_capability(qkv.device) >= _LEAST_CAPABILITY
        and shared_bytes(constants_of(plan, heads, kv_heads, size, page_tokens, qkv.dtype))
        <= nvrtc.shared_bytes(nvrtc.index_of(qkv.device))
    )


def attend(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    shared_values: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """See `joint_attention.attend`, where `fits`; `plan` is taken in place of `choose_plan`."""
    tokens, heads = len(qkv), _heads(qkv, k_pages, shared_values)
    page_tokens, kv_heads, size = k_pages.shape[1:]
    plan = plan or choose_plan(tokens, heads, kv_heads, size)
    assert plan is not None  # it fits
    out = qkv.new_empty(tokens, heads, size)
    arguments = Arguments(
        *(t.data_ptr() for t in (qkv, cos, sin)), 0 if norm is None else norm.data_ptr(),
        *(t.data_ptr() for t in (k_pages, v_pages, block_tables, query_start, seq_lens, out)),
        *k_pages.stride()[:3], *v_pages.stride()[:3], qkv.stride(0), cos.stride(0),
        block_tables.stride(0), block_tables.shape[1], tokens, window or 0, scale, softcap or 0.0,
        epsilon,
    )  # fmt: skip
    defines = constants_of(plan, heads, kv_heads, size, page_tokens, qkv.dtype) | {
        "NORMED": 0 if norm is None else len(norm), "SHARED": int(shared_values),
        "WINDOW": int(window is not None), "SOFTCAP": int(softcap is not None),
    }  # fmt: skip
    kernel = nvrtc.kernel(
        "joint_attention.cu", "attend", tuple(defines.items()), nvrtc.index_of(qkv.device)
    )
    kernel.launch(
        (tokens * kv_heads * plan.cluster,), threads_of(plan), shared_bytes(defines), arguments,
        overlap=True,
    )  # fmt: skip
    return out


def _on_a_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def _heads(qkv: Tensor, k_pages: Tensor, shared_values: bool) -> int:
    kv_heads, size = k_pages.shape[2:]
    return qkv.shape[1] // size - (1 if shared_values else 2) * kv_heads


def _aligned(tensor: Tensor, numbers: int) -> bool:
    """Whether rows can be read so many numbers at a time, and offsets counted in 32 bits."""
    *strides, last = tensor.stride()
    return (
        last == 1
        and not any(s % numbers or s >= _MOST_STRIDE for s in strides)
        and tensor.data_ptr() % (2 * numbers) == 0
    )
