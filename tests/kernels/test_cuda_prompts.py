"""The MoE for prompts on GPUs of compute capability 9.0: compiled by NVRTC, run on a GPU."""

import os
from typing import Any

import pytest
import torch

from pw_kernels import reference, testing
from pw_kernels.pages import WeightPages

nvrtc = pytest.importorskip(
    "pw_kernels.nvrtc", reason="needs cuda-bindings, as torch's CUDA builds"
)
cuda_prompts = pytest.importorskip("pw_kernels.cuda_prompts")

ALL_WIDTHS = [2, 3, 4, 5, 6, 7, 8]
TWO_BLOCKS = (cuda_prompts.Tuning(4, 2, 2), cuda_prompts.Tuning(8, 2, 1))
WIDE_BLOCKS = (cuda_prompts.Tuning(6, 3, 1), cuda_prompts.Tuning(8, 2, 1))
ONE_LAUNCH = (cuda_prompts.Tuning(8, 2, 1),)
GATE_UP = {"ROWS": 2816, "COLS": 2048, "ROW_TILES": 88, "COL_TILES": 16, "GATED": 1, "BIAS": 0}
DOWN = {"ROWS": 1000, "COLS": 712, "ROW_TILES": 32, "COL_TILES": 6, "GATED": 0, "BIAS": 1}
PLACES = {"PLANES": 8, "PP": 12, "LP": 24, "PAGE_SHIFT": 16, "TOP_K": 4, "SHARED_BASE": 1024}


def on_gpu() -> bool:
    return (
        os.environ["TRITON_INTERPRET"] == "0"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() == (9, 0)
    )


gpu = pytest.mark.skipif(not on_gpu(), reason="needs a GPU of compute capability 9.0")


def compile_class(plan: Any, number: int, shape: dict[str, int], **defines: Any) -> int:
    """Bytes of machine code of one launch of a plan."""
    classes = plan.classes if plan.narrow is None else (*plan.classes, plan.narrow)
    tuning, low = classes[number], 2
    macros = {
        **shape, **PLACES, "FLOAT16": 0, "KIND": 0, "SLOTS": plan.slots, "CLASS": 0,
        "LOW": low, "HIGH": tuning.widest, "FIRST": 1, "BLOCKS": tuning.blocks,
        "GROUPS_OF_WARPS": tuning.warpgroups,
        "ROOM": cuda_prompts.shared_bytes(tuning.blocks, 227 << 10),
        **cuda_prompts.unit_macros(plan.slots), **defines,
    }  # fmt: skip
    try:
        return len(nvrtc.compile_source("prompts.cu", macros, 90))
    except RuntimeError as error:  # cuda-bindings without the library that it binds
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.mark.parametrize(
    ("mean", "number"), [(33, 0), (33, 1), (90, 0), (90, 1), (130, 0), (130, 1), (512, 0)]
)
def test_launches_of_chosen_plans_compile_ahead_of_time(mean: int, number: int) -> None:
    plan = cuda_prompts.choose_plan(mean * 60, 60)
    assert compile_class(plan, number, GATE_UP if number else DOWN, FLOAT16=number % 2) > 1000


def test_an_error_of_the_compiler_is_text() -> None:
    plan = cuda_prompts.Plan(16, ONE_LAUNCH)
    with pytest.raises(ValueError, match=r"prompts\.cu does not compile") as caught:
        compile_class(plan, 0, DOWN, LP="nonsense")
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize(
    ("mean", "slots"),
    [(16, 32), (34, 48), (68, 96), (128, 160), (136, 160), (273, 160), (512, 192), (1024, 192)],
)
def test_groups_hold_what_most_experts_get_or_even_parts_of_it(mean: int, slots: int) -> None:
    assert cuda_prompts.choose_plan(mean * 60, 60).slots == slots


@pytest.mark.parametrize(
    ("planes", "widths", "launched"),
    [
        (8, (2, 8), [(0, 2, 4, 1), (1, 5, 6, 0), (1, 7, 8, 0)]),
        (5, (2, 8), [(0, 2, 4, 1), (1, 5, 5, 0)]),
        (8, (3, 3), [(0, 3, 3, 1)]),
        (8, (2, 2), [(0, 2, 2, 1)]),
        (8, (6, 7), [(1, 6, 6, 1), (1, 7, 7, 0)]),
    ],
)
def test_every_width_has_one_launch(
    monkeypatch: pytest.MonkeyPatch,
    planes: int,
    widths: tuple[int, int],
    launched: list[tuple[int, ...]],
) -> None:
    found, grids = [], []

    class Launched:
        def launch(self, grid: tuple[int, int], *_: Any, **__: Any) -> None:
            grids.append(grid)

    def kernel(source: str, name: str, defines: dict[str, int], device: torch.device) -> Launched:
        found.append(tuple(defines[key] for key in ("CLASS", "LOW", "HIGH", "FIRST")))
        return Launched()

    monkeypatch.setattr(cuda_prompts, "kernel", kernel)
    monkeypatch.setattr(cuda_prompts.nvrtc, "shared_bytes", lambda _: 227 << 10)
    ids = torch.zeros(2, planes, 1, dtype=torch.int32)
    pages = WeightPages(
        192, 256, ids[:, 0, 0].contiguous(), ids, ids[:, 0].contiguous(),
        ids[0, :2, 0].contiguous(), widths,
    )  # fmt: skip
    arguments = cuda_prompts.Arguments(groups=3)
    classes = (cuda_prompts.Tuning(4, 2, 2), *WIDE_BLOCKS)
    plan = cuda_prompts.Plan(160, classes, narrow=cuda_prompts.Tuning(2, 2, 2))
    cuda_prompts._launch_classes(plan, pages, {"GATED": 1}, arguments, torch.device("cpu"))
    assert found == launched
    # 96 columns of hidden are two chunks of 64, of which a warpgroup makes half of one
    assert grids == [(2, 3), (2, 3), (2, 3)][: len(launched)]


