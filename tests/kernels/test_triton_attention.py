"""The Triton attention: logic by the interpreter, code by real compilation, both on a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import dispatch, reference

attention = pytest.importorskip("pw_kernels.triton_attention")
triton_step = pytest.importorskip("pw_kernels.triton_step")

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


class Cache:
    """Sequences in scattered pages; bytes that no kernel may use are NaN."""

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
        q_dtype: torch.dtype = torch.float32,
        spare_queries: int = 0,
    ) -> None:
        blocks = max(1, max(-(-length // page_tokens) for length in lengths))
        pages = len(lengths) * blocks + 3
        key_floats = page_tokens * kv_heads * key_size
        width = key_floats + page_tokens * kv_heads * value_size + 16
        arena = torch.full((pages, width), float("nan"), dtype=dtype)
        k_pages = arena[:, :key_floats].view(pages, page_tokens, kv_heads, key_size)
        v_pages = arena[:, key_floats:-16].view(pages, page_tokens, kv_heads, value_size)
        tables = torch.randperm(pages)[: len(lengths) * blocks].int().view(-1, blocks)
        for b, length in enumerate(lengths):
            for t in range(length):
                at = int(tables[b, t // page_tokens]), t % page_tokens
                k_pages[at], v_pages[at] = torch.randn(kv_heads, key_size), torch.randn(
                    kv_heads, value_size
                )  # fmt: skip
        arena = arena.to(DEVICE)
        self.k_pages = arena[:, :key_floats].view(pages, page_tokens, kv_heads, key_size)
        self.v_pages = arena[:, key_floats:-16].view(pages, page_tokens, kv_heads, value_size)
        self.block_tables = tables.to(DEVICE)
        self.query_start = torch.tensor([0, *queries]).cumsum(0).int().to(DEVICE)
        self.seq_lens = torch.tensor(lengths).int().to(DEVICE)
        rows = sum(queries) + spare_queries
        self.q = torch.randn(rows, heads, key_size, dtype=q_dtype).to(DEVICE)

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

    def check(self, tolerance: float = 2e-6, **kwargs: Any) -> None:
        got, want = self.attend(attention, **kwargs), self.attend(reference, **kwargs)
        assert got.dtype == want.dtype
        assert want.float().norm() > 0
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error <= tolerance
        assert torch.equal(self.attend(attention, **kwargs), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_tokens", [2, 3, 16])
def test_decode_and_chunks_in_one_batch(page_tokens: int, dtype: torch.dtype) -> None:
    Cache([17, 1, 40, 9], [1, 1, 13, 9], page_tokens=page_tokens, dtype=dtype).check()


def test_half_precision_products() -> None:
    half = torch.float16
    Cache([70, 20], [30, 1], dtype=half, q_dtype=half).check(tolerance=2e-3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_size", "value_size"),
    [(4, 4, 64, 64), (8, 1, 80, 80), (6, 2, 16, 112), (2, 2, 192, 128), (2, 1, 512, 512)],
)
def test_heads(heads: int, kv_heads: int, key_size: int, value_size: int) -> None:
    Cache([33, 20], [2, 1], heads, kv_heads, key_size, value_size).check()


@pytest.mark.parametrize("window", [1, 5, 70, 1000])
def test_window(window: int) -> None:
    Cache([133, 7], [10, 7]).check(window=window)


@pytest.mark.parametrize("window", [None, 30, 200])
def test_keys_that_every_query_of_a_tile_sees(window: int | None) -> None:
    Cache([500, 130], [40, 1]).check(window=window, sinks=torch.randn(4, device=DEVICE))


def test_pages_left_of_a_window_are_not_read() -> None:
    cache = Cache([40], [2])
    want = cache.attend(attention, window=9)
    cache.block_tables[0, : (38 - 9 + 1) // 8] = 1 << 30
    assert torch.equal(cache.attend(attention, window=9), want)


@pytest.mark.parametrize("enough", [0, 256])  # tiles at which prompts are not split
@pytest.mark.parametrize("window", [None, 50])
def test_no_entry_that_means_nothing_is_followed(
    window: int | None, enough: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a table's row: entries after the last token, left of a window, of no queries."""
    monkeypatch.setattr(attention, "ENOUGH_PROGRAMS", enough)
    lengths, queries = [530, 20, 70, 64, 9], [40, 1, 70, 0, 2]
    cache = Cache(lengths, queries, spare_queries=1)
    want = cache.attend(attention, window=window)
    for row, length, count in zip(cache.block_tables, lengths, queries, strict=True):
        row[-(-length // 8) if count else 0 :] = 1 << 30
        if window is not None:
            row[: max(0, length - count - window + 1) // 8] = -1
    assert torch.equal(cache.attend(attention, window=window), want)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_softcap_and_sinks(softcap: float | None) -> None:
    sinks = torch.randn(4, device=DEVICE)
    Cache([21, 16], [3, 1]).check(softcap=softcap, sinks=sinks)
    Cache([1030], [1]).check(softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("window", [None, 3, 520])
def test_keys_in_parts(window: int | None) -> None:
    Cache([1200, 5, 513, 512], [1, 1, 1, 1]).check(window=window)
    Cache([1030, 3], [20, 1]).check(window=window)


def test_parts_do_not_depend_on_the_batch() -> None:
    cache = Cache([700, 1030], [1, 1])
    both = cache.attend(attention)
    cache.q, cache.block_tables = cache.q[1:], cache.block_tables[1:]
    cache.query_start, cache.seq_lens = cache.query_start[:2], cache.seq_lens[1:]
    assert torch.equal(cache.attend(attention)[0], both[1])


@pytest.mark.parametrize("window", [None, 520])
def test_parts_do_not_depend_on_who_takes_them(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache([1200, 700], [1, 1])
    spread = cache.attend(attention, window=window)
    monkeypatch.setattr(attention, "PROGRAMS", 1)  # one takes all parts of a sequence in turn
    assert torch.equal(cache.attend(attention, window=window), spread)


def test_one_program_walks_all_keys_where_parts_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", 0)
    Cache([1030, 3], [20, 1]).check(sinks=torch.randn(4, device=DEVICE))


def test_prompts_whose_tiles_fill_a_device_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache([1030], [20])
    with monkeypatch.context() as no_room:
        no_room.setattr(attention, "WORKSPACE_BYTES", 0)
        whole = cache.attend(attention)
    monkeypatch.setattr(attention, "ENOUGH_PROGRAMS", 0)
    assert torch.equal(cache.attend(attention), whole)


def test_large_scores_do_not_overflow() -> None:
    cache = Cache([30], [4])
    cache.q *= 300
    cache.check(tolerance=1e-5)


@pytest.mark.parametrize("length", [9, 600])
def test_sequences_without_queries_and_queries_without_sequences(length: int) -> None:
    cache = Cache([length, 12, 5], [1, 0, 2], spare_queries=2)
    cache.check()
    assert not cache.attend(attention)[3:].any()
    cache = Cache([length, 12, 5], [1, 0, 1], spare_queries=1)  # as a decode step is padded
    cache.check()
    assert not cache.attend(attention)[2:].any()
    assert Cache([0], [0]).attend(attention).shape == (0, 4, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_touches_its_slots_alone(dtype: torch.dtype) -> None:
    cache = Cache([30], [1], dtype=dtype, value_size=48)
    cache.k_pages.copy_(torch.randn_like(cache.k_pages))
    cache.v_pages.copy_(torch.randn_like(cache.v_pages))
    # inputs as the model cuts them from one projection: dense in the last dimension alone
    k = torch.randn(3, 2, 40, device=DEVICE).to(dtype)[..., :32]
    v = torch.randn(3, 2, 50, device=DEVICE).to(dtype)[..., :48]
    want_k, want_v = cache.k_pages.clone(), cache.v_pages.clone()
    # a column of a table: not dense
    slots = torch.tensor([[2 * 8 + 5, 0], [-1, 0], [7, 0]], device=DEVICE)[:, 0]
    reference.write_kv(k, v, want_k, want_v, slots)
    triton_step.write_kv(k, v, cache.k_pages, cache.v_pages, slots)
    assert torch.equal(cache.k_pages, want_k)
    assert torch.equal(cache.v_pages, want_v)


def test_tiles_of_prompts_have_room_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = pytest.importorskip("pw_kernels.triton_tiles")
    for kilobytes, size, number_bytes, want in (
        (227, 128, 2, (128, 64)), (227, 128, 4, (64, 64)), (99, 128, 2, (64, 64)),
        (227, 256, 2, (128, 32)), (227, 256, 4, (64, 32)), (227, 512, 2, (64, 32)),
        (160, 512, 2, (32, 16)), (163, 256, 4, (32, 32)), (99, 256, 4, (32, 16)),
        (163, 512, 4, (16, 16)), (1, 80, 2, (64, 64)),
    ):  # fmt: skip
        monkeypatch.setattr(tiles, "_shared_bytes", lambda _, room=kilobytes << 10: room)
        shape = tiles.tile_shape(300, 2, 4, size, number_bytes, torch.device("cpu"))
        assert (shape["ROWS"], shape["KEYS"]) == want
        assert shape["QUERIES"] == want[0] // 4
        assert tiles.tile_shape(2, 2, 4, size, number_bytes, torch.device("cpu"))["ROWS"] == 16


def test_through_the_door() -> None:
    cache = Cache([20, 3], [1, 2])
    got = dispatch.paged_attention(
        cache.q,
        cache.k_pages,
        cache.v_pages,
        cache.block_tables,
        cache.query_start,
        cache.seq_lens,
        scale=0.3,
        backend="triton",
    )
    assert torch.equal(got, cache.attend(attention))


gpu = pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(16, 16, 128, 128), (32, 4, 128, 128), (8, 2, 512, 512)])
def test_half_precision_on_a_gpu(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    cache = Cache([3000, 17, 700], [1, 1, 1], *heads, page_tokens=4, dtype=dtype, q_dtype=dtype)
    cache.check(tolerance=1e-2)
    cache.check(tolerance=1e-2, window=600)
    cache = Cache([800, 1, 300], [500, 1, 100], *heads, page_tokens=4, dtype=dtype, q_dtype=dtype)
    cache.check(tolerance=1e-2, sinks=torch.randn(heads[0], device=DEVICE))


@pytest.mark.gpu
@gpu
def test_a_captured_graph_follows_its_inputs() -> None:
    cache = Cache([600, 30], [1, 1], dtype=torch.bfloat16, q_dtype=torch.bfloat16)
    cache.attend(attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cache.attend(attention)
    cache.seq_lens.copy_(torch.tensor([5, 29]))
    graph.replay()
    want = cache.attend(reference).float()
    assert (got.float() - want).norm() <= 1e-2 * want.norm()


COMPILE = """
import itertools, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pw_kernels import triton_attention, triton_step

types = dict(q="*bf16", k_pages="*bf16", v_pages="*bf16", source="*bf16", pages="*bf16",
             block_tables="*i32", query_start="*i32", seq_lens="*i32", sinks="*fp32",
             slots="*i64", extremes="*fp32", partial="*fp32", scale="fp32", softcap="fp32")
base = dict(PADDED_SEQUENCES=16, HEADS=16, GROUP=8, TOKENS=4, KEY_SIZE=128,
            VALUE_SIZE=128, KEY_BLOCK=128, VALUE_BLOCK=128, PADDED_GROUP=8, ROWS=64, QUERIES=8,
            KEYS=64, SPLIT=512, HAS_WINDOW=True, HAS_SOFTCAP=True, HAS_SINKS=True, FP32=False,
            OVERLAP=True, MERGED=16, SIZE=128, BLOCK=1024)
wide = base | dict(KEY_SIZE=512, VALUE_SIZE=512, KEY_BLOCK=512, VALUE_BLOCK=512, ROWS=32,
                   QUERIES=4, KEYS=32, SPLIT=0)
for capability, name, sizes in (
    (80, "attention_kernel", base), (90, "attention_kernel", wide),
    (100, "attention_kernel", base),
    (90, "merge_kernel", base), (90, "write_kv_kernel", base),
):
    kernel = getattr(triton_attention, name, None) or getattr(triton_step, name)
    split = sizes["SPLIT"] and name == "attention_kernel"
    signature_types = types | dict(out="*fp32" if split else "*bf16")
    constants = {k: v for k, v in sizes.items() if k in kernel.arg_names}
    signature = {k: "constexpr" if k in constants else signature_types.get(k, "i32")
                 for k in kernel.arg_names}
    target = GPUTarget("cuda", capability, 32)
    options = dict(num_warps=8 if sizes is wide else 4, num_stages=2)
    built = triton.compile(ASTSource(kernel, signature, constants), target=target, options=options)
    assert len(built.asm["cubin"]) > 1000
    assert built.metadata.shared <= 164 * 1024, built.metadata.shared  # of compute capability 8.0
"""


# What an A100 takes for prompts: shared memory as the compiler counts it, beside the estimate.
COMPILE_TILES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pw_kernels import triton_attention, triton_tiles

room, kernel = 163 << 10, triton_attention.attention_kernel
triton_tiles._shared_bytes = lambda _: room
for size, number in ((256, 2), (512, 2), (256, 4)):  # all estimated at nearly all there is
    shape = triton_tiles.tile_shape(300, 2, 4, size, number, torch.device("cpu"))
    warps, stages = [shape.pop(name) for name in ("num_warps", "num_stages")]
    constants = shape | dict(
        PADDED_SEQUENCES=16, HEADS=16, GROUP=4, TOKENS=4, KEY_SIZE=size,
        VALUE_SIZE=size, KEY_BLOCK=size, VALUE_BLOCK=size, SPLIT=0, HAS_WINDOW=False,
        HAS_SOFTCAP=False, HAS_SINKS=False, FP32=number == 4)
    kind = "*bf16" if number == 2 else "*fp32"
    types = dict.fromkeys(("q", "k_pages", "v_pages", "out"), kind)
    types |= dict.fromkeys(("block_tables", "query_start", "seq_lens"), "*i32")
    types |= dict(sinks="*fp32", extremes="*fp32", scale="fp32", softcap="fp32")
    signature = {k: "constexpr" if k in constants else types.get(k, "i32")
                 for k in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(kernel.arg_names)
               if signature[k][0] == "*" or k.endswith(("_token", "_head", "_page"))}
    built = triton.compile(
        ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", 80, 32),
        options=dict(num_warps=warps, num_stages=stages))
    stated = triton_tiles._tile_bytes(shape["ROWS"], shape["KEYS"], warps, stages, number * size)
    assert built.metadata.shared <= stated <= room, (size, built.metadata.shared, stated)
"""


# Steps of any prompts share kernels: what is compiled while requests are served, they wait for.
COMPILE_ONCE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from pw_kernels import triton_attention, triton_tiles

class Driver:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

driver.set_active(Driver())
run = JITFunction.run
JITFunction.run = lambda self, *args, warmup, **options: run(self, *args, warmup=True, **options)
triton_tiles._shared_bytes = lambda _: 227 << 10
pages = torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
for tokens, sequences, blocks in (
    (3000, 1, 300), (3000, 16, 300), (3000, 5, 6), (300, 3, 40), (300, 4, 333), (17, 1, 64),
):
    triton_attention.paged_attention(
        torch.zeros(tokens, 4, 64, dtype=torch.bfloat16), pages, pages,
        torch.zeros(3 * sequences, blocks, dtype=torch.int32)[sequences : 2 * sequences],
        torch.zeros(sequences + 1, dtype=torch.int32), torch.zeros(sequences, dtype=torch.int32),
        scale=0.1)
made = [len(kernel.device_caches[0][0]) for kernel in (
    triton_attention.attention_kernel, triton_attention.merge_kernel)]
assert made == [2, 1], made  # split or not
"""


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="needs no GPU: runs where the others are interpreted")
@pytest.mark.parametrize(
    "source",
    [COMPILE, COMPILE_TILES, COMPILE_ONCE],
    ids=["generations", "tiles", "once for all counts"],
)
def test_compiles_ahead_of_time(source: str, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": str(Path(reference.__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
