"""The CUDA MoE: compiled by NVRTC wherever that is installed, run and compared on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pw_kernels import dispatch, reference, testing
from pw_kernels.pages import WeightPages
from pw_kernels.slots import Choice

nvrtc = pytest.importorskip(
    "pw_kernels.nvrtc", reason="needs cuda-bindings, as torch's CUDA builds"
)
cuda_moe = pytest.importorskip("pw_kernels.cuda_moe")
cuda_routing = pytest.importorskip("pw_kernels.cuda_routing")

on_gpu = pytest.mark.skipif("os.environ['TRITON_INTERPRET'] == '1'", reason="TRITON_INTERPRET=1")
BLOCK = {
    "FLOAT16": 0, "TOP_K": 4, "ROWS": 2816, "COLS": 2048, "ROW_TILES": 88, "COL_TILES": 16,
    "PLANES": 8, "PP": 22, "LP": 44, "PAGE_SHIFT": 15, "GATED": 1, "KIND": 0, "BIAS": 0,
    "CLASS": 0, "LOW": 2, "HIGH": 4, "NT": 1, "WK": 2, "ITEMS": 1, "BLOCKS": 1,
    "SHARED_BASE": 1024, "EXPAND": 0, "FIRST": 1,
    "DIRECT": 0, "HALVED": 0,
}  # fmt: skip


ROUTING = {"EXPERTS": 8, "TOKENS": 8, "THREADS": 128, "FLOAT16": 1, "TOP_K": 2}


@pytest.fixture(scope="module")
def compile_source() -> Any:
    try:
        nvrtc.compile_source("routing.cu", ROUTING, 90)
    except RuntimeError as error:  # cuda-bindings without the library that it binds
        pytest.skip(f"NVRTC is not installed: {error}")
    return nvrtc.compile_source


FORMS: list[dict[str, int]] = [
    {},
    {
        "FLOAT16": 1,
        "CLASS": 1,
        "LOW": 5,
        "HIGH": 8,
        "WK": 4,
        "ITEMS": 2,
        "KIND": 1,
        "QUEUED": 98816,
    },
    {"GATED": 0, "ROWS": 1000, "COLS": 712, "ROW_TILES": 32, "COL_TILES": 6, "BIAS": 1},
    {"NT": 8, "KIND": 2},
    {"DIRECT": 1, "HALVED": 1, "HIGH": 8},
    {"EXPAND": 1, "HIGH": 8},
]


@pytest.mark.parametrize(
    ("capability", "form"),
    [*((90, form) for form in FORMS), *((c, form) for c in (80, 100) for form in FORMS[:2])],
)
def test_compiles_ahead_of_time(compile_source: Any, capability: int, form: dict[str, int]) -> None:
    assert len(compile_source("moe.cu", BLOCK | form, capability)) > 1000


def test_an_error_of_the_compiler_is_told(compile_source: Any) -> None:
    with pytest.raises(ValueError, match=r"moe\.cu does not compile"):
        compile_source("moe.cu", BLOCK | {"PAGE_SHIFT": "nonsense"}, 90)


def test_machine_code_is_compiled_once(
    compile_source: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = nvrtc.machine_code("routing.cu", ROUTING, 90)
    assert nvrtc.machine_code("routing.cu", ROUTING | {"TOP_K": 3}, 90) != code
    monkeypatch.setattr(nvrtc, "compile_source", None)
    assert nvrtc.machine_code("routing.cu", ROUTING, 90) == code
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # cannot be written
    assert len(nvrtc.machine_code("routing.cu", ROUTING, 90)) == len(code)


@pytest.mark.parametrize("slots", [1, 32, 128, 512, 2048, 20000])
@pytest.mark.parametrize("room", [99 << 10, 227 << 10])
@pytest.mark.parametrize("widths", [(2, 8), (2, 6)])
def test_the_chosen_plan_fits_the_gpu(slots: int, room: int, widths: tuple[int, int]) -> None:
    plan = cuda_moe.choose_plan(slots, 60, room, widths)
    for low, high, tuning in plan.classes:
        for bits in range(max(low, widths[0]), min(high, widths[1]) + 1):
            assert cuda_moe._shared_bytes(bits, plan, tuning) <= room


@pytest.mark.parametrize(
    ("widths", "room", "launches"),
    [((2, 6), 227, 1), ((5, 5), 227, 1), ((2, 8), 227, 2), ((6, 6), 227, 2), ((2, 6), 163, 2)],
)
def test_widths_up_to_6_bits_are_one_launch(
    widths: tuple[int, int], room: int, launches: int
) -> None:
    plan = cuda_moe.choose_plan(128, 60, room << 10, widths)
    assert len(plan.classes) == launches
    if launches == 1:  # all blocks of a multiprocessor find room: 1 KB of each is the driver's
        places = 228 // plan.low.blocks - 1
        most = max(cuda_moe._shared_bytes(b, plan, plan.low) for b in range(2, 7))
        assert most <= places << 10


@pytest.mark.parametrize(
    ("count", "experts", "size"), [(5, 7, 8), (16, 7, 8), (40, 6, 8), (41, 1, 8), (33, 4, 2)]
)
def test_lists_have_room_for_the_most_groups(count: int, experts: int, size: int) -> None:
    most = [-(-slots // size) for slots in range(count + 1)]  # of one expert that has so many
    for _ in range(experts - 1):  # another one takes some of them
        most = [
            max(-(-own // size) + most[slots - own] for own in range(slots + 1))
            for slots in range(count + 1)
        ]
    assert cuda_routing.most_groups(count, experts, size) == most[count]


@pytest.mark.parametrize(
    ("blocks", "col_tiles", "room", "split"),
    [
        (128, 112, 227, 8),  # down of Mixtral for a single token, on 132 multiprocessors
        (128, 11, 227, 4),  # so few columns that warps would have nothing to do
        (900, 112, 227, 4),
        (128, 112, 99, 4),
    ],
)
def test_few_blocks_of_many_columns_get_more_warps(
    monkeypatch: pytest.MonkeyPatch, blocks: int, col_tiles: int, room: int, split: int
) -> None:
    monkeypatch.setattr(cuda_moe.nvrtc, "shared_bytes", lambda _: room << 10)
    monkeypatch.setattr(cuda_moe.nvrtc, "device_attribute", lambda *_: 132)
    plan = cuda_moe.choose_plan(2, 8)
    found = cuda_moe._split(plan, plan.low, range(2, 9), blocks, col_tiles, 0)
    assert (found.split, found.split * found.blocks) == (split, 8)


@pytest.mark.parametrize("direct", [False, True])
def test_a_choice_of_a_single_token_is_made_before_its_experts_run(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(cuda_moe, "_launch_classes", lambda *_: order.append("experts"))

    def launch(lists: object, size: int) -> None:
        order.append("choice alone" if lists is None else f"choice and lists of {size}")

    arena = testing.ScatteredArena(60, 4096)
    pages = [testing.random_blocks(arena, *shape, [2, 3]) for shape in ((64, 32), (32, 32))]
    ids, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    plan = cuda_moe.Plan(1, cuda_moe.Tuning(4, 2), None, direct=direct)
    found = cuda_moe.fused_moe(
        torch.zeros(1, 32, dtype=torch.bfloat16), Choice(ids, weights, 2, launch), None, arena.data,
        *pages, lut_dtype=torch.bfloat16, activation="silu", plan=plan, summed=False,
    )  # fmt: skip
    made = "choice alone" if direct else "choice and lists of 8"
    assert order == [made, "experts", "experts"]
    assert found.ids is ids


def place(pages: WeightPages) -> WeightPages:
    tensors = (pages.bits, pages.plane_pages, pages.lut_pages, pages.lut_offset)
    return WeightPages(pages.rows, pages.cols, *(tensor.cuda() for tensor in tensors))


class Call:
    """One layer on the GPU, its random inputs, and what the reference says."""

    def __init__(
        self,
        bits: list[int],
        hidden: int,
        inner: int,
        tokens: int,
        top_k: int = 2,
        dtype: torch.dtype = torch.bfloat16,
        page_bytes: int = 4096,
        **kwargs: Any,
    ) -> None:
        self.experts = len(bits)
        size = 3 * inner * hidden * len(bits)  # bytes of 8 planes, twice over with tables
        arena = testing.ScatteredArena(200 + 2 * size // page_bytes + 40 * len(bits), page_bytes)
        shapes = ((2 * inner, hidden), (hidden, inner))
        self.blocks = [
            place(testing.random_blocks(arena, *shape, widths, dtype))
            for shape, widths in zip(shapes, (bits, bits[::-1]), strict=True)
        ]
        self.arena = arena.data.cuda()
        ids = torch.stack([torch.randperm(len(bits) + 1)[:top_k] for _ in range(tokens)])
        self.ids = ids.cuda()  # the last id is no expert
        self.weights = torch.rand(tokens, top_k).cuda()
        self.x = torch.randn(tokens, hidden, dtype=dtype).cuda()
        self.kwargs = {"lut_dtype": dtype, "activation": "silu", **kwargs}

    def __call__(self, **kwargs: Any) -> torch.Tensor:
        for shape in (self.x.shape, (self.ids.numel(), self.x.shape[1])):  # memory that is reused
            torch.full(shape, float("nan"), device="cuda")
        args = (self.x, self.ids, self.weights, self.arena, *self.blocks)
        out: torch.Tensor = cuda_moe.fused_moe(*args, **self.kwargs, **kwargs)
        return out

    def check(self, **kwargs: Any) -> None:
        got, want = self(**kwargs), self.want()
        assert (got.float() - want).norm() <= 1e-2 * want.norm()
        assert torch.equal(self(**kwargs), got)

    def want(self) -> torch.Tensor:
        out = reference.fused_moe(
            self.x.float(), self.ids, self.weights, self.arena, *self.blocks, **self.kwargs
        )
        assert out.norm() > 0
        return out


ALL_WIDTHS = [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("token_tiles", [1, 2, 4, 8])
def test_all_widths_in_one_launch(token_tiles: int, dtype: torch.dtype) -> None:
    low, high = cuda_moe.Tuning(2, 1), cuda_moe.Tuning(2, 1, items=2, queue=True)
    call = Call(ALL_WIDTHS * 2, 392, 96, tokens=60, top_k=3, dtype=dtype)
    call.check(plan=cuda_moe.Plan(token_tiles, low, high))
    call.check(plan=cuda_moe.Plan(token_tiles, low, None))


@pytest.mark.gpu
@on_gpu
def test_a_single_token_without_a_list() -> None:
    call = Call(ALL_WIDTHS, 392, 96, tokens=1, top_k=7)
    listed = cuda_moe.Plan(1, cuda_moe.Tuning(4, 2), None)
    direct = replace(listed, direct=True)
    call.check(plan=direct)
    assert torch.equal(call(plan=direct), call(plan=listed))
    got, want = torch.ones(2, 7).cuda(), torch.ones(2, 7).cuda()
    call.ids[0, 3] = call.ids[0, 5]  # an expert twice
    call(plan=direct, statistics=got)
    call(plan=listed, statistics=want)
    assert torch.equal(got, want)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("tokens", [1, 9, 150])
@pytest.mark.parametrize("shape", [(704, 704), (1024, 768), (2816, 704), (2048, 1408), (200, 32)])
def test_shapes_of_real_models_with_the_chosen_plan(shape: tuple[int, int], tokens: int) -> None:
    Call([2, 5, 3, 8], *shape, tokens=tokens, page_bytes=32768).check()


@pytest.mark.gpu
@on_gpu
def test_blocks_that_never_have_more_than_6_bits() -> None:
    call = Call([2, 5, 3, 6, 4], 2048, 1408, tokens=9, page_bytes=32768)
    call.blocks = [replace(pages, widths=(2, 6)) for pages in call.blocks]
    call.check()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_and_biases(activation: str) -> None:
    biases: dict[str, Any] = {
        "gate_up_bias": torch.randn(3, 128).cuda(),
        "down_bias": torch.randn(3, 256).cuda(),
    }
    Call([3, 6, 4], 256, 64, tokens=20, activation=activation, **biases).check()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scratch", [1, 1 << 20])  # bytes: one expert at a time, or all
def test_prompts(monkeypatch: pytest.MonkeyPatch, scratch: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(cuda_moe, "PROMPT_SLOTS", 1)
    monkeypatch.setattr(cuda_moe.cuda_prompts, "wins", lambda *_: False)  # as before Hopper
    monkeypatch.setattr(cuda_moe.cuda_prefill, "SCRATCH_BYTES", scratch)
    Call(ALL_WIDTHS, 392, 96, tokens=300, dtype=dtype).check()
    biases: dict[str, Any] = {
        "gate_up_bias": torch.randn(3, 128).cuda(),
        "down_bias": torch.randn(3, 264).cuda(),
    }
    Call([3, 6, 4], 264, 64, tokens=200, dtype=dtype, activation="gelu", **biases).check()
    call = Call([4] * 3, 256, 64, tokens=40)
    call.ids[:] = torch.tensor([2, 3]).cuda()  # experts without tokens, and a slot without expert
    call.check()


@pytest.mark.gpu
@on_gpu
def test_a_token_does_not_depend_on_its_batch() -> None:
    call = Call(ALL_WIDTHS, 256, 64, tokens=30)
    plan = cuda_moe.choose_plan(60, 7)
    whole = call(plan=plan)
    call.x, call.ids, call.weights = call.x[11:12], call.ids[11:12], call.weights[11:12]
    assert torch.equal(call(plan=plan)[0], whole[11])


@pytest.mark.gpu
@on_gpu
def test_routing_statistics() -> None:
    call = Call([4] * 5, 256, 64, tokens=300)
    got, want = torch.ones(2, 5).cuda(), torch.ones(2, 5).cuda()
    call(statistics=got)
    reference.count_routing(want, call.ids, call.weights)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("tokens", [5, 300])
def test_padding_has_no_expert_and_counts_for_nothing_on_the_gpu(tokens: int) -> None:
    call = Call([3, 4, 5, 8], 256, 64, tokens=tokens)
    plan = cuda_moe.choose_plan(2 * tokens, 4)
    counted, expected = torch.zeros(2, 4).cuda(), torch.zeros(2, 4).cuda()
    live = torch.tensor([tokens - 2], dtype=torch.int32).cuda()
    padded = call(statistics=counted, live=live, plan=plan)
    call.x, call.ids, call.weights = (
        part[: tokens - 2] for part in (call.x, call.ids, call.weights)
    )
    assert torch.equal(padded[: tokens - 2], call(statistics=expected, plan=plan))
    assert not padded[tokens - 2 :].any()
    assert torch.equal(counted, expected)


@pytest.mark.gpu
@on_gpu
def test_a_captured_graph_follows_bits_and_routing() -> None:
    call = Call([8] * 6, 256, 64, tokens=6)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    narrow = Call([2, 3, 4, 5, 6, 7], 256, 64, tokens=6)
    for mine, other in zip(call.blocks, narrow.blocks, strict=True):
        for name in ("bits", "plane_pages", "lut_offset"):
            getattr(mine, name).copy_(getattr(other, name))
        mine.lut_pages.fill_(-1)
        mine.lut_pages[:, : other.lut_pages.shape[1]] = other.lut_pages
    call.arena.copy_(narrow.arena)
    call.ids.copy_(narrow.ids)
    graph.replay()
    want = call.want()
    assert (out.float() - want).norm() <= 1e-2 * want.norm()


@pytest.mark.gpu
@on_gpu
def test_the_door_takes_it_where_it_fits_and_triton_elsewhere() -> None:
    names = ("x", "ids", "weights", "arena")
    for inner, backend in ((64, "cuda"), (40, "triton")):
        call = Call([3, 5], 256, inner, tokens=4)
        args = [getattr(call, name) for name in names] + call.blocks
        auto = dispatch.fused_moe(*args, **call.kwargs)
        assert torch.equal(auto, dispatch.fused_moe(*args, **call.kwargs, backend=backend))
    with pytest.raises(ValueError, match="'cuda' cannot run"):
        dispatch.fused_moe(*args, **call.kwargs, backend="cuda")
