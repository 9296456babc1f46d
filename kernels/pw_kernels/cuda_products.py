"""Products of few rows in CUDA C++ compiled at run time (`products.cu`): see `products`.

A block takes one to three tiles of 16 rows of the weight (a plan's `height`) and all their columns,
which its warps share. So every sum has one fixed order, and a token's result does not depend on how
many others there are, as long as the kernel is used; beside other launches, blocks of 17 to 32
tokens have half as many warps and an order of their own. Weights of some megabytes take more tokens
than large ones: what all blocks read of the tokens is little then. Launches may begin while the one
before ends: weights are on their way before it has.

Axes as in `products`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pw_kernels import nvrtc
from pw_kernels.product_plans import (
    BESIDE_TOKENS,
    NORM_STEPS,
    STEP,
    TOKENS,
    WARPS,
    Arguments,
    Plan,
    choose_plan,
    constants_of,
)
from pw_kernels.slots import SlotResults
from pw_kernels.step import Norm

FEW_TOKENS = 8  # at most
SMALL_BYTES, SOME_TOKENS = 9 << 20, 32  # a weight so small takes more
BESIDE_BYTES = 24 << 20  # ... and one beside other launches BESIDE_TOKENS
WIDE_ROWS = 1 << 16  # weights with so many are faster through torch from two tokens on
_DTYPES = (torch.bfloat16, torch.float16)
_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def norms(x: Tensor) -> bool:
    """Whether the kernel can take a norm along."""
    return x.shape[0] <= TOKENS and x.shape[1] <= WARPS * NORM_STEPS * STEP


def plan_of(
    x: Tensor,
    weight: Tensor,
    norm: bool,
    inner: int = 0,
    *,
    forced: bool = False,
    beside: bool = False,
) -> Plan | None:
    """How a call is launched, if the kernel can take it and, unless `forced`, is the faster way.

    A norm that the kernel cannot take along (`norms`) is left out.
    """
    if not _fits(x, weight, inner, forced, beside):
        return None
    return _plan_with_room(x, weight, norm and norms(x), inner, beside)


def _fits(x: Tensor, weight: Tensor, inner: int, forced: bool, beside: bool) -> bool:
    tokens, cols, size = x.shape[0], weight.shape[1], weight.nbytes
    most = SOME_TOKENS if size <= SMALL_BYTES else FEW_TOKENS
    return (
        x.device.type == "cuda"
        and x.dim() == 2
        and tokens > 0
        and (tokens <= most or (beside and tokens in BESIDE_TOKENS and size <= BESIDE_BYTES))
        and (forced or tokens == 1 or weight.shape[0] < WIDE_ROWS)
        and weight.dtype == x.dtype
        and x.dtype in _DTYPES
        and cols % STEP == 0
        and inner % 8 == 0
        and weight.is_contiguous()
        and _aligned(x)
        and weight.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def _plan_with_room(x: Tensor, weight: Tensor, norm: bool, inner: int, beside: bool) -> Plan | None:
    """The plan on this device; None where it has no shared memory for a block."""
    room = nvrtc.shared_bytes(nvrtc.index_of(x.device))
    plan = choose_plan(len(x), weight.shape, norm, inner, room, beside)
    return plan if plan.shared_bytes(weight.shape[1], norm) <= room else None


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    add: Sequence[Tensor | SlotResults],
    share: Tensor | None,
    plan: Plan,
) -> Tensor:
    """See `products.product`; only the second of two to add may be of slots."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    constants = {"ADD": len(add) + (share is not None)}
    given = {"out": out}
    for name, part in zip(("add", "more"), add, strict=False):
        if isinstance(part, SlotResults):
            constants |= {"ROUTED": part.ids.shape[1], "EXPERTS": part.experts}
            given |= {"results": part.results, "ids": part.ids}
            given |= {} if part.live is None else {"live": part.live}
        else:
            given[name] = part if part.stride(1) == 1 else part.contiguous()
    if share is not None:
        given["share"] = share
    _launch(x, weight, bias, norm, plan, constants, given)
    return out


def gated_product(
    x: Tensor,
    weight: Tensor,
    inner: int,
    activation: str,
    bias: Tensor | None,
    norm: Norm | None,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `products.gated_product`."""
    tokens = x.shape[0]
    out = x.new_empty(tokens, inner)
    rest = x.new_empty(tokens, weight.shape[0] - 2 * inner)
    normed = x if norm is None else x.new_empty(x.shape)
    constants = {"GATED": 1, "INNER": inner, "KIND": _KINDS[activation]}
    given = {"out": out, "rest": rest}
    if norm is not None:
        given["normed"] = normed
    _launch(x, weight, bias, norm, plan, constants, given)
    return out, rest, normed


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    plan: Plan,
    constants: dict[str, int],
    given: Mapping[str, Tensor],
) -> None:
    tokens, (rows, cols) = x.shape[0], weight.shape
    inner = constants.get("INNER", 0)
    arguments = Arguments(
        x=x.data_ptr(), weight=weight.data_ptr(), tokens=tokens, x_row=x.stride(0),
        **{name: tensor.data_ptr() for name, tensor in given.items()},
        **{f"{name}_row": given[name].stride(0) for name in ("add", "more", "share")
           if name in given},
    )  # fmt: skip
    if bias is not None:
        arguments.bias = bias.data_ptr()
    if norm is not None:
        arguments.norm, arguments.epsilon = norm.weight.data_ptr(), norm.epsilon
    defines = constants_of(plan, weight.shape, x.dtype, bias is not None, norm is not None)
    kernel = nvrtc.kernel(
        "products.cu", "product", tuple((defines | constants).items()), nvrtc.index_of(x.device)
    )
    kernel.launch(
        (plan.grid(rows, inner),), 32 * plan.warps, plan.shared_bytes(cols, norm is not None),
        arguments, overlap=True,
    )  # fmt: skip


def _aligned(x: Tensor) -> bool:
    """Whether rows can be read 16 bytes at a time."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
