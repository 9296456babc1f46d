"""The door to a decode step's attention with what comes before it: rotation and store.

Axes as in `step.rotate_store` and `reference.paged_attention`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from torch import Tensor

from pw_kernels import dispatch, step


def attend(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    head_size: int,
    scale: float,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    shared_values: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Rotate and store a step's queries, keys and values, then attend: one launch for few tokens.

    Lengths, starts, tables, and keys and values of earlier steps may be read before the launches
    ahead have ended: between what writes them and this call there is a launch that waits for all
    before it to end, as torch's do, or the start of a graph.

    Args:
        qkv: [T, (Hq + 2 Hkv) D], or [T, (Hq + Hkv) D] with shared values.
        cos: [T, R].
        sin: [T, R].
        k_pages: [P, tok, Hkv, D], written in place.
        v_pages: [P, tok, Hkv, D], written in place.
        slots: [T] int64, where each sequence's last key goes by its table; negative: nowhere.
        block_tables: [T, M] int32.
        query_start: [T + 1] int32: sequences have one query each, of the last key; those behind
            the last of it have none.
        seq_lens: [T] int32.
        head_size: D.
        scale: Of scores.
        norm: As in `step.rotate_store`.
        epsilon: Of the norm.
        shared_values: As in `step.rotate_store`.
        window: As in `reference.paged_attention`.
        softcap: As in `reference.paged_attention`.
        counters: From `dispatch.attention_counters`.

    Returns:
        [T, Hq, D]; zeros without a query.
    """
    cuda = _cuda() if qkv.device.type == "cuda" else None
    given = (qkv, cos, sin, k_pages, v_pages, block_tables)
    if cuda is not None and cuda.fits(*given, norm, shared_values):
        return cuda.attend(  # type: ignore[no-any-return]
            qkv, cos, sin, k_pages, v_pages, block_tables, query_start, seq_lens, scale=scale,
            norm=norm, epsilon=epsilon, shared_values=shared_values, window=window,
            softcap=softcap,
        )  # fmt: skip
    q = step.rotate_store(
        qkv, cos, sin, k_pages, v_pages, slots, head_size=head_size, norm=norm,
        epsilon=epsilon, shared_values=shared_values,
    )  # fmt: skip
    return dispatch.paged_attention(
        q, k_pages, v_pages, block_tables, query_start, seq_lens, scale=scale, window=window,
        softcap=softcap, counters=counters,
    )  # fmt: skip


def _cuda() -> ModuleType | None:
    """The kernel, or None where there is no compiler for it."""
    try:
        return import_module("pw_kernels.cuda_joint_attention")
    except ImportError:
        return None
