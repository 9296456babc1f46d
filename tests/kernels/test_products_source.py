"""The source of the few-row products, run on a CPU as `test_cuda_source.py` does for the MoE."""

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pw_kernels import products
from pw_kernels.product_plans import Arguments, Plan, choose_plan, constants_of
from pw_kernels.slots import SlotResults
from pw_kernels.step import Norm
from support.cuda_source import LOADS, CudaSource

SOURCE = CudaSource("products.cu", "products_on_cpu.h", LOADS)
DTYPE = torch.bfloat16

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


class Case:
    """A product's inputs, and what the kernel makes of them."""

    def __init__(self, tokens: int, rows: int, cols: int, *, inner: int = 0, bias: bool = False):
        wide = random(tokens, cols + 8, seed=1)  # rows of x need not be dense
        self.x = wide[:, :cols]
        self.weight, self.bias = random(rows, cols) / cols**0.5, random(rows, seed=2)
        self.bias = self.bias if bias else None
        self.norm = Norm(random(cols, seed=3), 1e-5)
        self.add = [random(tokens, rows + 3, seed=4)[:, :rows], random(tokens, rows, seed=5)]
        self.share = random(tokens, 5, seed=6)[:, 2:3]
        self.inner = inner
        self.out = torch.full((tokens, inner or rows), torch.nan).to(DTYPE)
        self.rest = torch.full((tokens, rows - 2 * inner), torch.nan).to(DTYPE)
        self.normed = torch.full((tokens, cols), torch.nan).to(DTYPE)

    def run(
        self, folder: Path, plan: Plan, *, norm: bool = False, add: int = 0, kind: int = 0,
        slots: SlotResults | None = None,
    ):  # fmt: skip
        tokens, (rows, cols) = len(self.x), self.weight.shape
        where = {
            "x": self.x, "weight": self.weight, "norm": self.norm.weight, "add": self.add[0],
            "more": self.add[1], "share": self.share, "out": self.out, "rest": self.rest,
            "normed": self.normed,
        }  # fmt: skip
        if self.bias is not None:
            where["bias"] = self.bias
        if slots is not None:
            where |= {"results": slots.results, "ids": slots.ids}
            where |= {} if slots.live is None else {"live": slots.live}
        arguments = Arguments(
            **{name: tensor.data_ptr() for name, tensor in where.items()}, tokens=tokens,
            x_row=self.x.stride(0), add_row=self.add[0].stride(0), more_row=self.add[1].stride(0),
            share_row=self.share.stride(0), epsilon=self.norm.epsilon,
        )  # fmt: skip
        defines = constants_of(plan, (rows, cols), DTYPE, self.bias is not None, norm)
        defines |= {"GATED": int(self.inner > 0), "INNER": self.inner, "KIND": kind, "ADD": add}
        if slots is not None:
            defines |= {"ROUTED": slots.ids.shape[1], "EXPERTS": slots.experts}
        kernel = SOURCE.compile(folder, "product(*(const Arguments*)all);", defines)
        blocks = plan.grid(rows, self.inner)
        kernel.run(ctypes.byref(arguments), blocks, 1, 32 * plan.warps)


def near(found: Tensor, expected: Tensor) -> None:
    difference = (found.float() - expected.float()).norm()
    assert difference <= 4e-3 * expected.float().norm()


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_behind_a_norm(tmp_path: Path, tokens: int, bias: bool) -> None:
    case = Case(tokens, 40, 512, bias=bias)
    case.run(tmp_path, choose_plan(8, (40, 512), norm=True), norm=True)
    near(
        case.out, products.product(case.x, case.weight, case.bias, norm=case.norm, backend="torch")
    )


