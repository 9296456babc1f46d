"""Routers of some tokens in CUDA C++ compiled at run time (`router.cu`): see `routers`.

One launch of a cluster of blocks makes logits and chooses experts. Logits are those of
`cuda_products` to the bit; the same for every number of tokens. A launch may begin while the one
before ends: weights are on their way before it has.

Axes as in `routers`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pw_kernels import nvrtc
from pw_kernels.cuda_routing import Lists, kernel
from pw_kernels.slots import Choice
from pw_kernels.step import Norm, Routing

MOST_TOKENS = 64
CLUSTER = 8  # blocks, the most that every device has room for
PARTS = 16  # of the columns, as many as warps of products.cu
STEP = 32  # columns
MOST_STEPS = 8  # of a part: a lane holds what it multiplies
MOST_ROWS = 128
_NEIGHBOUR_BYTES = 27 << 10  # less than a block of a product or of experts needs
_TALLY_BYTES = 4096  # at most, of MOST_ROWS experts: the counts of lists.cuh, which are static
MOST_LISTED = 4  # tokens whose choice and lists are quicker as one block
_MOST_CHOICES = 512  # experts of choice.cuh
_SCORES = {"softmax": 0, "none": 1}
_DTYPES = (torch.bfloat16, torch.float16)
_LEAST_CAPABILITY = (9, 0)  # clusters


class Arguments(ctypes.Structure):
    """`Arguments` of router.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "x", "weight", "others", "ids", "weights", "expert_scale", "norm", "normed",
        )),
        ("tokens", ctypes.c_int),
        ("x_row", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("epsilon", ctypes.c_float),
    )  # fmt: skip


