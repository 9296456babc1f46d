"""What attention allocates beside its result stays within what it says that it needs."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pw_kernels import dispatch

PAGE_TOKENS = 8


def peak_bytes(heads: int, size: int, tokens: int, context: int, backend: str) -> int:
    """Most bytes alive at once while a prompt's last chunk attends to a context, without result."""
    kv_heads = heads // 2
    blocks = -(-context // PAGE_TOKENS)
    pages = torch.randn(blocks, 2, PAGE_TOKENS, kv_heads, size)
    arguments = (
        torch.randn(tokens, heads, size),
        pages[:, 0],
        pages[:, 1],
        torch.arange(blocks, dtype=torch.int32)[None],
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
    )
    run = lambda: dispatch.paged_attention(*arguments, scale=0.1, backend=backend)  # noqa: E731
    with profile(activities=[ProfilerActivity.CPU]):  # what it imports is no scratch
        result = run().nbytes  # compiled by now
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    elsewhere = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    results = profiler.profiler.kineto_results.events()
    live = peak = 0
    for _, size_ in sorted((e.start_ns(), e.nbytes()) for e in results if e.name() == "[memory]"):
        live += size_
        peak = max(peak, live)
    return peak + elsewhere - result


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize(("tokens", "context"), [(1, 700), (64, 700), (64, 64), (200, 1500)])
def test_measured_scratch_is_within_the_stated(backend: str, tokens: int, context: int) -> None:
    if backend not in dispatch.available_backends():
        pytest.skip("numba is not installed")
    heads, size = 4, 16
    stated = dispatch.attention_scratch_bytes(
        torch.device("cpu"), torch.float32, heads=heads, kv_heads=2, key_size=size,
        value_size=size, tokens=tokens, context=context, backend=backend,
    )  # fmt: skip
    measured = peak_bytes(heads, size, tokens, context, backend)
    bookkeeping = 1 << 14  # indices, starts and lengths, Python's own objects
    assert measured <= stated + bookkeeping
    assert stated <= 4 * max(measured, bookkeeping)


def test_parts_of_a_split_context_are_counted_up_to_their_limit() -> None:
    attention = pytest.importorskip("pw_kernels.triton_attention")

    def stated(tokens: int, context: int) -> int:
        return dispatch.attention_scratch_bytes(
            torch.device("cpu"), torch.bfloat16, heads=16, kv_heads=16, key_size=128,
            value_size=128, tokens=tokens, context=context, backend="triton",
        )  # fmt: skip

    # [T, Hq, parts, Dv + 2] fp32, as the kernel's wrapper allocates it
    assert stated(4, 8192) == 4 * 16 * 17 * 130 * 4
    assert stated(512, 32768) == attention.WORKSPACE_BYTES
