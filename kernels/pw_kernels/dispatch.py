"""One door to every kernel: picks the fastest implementation that can take the arguments.

`reference` runs everywhere, `numba` on CPU tensors if numba is installed, `triton` on CUDA tensors,
and `cuda` on NVIDIA GPUs, compiled at run time without a toolkit.
Backends are imported when first used, so importing this module costs torch alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from pw_kernels import dense, reference
from pw_kernels.pages import WeightPages
from pw_kernels.reference import Activation, Observer
from pw_kernels.slots import Choice, SlotResults, chosen

BACKENDS = ("auto", "reference", "numba", "triton", "cuda")

_VECTOR = 16  # head sizes that the numba attention takes are multiples of this
_KV_DTYPES = (torch.float32, torch.bfloat16)
_WIDEST_HEAD = 512  # that the Triton attention takes
_MOE = {"numba": "cpu_moe", "triton": "triton_moe", "cuda": "cuda_moe"}
_COUNTING = ("numba", "cuda")  # add up routing statistics themselves
_ATTENTION = {"numba": "cpu_attention", "triton": "triton_attention", "cuda": "cuda_attention"}
_WRITE_KV = {"numba": "cpu_attention", "triton": "triton_step"}


def available_backends() -> tuple[str, ...]:
    """Backends that can run on this machine, slowest first."""
    found = ["reference"]
    if _module("cpu_moe") is not None:
        found.append("numba")
    if torch.cuda.is_available():
        found += [name for name in ("triton", "cuda") if _module(f"{name}_moe") is not None]
    return tuple(found)


def fused_moe(
    x: Tensor,
    topk_ids: Tensor | Choice,
    topk_weights: Tensor | None,
    arena: Tensor,
    gate_up: WeightPages,
    down: WeightPages,
    *,
    lut_dtype: torch.dtype,
    activation: Activation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    observer: Observer | None = None,
    statistics: Tensor | None = None,
    live: Tensor | None = None,
    backend: str = "auto",
    summed: bool = True,
) -> Tensor:
    """Run the routed experts of one layer: [T, N]; arguments as in `reference.fused_moe`.

    A callable activation and experts without a gate are the reference's alone; the GPU kernels
    take no observer. To `statistics`, [2, E] fp32, the router weights that each expert received
    and their squares are added: on CUDA in the pass that groups the tokens, without a wait.
    Rows of x from live[0] on ([1] int32, on the device) are padding: no expert reads them, they are
    not counted and their result is zero. Not `summed`: as `fused_moe_slots`. Experts may be a
    `Choice`, without weights: the launch that lists the tokens of each makes it, or the call does.

    Raises:
        ValueError: The named backend cannot take these arguments, or is not installed.
    """
    plain = _plain(gate_up, down, lut_dtype, activation)
    fits_triton = plain and observer is None
    name = _choose(
        backend,
        x.device,
        "moe",
        fits_numba=plain,
        fits_triton=fits_triton,
        fits_cuda=fits_triton and _fits_cuda(x, arena, gate_up, down, lut_dtype),
    )
    module = _module(_MOE[name]) if name in _MOE else reference
    assert module is not None  # _choose has imported it
    extra: dict[str, Any] = {} if observer is None else {"observer": observer}
    if name in _COUNTING:
        extra["statistics"] = statistics
    if name == "cuda":
        extra |= {"live": live, "summed": summed}
    else:
        ids, topk_weights = chosen(topk_ids, topk_weights)
        if live is not None:
            ids = reference.only_live(ids, live)
        if name not in _COUNTING and statistics is not None:
            reference.count_routing(statistics, ids, topk_weights)
        topk_ids = ids
    return module.fused_moe(  # type: ignore[no-any-return]
        x,
        topk_ids,
        topk_weights,
        arena,
        gate_up,
        down,
        lut_dtype=lut_dtype,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        **extra,
    )


def fused_moe_slots(*args: Any, **options: Any) -> Tensor | SlotResults:
    """As `fused_moe`, where it can be without the sum over the experts of a token."""
    return fused_moe(*args, **options, summed=False)


def dense_moe(
    x: Tensor,
    topk_ids: Tensor | Choice,
    topk_weights: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: Activation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """Run the unquantized experts of one layer; arguments as in `dense.dense_moe`.

    Rows of x from live[0] on ([1] int32, on the device) are padding: their result means nothing.
    """
    fast = _module("cuda_dense") if x.device.type == "cuda" else None
    if fast is not None and fast.fits(x, gate_up, down, activation):
        return fast.dense_moe(  # type: ignore[no-any-return]
            x, topk_ids, topk_weights, gate_up, down, activation=activation,
            gate_up_bias=gate_up_bias, down_bias=down_bias, live=live,
        )  # fmt: skip
    topk_ids, topk_weights = chosen(topk_ids, topk_weights)
    return dense.dense_moe(
        x, topk_ids, topk_weights, gate_up, down, activation=activation,
        gate_up_bias=gate_up_bias, down_bias=down_bias,
    )  # fmt: skip


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
    backend: str = "auto",
) -> Tensor:
    """Causal attention over paged keys and values; arguments as in `reference.paged_attention`.

    Lengths, starts and tables may be read before the launch ahead of this one has ended: between
    what writes them and this call there is a launch that waits for all before it to end, as torch's
    do (not `overlap` of `nvrtc.Kernel.launch`), or the start of a graph. Queries, keys and values
    may be written by the launch just ahead.

    `counters` are from `attention_counters`, of a caller whose calls follow each other on the
    device; without them a decode step costs one more launch for each layer.

    Raises:
        ValueError: The named backend cannot take these arguments, or is not installed.
    """
    pages = (k_pages, v_pages)
    fits_triton = all(
        page.stride(-1) == 1 and page.shape[-1] <= _WIDEST_HEAD and page.is_floating_point()
        for page in pages
    )
    cuda = _module("cuda_attention") if q.device.type == "cuda" else None
    name = _choose(
        backend,
        q.device,
        "attention",
        fits_numba=all(map(_fits_numba, pages)),
        fits_triton=fits_triton,
        fits_cuda=cuda is not None and cuda.fits(q, k_pages, v_pages, block_tables),
    )
    module = _module(_ATTENTION[name]) if name in _ATTENTION else reference
    assert module is not None  # _choose has imported it
    attend = module.paged_attention
    if name == "cuda":
        attend = partial(attend, counters=counters)
    return attend(  # type: ignore[no-any-return]
        q,
        k_pages,
        v_pages,
        block_tables,
        query_start,
        seq_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def attention_counters(device: torch.device) -> Tensor | None:
    """What a caller of `paged_attention` keeps for all its calls; None where they need nothing."""
    cuda = _module("cuda_attention") if device.type == "cuda" else None
    return None if cuda is None else cuda.make_counters(device)


def attention_counters_bytes(device: torch.device) -> int:
    """Bytes of `attention_counters`."""
    cuda = _module("cuda_attention") if device.type == "cuda" else None
    return 0 if cuda is None else 4 * int(cuda.MOST_COUNTERS)


def attention_scratch_bytes(
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    key_size: int,
    value_size: int,
    tokens: int,
    context: int,
    backend: str = "auto",
) -> int:
    """Bytes that `paged_attention` takes at most beside its arguments and its result.

    Args:
        device: Of the tensors.
        dtype: Of keys and values.
        heads: Hq.
        kv_heads: Hkv.
        key_size: Dk.
        value_size: Dv.
        tokens: T at most.
        context: Tokens of the longest sequence.
        backend: As for `paged_attention`.
    """
    sizes = (key_size, value_size)
    fits_numba = dtype in _KV_DTYPES and all(size % _VECTOR == 0 for size in sizes)
    fits_triton = max(sizes) <= _WIDEST_HEAD and dtype.is_floating_point
    name = _choose(backend, device, "attention", fits_numba=fits_numba, fits_triton=fits_triton)
    if name == "numba":  # scores of one query on each thread
        return 4 * heads * (context + 2 * _VECTOR) * torch.get_num_threads()
    if name == "triton":  # parts of every query, as far as they are taken at all
        module = _module("triton_attention")
        cuda = _module("cuda_attention") if device.type == "cuda" else None
        assert module is not None
        parts: int = -(-context // module.SPLIT_KEYS) + 1  # block tables end with a page
        limit: int = module.WORKSPACE_BYTES
        stated = min(limit, 4 * tokens * heads * parts * (value_size + 2))
        if cuda is not None:  # decode steps, of as many sequences
            room = context + module.SPLIT_KEYS
            decode = cuda.most_workspace_bytes(tokens, heads, kv_heads, value_size, room)
            stated = max(stated, min(limit, decode))
        return stated
    # Keys and values in fp32, once as stored and once for every head; four copies of the scores.
    gathered = (2 * kv_heads + heads) * (key_size + value_size)
    return 4 * context * (gathered + 4 * heads * tokens)


def write_kv(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, *, backend: str = "auto"
) -> None:
    """Store keys and values of new tokens in place; arguments as in `reference.write_kv`.

    Raises:
        ValueError: The named backend cannot take these arguments, or is not installed.
    """
    fits_numba = k_pages.dtype in _KV_DTYPES and v_pages.dtype in _KV_DTYPES
    fits_triton = k_pages.stride(-1) == v_pages.stride(-1) == 1
    name = _choose(backend, k.device, "attention", fits_numba=fits_numba, fits_triton=fits_triton)
    module = _module(_WRITE_KV[name]) if name in _WRITE_KV else reference
    assert module is not None  # _choose has imported it
    module.write_kv(k, v, k_pages, v_pages, slots)


def compiles(
    x: Tensor,
    topk_ids: Tensor,
    arena: Tensor,
    gate_up: WeightPages,
    down: WeightPages,
    *,
    lut_dtype: torch.dtype,
    activation: Activation,
) -> bool:
    """Whether `fused_moe` launches for these only what is compiled at run time."""
    plain = _plain(gate_up, down, lut_dtype, activation)
    if not (plain and _fits_cuda(x, arena, gate_up, down, lut_dtype)):
        return False
    cuda_moe, slots, experts = _module("cuda_moe"), topk_ids.numel(), gate_up.spread
    assert cuda_moe is not None  # it says that it fits
    few = slots < cuda_moe.PROMPT_SLOTS * experts
    return few or cuda_moe.cuda_prompts.wins(slots, experts, x.device)  # type: ignore[no-any-return]


class Rehearsed(Protocol):
    """What a rehearsal has found."""

    compiled: int  # kernels that were not in the user's cache
    folder: Path  # ... where they are now


def rehearsal(device: torch.device) -> AbstractContextManager[Rehearsed | None]:
    """Have the CUDA kernels compiled, by several threads, that are launched in this context; they
    do not run there. None, and nothing is held back, where none is compiled at run time.
    """
    module = _module("nvrtc") if device.type == "cuda" else None
    return nullcontext() if module is None else module.Rehearsal()


def rehearsing(device: torch.device) -> bool:
    """Whether kernels launched now may not run, so that tensors hold whatever memory held."""
    module = _module("nvrtc") if device.type == "cuda" else None
    return module is not None and bool(module.rehearsing())


def _plain(
    gate_up: WeightPages, down: WeightPages, lut_dtype: torch.dtype, activation: Activation
) -> bool:
    """Whether experts are such as all fast kernels take."""
    return (
        isinstance(activation, str)
        and activation in reference.ACTIVATIONS
        and gate_up.rows == 2 * down.cols
        and lut_dtype in (torch.bfloat16, torch.float16)
    )


def _fits_cuda(
    x: Tensor, arena: Tensor, gate_up: WeightPages, down: WeightPages, lut_dtype: torch.dtype
) -> bool:
    module = _module("cuda_moe") if x.device.type == "cuda" else None
    return module is not None and bool(module.fits(x, arena, gate_up, down, lut_dtype))


def _fits_numba(pages: Tensor) -> bool:
    return pages.dtype in _KV_DTYPES and pages.shape[-1] % _VECTOR == 0 and pages.stride(-1) == 1


def _choose(
    backend: str,
    device: torch.device,
    what: str,
    *,
    fits_numba: bool,
    fits_triton: bool,
    fits_cuda: bool = False,
) -> str:
    """Resolve a backend name for tensors on `device`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    on_cpu = device.type == "cpu"
    numba = fits_numba and on_cpu and _module(f"cpu_{what}") is not None
    triton = fits_triton and (device.type == "cuda" or backend == "triton")
    triton = triton and _module(f"triton_{what}") is not None
    able = {"cuda": fits_cuda, "triton": triton, "numba": numba, "reference": True}  # fastest first
    if backend == "auto":
        return next(name for name, fits in able.items() if fits)
    if able[backend]:
        return backend
    raise ValueError(f"backend {backend!r} cannot run this {what} call on {device.type} tensors")


@cache
def _module(name: str) -> ModuleType | None:
    """A module of kernels, or None where the compiler that it needs is not installed."""
    try:
        return import_module(f"pw_kernels.{name}")
    except ImportError:
        return None