class Logits(ctypes.Structure):
    """`Arguments` of choice.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "ids", "weights", "expert_scale")),
        ("tokens", ctypes.c_int),
        ("row", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


class Nothing(ctypes.Structure):
    """`Routing` of lists.cuh without lists."""

    _fields_ = (("nothing", ctypes.c_char),)


def fits(x: Tensor, weight: Tensor, first: int, routing: Routing) -> bool:
    """Whether the kernel can take a call."""
    tokens, cols = x.shape
    return (
        x.device.type == "cuda"
        and 0 < tokens <= MOST_TOKENS
        and first + len(routing.weight) <= min(MOST_ROWS, len(weight))
        and first <= STEP
        and weight.dtype == x.dtype
        and x.dtype in _DTYPES
        and cols % STEP == 0
        and cols <= PARTS * MOST_STEPS * STEP
        and weight.is_contiguous()
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        and chooses(routing)
        and torch.cuda.get_device_capability(x.device) >= _LEAST_CAPABILITY
        and _has_room(x, weight, first, routing)
    )


def _has_room(x: Tensor, weight: Tensor, first: int, routing: Routing) -> bool:
    """Whether the device has shared memory for a block."""
    shape = (weight.shape[0], weight.shape[1])
    constants = constants_of(shape, x.dtype, first, len(x), routing, size=1, norm=True)
    room = nvrtc.shared_bytes(nvrtc.index_of(x.device)) - _TALLY_BYTES
    return shared_bytes(constants) <= room


def chooses(routing: Routing) -> bool:
    """Whether the kernel chooses as a router does."""
    return (
        routing.score in _SCORES
        and routing.groups == 1
        and not routing.wide
        and routing.widened
        and routing.top_k <= STEP
        and routing.bias is routing.choice_bias is None
        and _scales(routing)
        and routing.dtype in (torch.float32, routing.weight.dtype)
    )


def _scales(routing: Routing) -> bool:
    """Whether its factors of experts, if any, are as the kernel reads them."""
    scale = routing.expert_scale
    return scale is None or (scale.dtype == routing.weight.dtype and scale.is_contiguous())


def _scale_of(routing: Routing) -> int | None:
    return None if routing.expert_scale is None else routing.expert_scale.data_ptr()


def choice_constants(dtype: torch.dtype, routing: Routing) -> dict[str, int]:
    """Macros of choice.cuh and of what both its users have."""
    return {
        "FLOAT16": int(dtype == torch.float16), "EXPERTS": len(routing.weight),
        "TOP_K": routing.top_k, "SCORE": _SCORES[routing.score],
        "NORMALIZE": int(routing.normalize), "ROUNDED": int(routing.dtype == dtype),
        "SCALED": int(routing.expert_scale is not None),
    }  # fmt: skip


def logits_constants(
    dtype: torch.dtype, tokens: int, routing: Routing, size: int
) -> dict[str, int]:
    """Macros of choice.cu; `size`: slots of a group, 0: no lists."""
    threads = 32 * max(tokens, -(-len(routing.weight) // 32)) if size else 32
    constants = {"LISTS": int(size > 0), "TOKENS": size, "THREADS": threads}
    return choice_constants(dtype, routing) | constants


def constants_of(
    shape: tuple[int, int],
    dtype: torch.dtype,
    first: int,
    tokens: int,
    routing: Routing,
    size: int,
    norm: bool = False,
) -> dict[str, int]:
    """Macros of router.cu; `size`: slots of a group, 0: no lists."""
    tiles = -(-tokens // CLUSTER)
    listing = -(-len(routing.weight) // STEP) if size else 0  # warps, a thread for each expert
    return choice_constants(dtype, routing) | {
        "N": shape[0], "K": shape[1], "CLUSTER": CLUSTER, "TILES": tiles,
        "THREADS": 32 * max(PARTS // CLUSTER * tiles, listing), "FIRST": first,
        "LISTS": int(size > 0), "TOKENS": size, "NORM": int(norm),
    }  # fmt: skip


def shared_bytes(constants: dict[str, int]) -> int:
    """Dynamic shared memory of a block: its part of the weights, sums of all parts."""
    steps = -(-constants["K"] // (STEP * PARTS))
    row_tiles = -(-(constants["FIRST"] + constants["EXPERTS"]) // 16)
    weights = PARTS // CLUSTER * steps * row_tiles * 1024
    sums = PARTS * constants["TILES"] * (16 * row_tiles + 4) * 4
    tokens = 8 * constants["TILES"]
    chosen = 12 * tokens * constants["TOP_K"] * constants["LISTS"]
    return weights + sums + chosen + PARTS * tokens * 4 * constants["NORM"]


def takes(logits: Tensor, routing: Routing) -> bool:
    """Whether `choose` can take a call."""
    return (
        logits.device.type == "cuda"
        and 0 < len(logits) <= MOST_TOKENS
        and logits.dtype in _DTYPES
        and logits.dtype == routing.weight.dtype
        and logits.stride(1) == 1
        and len(routing.weight) <= _MOST_CHOICES
        and chooses(routing)
        and torch.cuda.get_device_capability(logits.device) >= (8, 0)
    )


def choose(logits: Tensor, routing: Routing) -> Choice:
    """See `routers.choose`."""
    ids, weights = _room(logits, routing)

    def launch(lists: Lists | None, size: int) -> None:
        arguments = Logits(
            logits.data_ptr(), ids.data_ptr(), weights.data_ptr(), _scale_of(routing),
            len(logits), logits.stride(0), routing.scale,
        )  # fmt: skip
        constants = logits_constants(logits.dtype, len(logits), routing, size)
        kernel("choice.cu", "choose", constants, logits.device).launch(
            (1 if size else len(logits),), constants["THREADS"], 0, arguments,
            Nothing() if lists is None else lists, overlap=True,
        )  # fmt: skip

    return Choice(ids, weights, len(routing.weight), launch)


def _room(like: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """For ids and weights [T, k]."""
    ids = torch.empty(len(like), routing.top_k, dtype=torch.int64, device=like.device)
    weights = torch.empty(ids.shape, dtype=torch.float32, device=like.device)
    if nvrtc.rehearsing():  # nobody writes them, but other kernels do run and read them
        ids.zero_()
        weights.zero_()
    return ids, weights


def choice(
    x: Tensor,
    weight: Tensor,
    first: int,
    routing: Routing,
    norm: Norm | None = None,
    beside: bool = False,
) -> tuple[Choice, Tensor, Tensor]:
    """See `routers.choice`; `beside` other launches its blocks have no neighbours."""
    others = x.new_empty(len(x), first)
    normed = x if norm is None else x.new_empty(x.shape)
    gain = None if norm is None else norm.weight.data_ptr()
    ids, weights = _room(x, routing)
    shape = (weight.shape[0], weight.shape[1])
    alone = nvrtc.shared_bytes(nvrtc.index_of(x.device)) - _NEIGHBOUR_BYTES

    def launch(lists: Lists | None, size: int) -> None:
        arguments = Arguments(
            x.data_ptr(), weight.data_ptr(), others.data_ptr() if first else None, ids.data_ptr(),
            weights.data_ptr(), _scale_of(routing), gain, normed.data_ptr(), len(x), x.stride(0),
            routing.scale, 0.0 if norm is None else norm.epsilon,
        )  # fmt: skip
        constants = constants_of(
            shape, x.dtype, first, len(x), routing, size, norm=norm is not None
        )
        shared = max(shared_bytes(constants), alone if beside else 0)
        kernel("router.cu", "router", constants, x.device).launch(
            (CLUSTER,), constants["THREADS"], shared, arguments,
            Nothing() if lists is None else lists, overlap=True,
        )  # fmt: skip

    return Choice(ids, weights, len(routing.weight), launch), others, normed