class Call:
    """One layer on the GPU, its random inputs, and what the reference says."""

    def __init__(
        self,
        bits: list[int],
        hidden: int,
        inner: int,
        tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        **kwargs: Any,
    ) -> None:
        pages = 200 + 6 * inner * hidden * len(bits) // 4096 + 40 * len(bits)
        arena = testing.ScatteredArena(pages, 4096)
        self.blocks = []
        for rows, cols, widths in ((2 * inner, hidden, bits), (hidden, inner, bits[::-1])):
            placed = testing.random_blocks(arena, rows, cols, widths, dtype)
            tensors = (placed.bits, placed.plane_pages, placed.lut_pages, placed.lut_offset)
            self.blocks.append(WeightPages(rows, cols, *(t.cuda() for t in tensors)))
        self.arena = arena.data.cuda()
        ids = torch.stack([torch.randperm(len(bits) + 1)[:2] for _ in range(tokens)])
        self.ids = ids.cuda()  # the last id is no expert
        self.weights = torch.rand(tokens, 2).cuda()
        self.x = torch.randn(tokens, hidden, dtype=dtype).cuda()
        self.kwargs = {"activation": "silu", **kwargs}

    def __call__(self, plan: Any, **kwargs: Any) -> torch.Tensor:
        for shape in (self.x.shape, (4 * self.ids.numel(), self.x.shape[1])):
            torch.full(shape, float("nan"), device="cuda")  # memory that is reused
        args = (self.x, self.ids, self.weights, self.arena, *self.blocks, plan)
        out: torch.Tensor = cuda_prompts.fused_moe(*args, **self.kwargs, **kwargs)
        return out

    def want(self) -> torch.Tensor:
        args = (self.x.float(), self.ids, self.weights, self.arena, *self.blocks)
        return reference.fused_moe(*args, lut_dtype=self.x.dtype, **self.kwargs)

    def check(self, plan: Any) -> None:
        got, want = self(plan), self.want()
        assert want.norm() > 0
        assert (got.float() - want).norm() <= 1e-2 * want.norm()
        assert torch.equal(self(plan), got)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "plan",
    [
        cuda_prompts.Plan(32, ONE_LAUNCH),
        cuda_prompts.Plan(160, ONE_LAUNCH, overlap=False),
        *(cuda_prompts.choose_plan(mean * 60, 60) for mean in (17, 34, 68, 136, 190)),
    ],
    ids=str,
)
def test_all_widths_in_one_call(plan: Any, dtype: torch.dtype) -> None:
    Call(ALL_WIDTHS, 392, 96, 300, dtype).check(plan)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("shape", [(704, 704), (2816, 704), (2048, 1408), (200, 32)])
def test_shapes_of_real_models(shape: tuple[int, int]) -> None:
    Call([2, 5, 3, 8], *shape, 200).check(cuda_prompts.Plan(112, WIDE_BLOCKS))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_and_biases(activation: str) -> None:
    biases: dict[str, Any] = {
        "gate_up_bias": torch.randn(3, 128).cuda(),
        "down_bias": torch.randn(3, 264).cuda(),
    }
    call = Call([3, 6, 4], 264, 64, 100, activation=activation, **biases)
    call.check(cuda_prompts.Plan(64, TWO_BLOCKS))


@pytest.mark.gpu
@gpu
def test_the_fast_form_of_the_moe_takes_it_for_prompts() -> None:
    cuda_moe = pytest.importorskip("pw_kernels.cuda_moe")
    call = Call([3, 4, 8], 256, 64, 100)
    args = (call.x, call.ids, call.weights, call.arena, *call.blocks)
    chosen = cuda_moe.fused_moe(*args, lut_dtype=call.x.dtype, **call.kwargs)
    assert torch.equal(chosen, call(cuda_prompts.choose_plan(200, 3)))


@pytest.mark.gpu
@gpu
def test_experts_without_tokens_and_padding() -> None:
    call, plan = Call([4] * 3, 256, 64, 40), cuda_prompts.Plan(64, TWO_BLOCKS)
    call.ids[:] = torch.tensor([2, 3]).cuda()  # one expert has all slots, one slot none
    call.check(plan)
    counted, expected = torch.zeros(2, 3).cuda(), torch.zeros(2, 3).cuda()
    live = torch.tensor([33], dtype=torch.int32).cuda()
    padded = call(plan, statistics=counted, live=live)
    call.x, call.ids, call.weights = call.x[:33], call.ids[:33], call.weights[:33]
    assert torch.equal(padded[:33], call(plan, statistics=expected))
    assert not padded[33:].any()
    assert torch.equal(counted, expected)


@pytest.mark.gpu
@gpu
def test_a_captured_graph_follows_bits_and_routing() -> None:
    plan = cuda_prompts.Plan(32, TWO_BLOCKS)
    call = Call([8] * 7, 256, 64, 60)
    call(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(plan)
    narrow = Call(ALL_WIDTHS, 256, 64, 60)
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
