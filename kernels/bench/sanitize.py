"""Small calls of one family of CUDA kernels, checked, for compute-sanitizer to watch.

    python kernels/bench/sanitize.py attention        # once without it: compiles
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck \\
        --kernel-name kns=attention python kernels/bench/sanitize.py attention

`--kernel-name` names the kernels to watch (KERNELS below), so that torch's own cost no time.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pw_kernels import cuda_attention, cuda_moe, cuda_prefill, cuda_prompts, products, reference
from pw_kernels.pages import WeightPages
from pw_kernels.step import Norm
from pw_kernels.testing import ScatteredArena, random_blocks

ALL_WIDTHS = [2, 3, 4, 5, 6, 7, 8]
KERNELS = {
    "decode": "experts",
    "routing": "route",
    "prompts": "experts",
    "arrange": "arrange",
    "expand": "expand",
    "products": "product",
    "attention": "attention",
}


def near(got: Tensor, want: Tensor, what: str) -> None:
    error = ((got.float() - want.float()).norm() / want.float().norm()).item()
    print(f"{what}: relative error {error:.1e}", flush=True)
    assert error < 1e-2, what


class Layer:
    """Seven experts, one of each width, in pages of 4 KiB."""

    def __init__(self, hidden: int = 264, inner: int = 96) -> None:
        arena = ScatteredArena(200 + 6 * inner * hidden * 7 // 4096 + 280, 4096)
        self.blocks = []
        for rows, cols, bits in (
            (2 * inner, hidden, ALL_WIDTHS),
            (hidden, inner, ALL_WIDTHS[::-1]),
        ):
            placed = random_blocks(arena, rows, cols, bits)
            tensors = (placed.bits, placed.plane_pages, placed.lut_pages, placed.lut_offset)
            self.blocks.append(WeightPages(rows, cols, *(t.cuda() for t in tensors)))
        self.arena, self.hidden = arena.data.cuda(), hidden

    def check(self, what: str, tokens: int, call: Callable[..., Tensor]) -> None:
        ids = torch.stack([torch.randperm(8)[:2] for _ in range(tokens)]).cuda()  # 7: no expert
        weights = torch.rand(tokens, 2).cuda()
        x = torch.randn(tokens, self.hidden).bfloat16().cuda()
        args = (x, ids, weights, self.arena, *self.blocks)
        want = reference.fused_moe(x.float(), *args[1:], lut_dtype=x.dtype, activation="silu")
        near(call(*args), want, what)


def decode() -> None:
    layer = Layer()
    options: dict[str, Any] = {"lut_dtype": torch.bfloat16, "activation": "silu"}
    statistics = torch.zeros(2, 7, device="cuda")
    for tokens, slots in ((1, 1), (5, 14), (40, 80), (60, 28 * 7)):  # every plan there is
        plan = cuda_moe.choose_plan(slots, 7)
        layer.check(
            f"{tokens} tokens", tokens,
            lambda *args, plan=plan: cuda_moe.fused_moe(
                *args, **options, statistics=statistics, plan=plan
            ),
        )  # fmt: skip


def prompts() -> None:
    layer = Layer()
    for mean in (17, 34, 136):
        plan = cuda_prompts.choose_plan(mean * 60, 60)
        layer.check(
            f"plan of {mean} slots an expert", 70,
            lambda *args, plan=plan: cuda_prompts.fused_moe(*args, plan, activation="silu"),
        )  # fmt: skip


def expand() -> None:
    Layer().check("70 tokens", 70, lambda *args: cuda_prefill.fused_moe(*args, activation="silu"))


def few_rows() -> None:
    x, weight = torch.randn(5, 512).bfloat16().cuda(), torch.randn(104, 512).bfloat16().cuda() / 22
    bias, norm = torch.randn(104).bfloat16().cuda(), Norm(torch.rand(512).bfloat16().cuda(), 1e-6)
    add = [torch.randn(5, 104).bfloat16().cuda() for _ in range(2)]
    share = torch.randn(5, 1).bfloat16().cuda()
    forms: list[dict[str, Any]] = [
        {"bias": bias, "norm": norm}, {"add": add[:1]}, {"add": add, "share": share},
    ]  # fmt: skip
    for form in forms:
        got, want = (products.product(x, weight, **form, backend=b) for b in ("cuda", "torch"))
        near(got, want, ", ".join(form))
    both = (
        products.gated_product(x, weight, 40, "silu", norm=norm, backend=b)
        for b in ("cuda", "torch")
    )
    for got, want in zip(*both, strict=True):
        near(got, want, "gated")


def attention() -> None:
    for heads, kv_heads, size, window in ((2, 2, 128, None), (4, 2, 64, 300), (4, 1, 512, None)):
        lengths = [700, 1, 130, 20]
        tables = torch.randperm(4 * 175 + 3)[: 4 * 175].int().view(4, 175).cuda()
        arena = torch.randn(4 * 175 + 3, 2, 4, kv_heads, size).bfloat16().cuda()
        starts = torch.tensor([0, 1, 2, 3, 3]).int().cuda()  # the last is padding
        q = torch.randn(4, heads, size).bfloat16().cuda()
        args = (q, arena[:, 0], arena[:, 1], tables, starts, torch.tensor(lengths).int().cuda())
        options: dict[str, Any] = {
            "scale": 0.1, "window": window, "sinks": torch.randn(heads).cuda(),
        }  # fmt: skip
        got, want = (f.paged_attention(*args, **options) for f in (cuda_attention, reference))
        near(got, want, f"heads of {size}")


FAMILIES = {
    "decode": decode, "routing": decode, "prompts": prompts, "arrange": prompts, "expand": expand,
    "products": few_rows, "attention": attention,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("family", choices=FAMILIES)
    torch.manual_seed(0)
    FAMILIES[parser.parse_args().family]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
