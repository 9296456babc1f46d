"""The opponent: experts with unquantized weights, as a grouped matmul in Triton and in torch."""

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from pw_kernels.triton_moe import group_slots

# slots of a group, rows, columns of a step, warps, stages, weights as left operand
SMALL = [
    (16, 64, 64, 4, 4, False),
    (16, 64, 128, 4, 3, False),
    (16, 128, 64, 4, 4, False),
    (16, 32, 128, 4, 4, False),
    (16, 64, 128, 4, 4, True),
    (16, 128, 64, 4, 4, True),
]
LARGE = [
    (64, 128, 64, 4, 4, False),
    (64, 256, 64, 8, 3, False),
    (128, 128, 64, 8, 3, False),
    (128, 256, 64, 8, 3, False),
]


@triton.jit
def grouped_matmul(
    x,  # [T, K], or [S, K] with TOP_K = 1
    w,  # [E, N, K]
    out,  # [S, N]
    group_expert,  # [G], E for an unused group
    group_slots,  # [G, SLOTS]
    slot_count,
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
):
    expert = tl.load(group_expert + tl.program_id(1)).to(tl.int64)
    if expert >= EXPERTS:
        return
    slots = tl.load(group_slots + tl.program_id(1) * SLOTS + tl.arange(0, SLOTS))
    used = slots < slot_count
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, STEP)
    x_rows = x + (slots // TOP_K).to(tl.int64) * K
    w_rows = w + (expert * N + rows) * K
    if WEIGHTS_LEFT:
        total = tl.zeros((ROWS, SLOTS), dtype=tl.float32)
        for start in range(0, K, STEP):
            left = tl.load(w_rows[:, None] + (start + k)[None, :])
            right = tl.load(x_rows[None, :] + (start + k)[:, None], mask=used[None, :], other=0.0)
            total = tl.dot(left, right, total)
        total = tl.trans(total)
    else:
        total = tl.zeros((SLOTS, ROWS), dtype=tl.float32)
        for start in range(0, K, STEP):
            left = tl.load(x_rows[:, None] + (start + k)[None, :], mask=used[:, None], other=0.0)
            right = tl.load(w_rows[None, :] + (start + k)[:, None])
            total = tl.dot(left, right, total)
    target = out + slots.to(tl.int64)[:, None] * N + rows[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=used[:, None])


def triton_calls(x: Tensor, w: Tensor, ids: Tensor, top_k: int) -> Iterator[Callable[[], Tensor]]:
    """The grouped matmul with each tile shape that fits; one of them is the best.

    Args:
        x: [T, K], or [S, K] with `top_k` 1.
        w: [E, N, K].
        ids: [T, k] int64.
        top_k: Slots of a row of x.
    """
    experts, rows, cols = w.shape
    shapes = SMALL + LARGE if ids.numel() >= 8 * experts else SMALL
    for slots, height, step, warps, stages, left in shapes:
        if rows % height or cols % step:
            continue
        expert, group = group_slots(ids, experts, slots)
        out = torch.empty(ids.numel(), rows, dtype=x.dtype, device=x.device)

        def call(
            expert: Tensor = expert,
            group: Tensor = group,
            out: Tensor = out,
            shape: tuple[int, ...] = (slots, height, step, warps, stages, left),
        ) -> Tensor:
            slots, height, step, warps, stages, left = shape
            grouped_matmul[(rows // height, len(expert))](
                x, w, out, expert, group, ids.numel(), experts, rows, cols, top_k, slots,
                height, step, left, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            return out

        yield call


def torch_call(x: Tensor, w: Tensor, ids: Tensor, top_k: int) -> Callable[[], Tensor]:
    """torch's own grouped matmul over rows sorted by expert (sorting is not timed)."""
    order = torch.argsort(ids.flatten(), stable=True)
    counts = torch.bincount(ids.flatten(), minlength=w.shape[0])
    offsets = counts.cumsum(0).int()
    rows = x[order // top_k].contiguous()
    transposed = w.transpose(1, 2)
    return lambda: torch._grouped_mm(rows, transposed, offsets)