@pytest.mark.parametrize("add", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("tokens", "plan"),
    [
        (2, Plan(4, stages=2, turn=2)),  # copies in turn, x in turn; the last warp has less
        (5, Plan(2, stages=4, turn=16)),
        (8, choose_plan(8, (72, 832), norm=False)),
        (13, choose_plan(13, (72, 832), norm=False)),
        (30, choose_plan(30, (72, 832), norm=False)),
        (30, Plan(8, stages=2, turn=2, tiles=4, height=3)),  # the last block has rows left over
        (13, Plan(4, stages=7, turn=7, tiles=2, height=2)),
        (29, choose_plan(29, (72, 832), norm=False, beside=True)),
        (7, choose_plan(7, (72, 832), norm=False, beside=True)),
    ],
)
def test_sums_after_a_product(tmp_path: Path, tokens: int, plan: Plan, add: int) -> None:
    case = Case(tokens, 72, 832, bias=add == 1)
    case.run(tmp_path, plan, add=add)
    near(
        case.out,
        products.product(
            case.x, case.weight, case.bias, add=case.add[: min(add, 2)],
            share=case.share if add == 3 else None, backend="torch",
        ),
    )  # fmt: skip


@pytest.mark.parametrize("live", [None, 3])
def test_slots_are_added_up_on_the_way(tmp_path: Path, live: int | None) -> None:
    case = Case(5, 24, 512)
    results = random(5 * 3, 24, seed=8).float()
    ids = torch.tensor([[0, 7, 2], [4, -1, 1], [6, 5, 8], [1, 2, 3], [3, 0, 5]])  # of 8
    results[4], results[8] = torch.nan, torch.nan  # nobody computed them
    slots = SlotResults(results, ids, 8, None if live is None else torch.tensor([live]).int())
    case.run(tmp_path, choose_plan(5, (24, 512), norm=False), add=3, slots=slots)
    add = [case.add[0], slots]
    expected = products.product(case.x, case.weight, add=add, share=case.share, backend="torch")
    near(case.out, expected)
    sums = torch.where(((ids >= 0) & (ids < 8))[..., None], results.view(5, 3, 24), 0).sum(1)
    if live is not None:
        sums[live:] = 0
    near(slots.sum(DTYPE), sums.to(DTYPE))


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_gated_product_and_what_is_beside_it(tmp_path: Path, kind: int) -> None:
    case = Case(4, 2 * 24 + 13, 256, inner=24, bias=kind == 1)
    plan = choose_plan(8, (61, 256), norm=True, beside=kind == 2)
    case.run(tmp_path, plan, norm=True, kind=kind)
    expected = products.gated_product(
        case.x, case.weight, 24, ("silu", "gelu", "gelu_tanh")[kind], case.bias, norm=case.norm,
        backend="torch",
    )  # fmt: skip
    for found, want in zip((case.out, case.rest, case.normed), expected, strict=True):
        near(found, want)


@pytest.mark.parametrize(("tokens", "plan"), [
    (7, Plan(4, stages=2, turn=2, height=3)),  # a norm first
    (29, Plan(4, stages=2, turn=2, tiles=4, height=3)),
])  # fmt: skip
def test_a_gated_product_of_some_tokens(tmp_path: Path, tokens: int, plan: Plan) -> None:
    case = Case(tokens, 2 * 40 + 13, 256, inner=40)
    norm = plan.tiles == 1
    case.run(tmp_path, plan, norm=norm)
    expected = products.gated_product(
        case.x, case.weight, 40, "silu", norm=case.norm if norm else None, backend="torch"
    )
    near(case.out, expected.out)
    near(case.rest, expected.rest)
    if norm:
        near(case.normed, expected.normed)


def test_a_token_s_result_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    results = []
    for tokens, height in ((1, 1), (8, 1), (8, 2)):
        case = Case(8, 32, 512)
        folder = tmp_path / f"{tokens}-{height}"
        folder.mkdir()
        case.x = case.x[:tokens]
        plan = replace(choose_plan(8, (40, 512), norm=True), height=height)
        case.run(folder, plan, norm=True)
        results.append(case.out[0])
    assert all(torch.equal(result, results[0]) for result in results)
