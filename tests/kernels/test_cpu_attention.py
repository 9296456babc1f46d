"""The numba attention against its torch meaning: heads, windows, chunks, page sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import reference

cpu_attention = pytest.importorskip("pw_kernels.cpu_attention")


class Cache:
    """Sequences in scattered pages of an arena whose other bytes are garbage."""

    def __init__(
        self,
        lengths: list[int],
        queries: list[int],
        heads: int = 4,
        kv_heads: int = 2,
        key_size: int = 32,
        value_size: int = 32,
        page_tokens: int = 8,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        blocks = max(1, max(-(-length // page_tokens) for length in lengths))
        pages = len(lengths) * blocks + 3
        key_floats = page_tokens * kv_heads * key_size
        arena = torch.randn(pages, key_floats + page_tokens * kv_heads * value_size + 16).to(dtype)
        self.k_pages = arena[:, :key_floats].view(pages, page_tokens, kv_heads, key_size)
        self.v_pages = arena[:, key_floats:-16].view(pages, page_tokens, kv_heads, value_size)
        self.block_tables = torch.randperm(pages)[: len(lengths) * blocks].int().view(-1, blocks)
        self.query_start = torch.tensor([0, *queries]).cumsum(0).int()
        self.seq_lens = torch.tensor(lengths).int()
        self.q = torch.randn(sum(queries), heads, key_size)

    def attend(self, module: Any, **kwargs: Any) -> Tensor:
        return module.paged_attention(  # type: ignore[no-any-return]
            self.q,
            self.k_pages,
            self.v_pages,
            self.block_tables,
            self.query_start,
            self.seq_lens,
            scale=0.3,
            **kwargs,
        )

    def check(self, **kwargs: Any) -> None:
        got, want = self.attend(cpu_attention, **kwargs), self.attend(reference, **kwargs)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_tokens", [1, 3, 8, 16])
def test_decode_and_chunks_in_one_batch(page_tokens: int, dtype: torch.dtype) -> None:
    Cache([17, 1, 40, 9], [1, 1, 13, 9], page_tokens=page_tokens, dtype=dtype).check()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_size", "value_size"),
    [(4, 4, 64, 64), (8, 1, 80, 80), (6, 2, 16, 112), (2, 2, 192, 128)],
)
def test_heads(heads: int, kv_heads: int, key_size: int, value_size: int) -> None:
    Cache([33, 20], [2, 1], heads, kv_heads, key_size, value_size).check()


@pytest.mark.parametrize("window", [1, 5, 8, 1000])
def test_window(window: int) -> None:
    Cache([33, 7], [10, 7]).check(window=window)


def test_pages_left_of_a_window_are_not_read() -> None:
    cache = Cache([40], [2])
    want = cache.attend(cpu_attention, window=9)
    cache.block_tables[0, : (38 - 9 + 1) // 8] = -1
    for module in (cpu_attention, reference):
        torch.testing.assert_close(cache.attend(module, window=9), want)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_softcap_and_sinks(softcap: float | None) -> None:
    Cache([21, 16], [3, 1]).check(softcap=softcap, sinks=torch.randn(4))


def test_large_scores_do_not_overflow() -> None:
    cache = Cache([30], [4])
    cache.q *= 300
    cache.check()


def test_a_query_gives_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache([50, 30], [20, 1])
    whole = cache.attend(cpu_attention)
    monkeypatch.setattr(cpu_attention.threads, "WORTH_NANOSECONDS", 0)
    assert torch.equal(cache.attend(cpu_attention), whole)
    alone = cpu_attention.paged_attention(
        cache.q[7:8],
        cache.k_pages,
        cache.v_pages,
        cache.block_tables[:1],
        torch.tensor([0, 1]).int(),
        torch.tensor([50 - 20 + 8]).int(),
        scale=0.3,
    )
    assert torch.equal(alone[0], whole[7])


def test_sequences_without_queries_and_no_queries_at_all() -> None:
    Cache([9, 12, 5], [1, 0, 2]).check()
    assert Cache([0], [0]).attend(cpu_attention).shape == (0, 4, 32)


@pytest.mark.parametrize("module", [cpu_attention, reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_touches_its_slots_alone(module: Any, dtype: torch.dtype) -> None:
    cache = Cache([30], [1], dtype=dtype, value_size=48)
    k, v = torch.randn(3, 2, 32), torch.randn(3, 2, 48)
    want_k, want_v = cache.k_pages.clone(), cache.v_pages.clone()
    for token, (page, offset) in {0: (2, 5), 2: (0, 7)}.items():
        want_k[page, offset] = k[token].to(dtype)
        want_v[page, offset] = v[token].to(dtype)
    module.write_kv(k, v, cache.k_pages, cache.v_pages, torch.tensor([2 * 8 + 5, -1, 7]))
    assert torch.equal(cache.k_pages, want_k)
    assert torch.equal(cache.v_pages, want_v)


def test_reference_is_softmax_attention() -> None:
    """The reference itself, against torch's own attention on contiguous keys."""
    cache = Cache([24], [24], page_tokens=8)
    keys = cache.k_pages[cache.block_tables[0].long()].flatten(0, 1).transpose(0, 1)
    values = cache.v_pages[cache.block_tables[0].long()].flatten(0, 1).transpose(0, 1)
    want = torch.nn.functional.scaled_dot_product_attention(
        cache.q.transpose(0, 1), keys, values, is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(cache.attend(reference), want.transpose(0, 1))
