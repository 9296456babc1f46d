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
TWO, THREE = cuda_prompts.Tuning(2, 1), cuda_prompts.Tuning(3, 1)  # warpgroups
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


def compile_plan(plan: Any, widest: int, shape: dict[str, int], **defines: Any) -> int:
    """Bytes of machine code of a module's launch."""
    tuning = plan.narrow if widest <= cuda_prompts.NARROW_BITS and plan.narrow else plan.wide
    macros = {
        **shape, **PLACES, "FLOAT16": 0, "KIND": 0, "SLOTS": plan.slots, "LOW": 2, "HIGH": widest,
        "BLOCKS": tuning.blocks, "GROUPS_OF_WARPS": tuning.warpgroups,
        "ROOM": cuda_prompts.shared_bytes(tuning.blocks, 227 << 10),
        **cuda_prompts.unit_macros(plan.slots), **defines,
    }  # fmt: skip
    try:
        return len(nvrtc.compile_source("prompts.cu", macros, 90))
    except RuntimeError as error:  # cuda-bindings without the library that it binds
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.mark.parametrize(
    ("mean", "widest"), [(33, 8), (33, 4), (90, 8), (90, 4), (130, 8), (130, 4), (512, 8)]
)
def test_launches_of_chosen_plans_compile_ahead_of_time(mean: int, widest: int) -> None:
    plan, narrow = cuda_prompts.choose_plan(mean * 60, 60), widest == 4
    assert compile_plan(plan, widest, GATE_UP if narrow else DOWN, FLOAT16=int(narrow)) > 1000


def test_an_error_of_the_compiler_is_text() -> None:
    plan = cuda_prompts.Plan(16, TWO)
    with pytest.raises(ValueError, match=r"prompts\.cu does not compile") as caught:
        compile_plan(plan, 8, DOWN, LP="nonsense")
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
        (8, (2, 8), (2, 8, 3, 1)),
        (5, (2, 8), (2, 5, 3, 1)),
        (8, (6, 7), (6, 7, 3, 1)),
        (8, (2, 4), (2, 4, 2, 2)),
        (4, (2, 8), (2, 4, 2, 2)),
        (8, (3, 3), (3, 3, 2, 2)),
    ],
)
def test_one_launch_takes_all_widths_that_a_block_can_have(
    monkeypatch: pytest.MonkeyPatch,
    planes: int,
    widths: tuple[int, int],
    launched: tuple[int, ...],
) -> None:
    found, grids = [], []

    class Launched:
        def launch(self, grid: tuple[int, int], *_: Any, **__: Any) -> None:
            grids.append(grid)

    def kernel(source: str, name: str, defines: dict[str, int], device: torch.device) -> Launched:
        found.append(tuple(defines[key] for key in ("LOW", "HIGH", "GROUPS_OF_WARPS", "BLOCKS")))
        return Launched()

    monkeypatch.setattr(cuda_prompts, "kernel", kernel)
    monkeypatch.setattr(cuda_prompts.nvrtc, "shared_bytes", lambda _: 227 << 10)
    ids = torch.zeros(2, planes, 1, dtype=torch.int32)
    pages = WeightPages(
        192, 256, ids[:, 0, 0].contiguous(), ids, ids[:, 0].contiguous(),
        ids[0, :2, 0].contiguous(), widths,
    )  # fmt: skip
    arguments = cuda_prompts.Arguments(groups=3)
    plan = cuda_prompts.Plan(160, THREE, narrow=cuda_prompts.Tuning(2, 2))
    cuda_prompts._launch(plan, pages, {"GATED": 1}, arguments, torch.device("cpu"))
    assert found == [launched]
    # 96 columns of hidden are two chunks of 64, of which a warpgroup makes half of one
    assert grids == [(2, 3)]


def test_plans_of_an_h200_are_those_that_were_measured() -> None:
    small = cuda_prompts.Plan(48, cuda_prompts.Tuning(2, 2), cuda_prompts.Tuning(2, 3))
    assert cuda_prompts.choose_plan(34 * 60, 60) == small
    assert cuda_prompts.choose_plan(68 * 60, 60) == cuda_prompts.Plan(
        96, THREE, cuda_prompts.Tuning(2, 2)
    )
    assert cuda_prompts.choose_plan(512 * 60, 60) == cuda_prompts.Plan(192, THREE)
    rooms = [cuda_prompts.shared_bytes(blocks, 227 << 10) for blocks in (1, 2, 3)]
    assert rooms == [227 << 10, 113 << 10, 75 << 10]


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
        cuda_prompts.Plan(32, TWO),
        cuda_prompts.Plan(160, TWO, overlap=False),
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
    Call([2, 5, 3, 8], *shape, 200).check(cuda_prompts.Plan(112, THREE))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_and_biases(activation: str) -> None:
    biases: dict[str, Any] = {
        "gate_up_bias": torch.randn(3, 128).cuda(),
        "down_bias": torch.randn(3, 264).cuda(),
    }
    call = Call([3, 6, 4], 264, 64, 100, activation=activation, **biases)
    call.check(cuda_prompts.Plan(64, TWO))


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
    call, plan = Call([4] * 3, 256, 64, 40), cuda_prompts.Plan(64, TWO)
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
    plan = cuda_prompts.Plan(32, TWO)
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
