"""Small calls of one family of GPU kernels, checked, for compute-sanitizer to watch.

    python kernels/bench/sanitize.py attention        # once without it: compiles
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck \\
        --kernel-name kns=attention python kernels/bench/sanitize.py attention

`--kernel-name` names the kernels to watch (KERNELS below), so that torch's own cost no time. Those
of products are families of their own, and so are the portable forms in Triton.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pw_kernels import (
    cuda_attention,
    cuda_dense,
    cuda_joint_attention,
    cuda_moe,
    cuda_prefill,
    cuda_prompts,
    cuda_routers,
    cuda_routing,
    descents,
    places,
    products,
    reference,
    splits,
    step,
    triton_attention,
    triton_likeliest,
    triton_moe,
    triton_step,
)
from pw_kernels import dense as reference_dense
from pw_kernels.attention_plans import Plan
from pw_kernels.joint_attention_plans import choose_plan
from pw_kernels.pages import WeightPages
from pw_kernels.slots import SlotResults
from pw_kernels.step import Norm, Routing
from pw_kernels.testing import ScatteredArena, random_blocks

ALL_WIDTHS = [2, 3, 4, 5, 6, 7, 8]
SMALLER = ((8, 3), (4, 4), (4, 3))  # warps and units of attention where shared memory is less
KERNELS = {
    "decode": "experts",
    "routing": "route",
    "router": "router",
    "choice": "choose",
    "prompts": "experts",
    "arrange": "arrange",
    "expand": "expand",
    **{
        f"products-{form}": "product" for form in ("norm", "add", "share", "gated", "slots", "many")
    },
    "attention": "attention",
    "joint-attention": "attend",
    "triton-moe": "_kernel",
    "triton-attention": "_kernel",
    "triton-step": "_kernel",
    "triton-offline": "_kernel",
    "dense": "grouped",
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
    sizes = ((1, 1, 8), (5, 14, 8), (5, 14, 6), (40, 80, 8), (60, 28 * 7, 8))  # every plan there is
    for tokens, slots, most in sizes:
        plan = cuda_moe.choose_plan(slots, 7, 227 << 10, (2, most))
        layer.check(
            f"{tokens} tokens, launches for up to {most} bits", tokens,
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


def routers(form: str) -> None:
    """Experts chosen by a launch that lists their tokens, too, and by one that does not."""
    weight = torch.randn(16, 512).bfloat16().cuda() / 22
    routing = Routing(weight[1:8], 2, torch.bfloat16, widened=True)
    modules = tuple(Layer().blocks)
    for tokens in (5, 20):
        x = torch.randn(tokens, 512).bfloat16().cuda()
        norm = Norm(torch.rand(512).bfloat16().cuda() + 0.5, 1e-6) if form == "router" else None
        rows = x if norm is None else step.rms_norm(x, norm.weight, norm.epsilon)
        logits = (rows.float() @ weight.float().t()).bfloat16()[:, 1:8]
        _, want = step.choose(logits, routing, backend="torch")
        for listed in (True, False):
            if form == "router":
                made = cuda_routers.choice(x, weight, 1, routing, norm)[0]
            else:
                made = cuda_routers.choose(logits, routing)
            if listed:
                routed = cuda_routing.route(made, None, (modules[0], modules[1]), 8, 4, None)
                assert int(routed.counts.sum()) == 2 * tokens
            else:
                made.launch(None, 0)
            near(made.weights, want, f"{form}, {tokens} tokens")


def expand() -> None:
    Layer().check("70 tokens", 70, lambda *args: cuda_prefill.fused_moe(*args, activation="silu"))


def widened(given: Any) -> Any:
    """The same in fp32, of tensors and what holds them; the rest as it is."""
    if isinstance(given, Tensor):
        return given.float()
    if isinstance(given, Norm):
        return Norm(given.weight.float(), given.epsilon)
    return [widened(each) for each in given] if isinstance(given, list) else given


def few_rows(form: str) -> None:
    """Beside fp32: cuBLAS's kernels for bf16 on Hopper end in the sanitizer's own error."""
    tokens = (12, 20) if form == "many" else (5,)
    weight = torch.randn(104, 512).bfloat16().cuda() / 22
    norm = Norm(torch.rand(512).bfloat16().cuda(), 1e-6)
    for count in tokens:
        x, share = (
            torch.randn(count, 512).bfloat16().cuda(),
            torch.randn(count, 1).bfloat16().cuda(),
        )
        add = [torch.randn(count, 104).bfloat16().cuda() for _ in range(2)]
        ids = torch.randint(0, 8, (count, 2)).cuda()  # 7: no expert
        routed = SlotResults(torch.randn(2 * count, 104).cuda(), ids, 7)
        forms: dict[str, dict[str, Any]] = {
            "norm": {"bias": torch.randn(104).bfloat16().cuda(), "norm": norm},
            "add": {"add": add[:1]},
            "share": {"add": add, "share": share},
            "slots": {"add": [add[0], routed], "share": share},
            "many": {"add": add, "share": share},
            "gated": {"norm": norm},
        }
        options = forms[form]
        wide = {name: widened(given) for name, given in options.items()}
        args = (weight, 40, "silu") if form == "gated" else (weight,)
        call: Callable[..., Any] = products.gated_product if form == "gated" else products.product
        got = call(x, *args, **options, backend="cuda")
        want = call(*map(widened, (x, *args)), **wide, backend="torch")
        pairs = zip(got, want, strict=True) if form == "gated" else [(got, want)]
        for one, other in pairs:
            near(one, other, f"{form}, {count} rows")


def attention(kernels: Any = cuda_attention) -> None:
    for heads, kv_heads, size, window in ((2, 2, 128, None), (4, 2, 64, 300), (4, 1, 256, None)):
        lengths = [700, 1, 130, 20]
        tables = torch.randperm(4 * 175 + 3)[: 4 * 175].int().view(4, 175).cuda()
        arena = torch.randn(4 * 175 + 3, 2, 4, kv_heads, size).bfloat16().cuda()
        starts = torch.tensor([0, 1, 2, 3, 3]).int().cuda()  # the last is padding
        q = torch.randn(4, heads, size).bfloat16().cuda()
        args = (q, arena[:, 0], arena[:, 1], tables, starts, torch.tensor(lengths).int().cuda())
        options: dict[str, Any] = {
            "scale": 0.1, "window": window, "sinks": torch.randn(heads).cuda(),
        }  # fmt: skip
        want = reference.paged_attention(*args, **options)
        near(kernels.paged_attention(*args, **options), want, f"heads of {size}")
        for warps, units in SMALLER if kernels is cuda_attention else ():
            got = cuda_attention.paged_attention(*args, **options, plan=Plan(warps, units, 256))
            near(got, want, f"heads of {size}, {warps} warps, {units} units")


def joint_attention() -> None:
    lengths, count = torch.tensor([700, 1, 130, 20]).int().cuda(), 4
    starts = torch.tensor([0, 1, 2, 3, 3]).int().cuda()  # the last is padding
    tables = torch.randperm(count * 175 + 3)[: count * 175].int().view(count, 175).cuda()
    last = (lengths - 1).long()
    slots = tables.gather(1, (last // 4)[:, None])[:, 0].long() * 4 + last % 4
    slots[-1] = -1
    for heads, kv_heads, size, window in (
        (2, 2, 128, None), (8, 1, 128, None), (4, 2, 64, 300), (4, 1, 256, None), (8, 1, 512, None),
    ):  # fmt: skip
        arena = torch.randn(count * 175 + 3, 2, 4, kv_heads, size).bfloat16().cuda()
        qkv = torch.randn(count, (heads + 2 * kv_heads) * size).bfloat16().cuda()
        cos, sin = torch.randn(2, count, size).bfloat16().cuda()
        norm = torch.randn(heads + 2 * kv_heads, size).bfloat16().cuda()
        more, where = {"norm": norm, "epsilon": 1e-5}, (tables, starts, lengths)
        plan = choose_plan(count, heads, kv_heads, size)
        assert plan is not None
        for cluster in (1, 2, 8):
            mine = arena.clone()
            got = cuda_joint_attention.attend(
                qkv, cos, sin, mine[:, 0], mine[:, 1], *where, scale=0.1, window=window, **more,
                plan=replace(plan, cluster=cluster),
            )  # fmt: skip
            its = arena.clone()
            q = step.rotate_store(
                qkv, cos, sin, its[:, 0], its[:, 1], slots, head_size=size, backend="torch", **more
            )
            want = reference.paged_attention(
                q, its[:, 0], its[:, 1], *where, scale=0.1, window=window
            )
            near(got, want, f"heads of {size}, {cluster} blocks")
            near(mine, its, "stored")


def triton_experts() -> None:
    options: dict[str, Any] = {"lut_dtype": torch.bfloat16, "activation": "silu"}
    Layer().check("40 tokens", 40, lambda *args: triton_moe.fused_moe(*args, **options))


def steps() -> None:
    x, weight = torch.randn(5, 96).cuda(), torch.rand(96).cuda()
    routing = Routing(torch.randn(8, 96).cuda(), 2, torch.float32, wide=True)
    pages = [torch.zeros(9, 4, 2, 16).cuda() for _ in range(2)]
    slots, positions = torch.tensor([3, 9, 30, -1, 35]).cuda(), torch.arange(5).cuda()
    cos, sin = step.angles(positions, torch.rand(8).cuda(), 1.0, torch.float32, backend="triton")
    qkv, k = torch.randn(5, 8 * 16).cuda(), torch.randn(5, 2, 16).cuda()
    slots_of = SlotResults(torch.randn(10, 96).cuda(), torch.randint(0, 8, (5, 2)).cuda(), 7)
    rotate = partial(step.rotate_store, head_size=16)
    for call, args in (
        (step.rms_norm, (x, weight, 1e-6)), (step.route, (x, routing)),
        (step.choose, (torch.randn(5, 8).cuda(), routing)), (step.gate, (x, 40, "silu")),
        (step.join, (x, x, x, x[:, :1])), (step.add_slots, (x, slots_of)),
        (rotate, (qkv, cos, sin, *pages, slots)),
    ):  # fmt: skip
        got, want = (call(*args, backend=b) for b in ("triton", "torch"))
        got, want = (each if isinstance(each, tuple) else (each,) for each in (got, want))
        for one, other in zip(got, want, strict=True):
            near(one, other, getattr(call, "__name__", "rotate_store"))
    triton_step.write_kv(k, k, *pages, slots)
    near(pages[0].flatten(0, 1)[slots[:3]], k[:3], "write_kv")
    logits = torch.randn(3, 9000).cuda()
    near(triton_likeliest.likeliest(logits, 9000), logits.argmax(1), "likeliest")


def offline() -> None:
    for name, module in (("splits", splits), ("places", places), ("descents", descents)):
        kernels = import_module(f"pw_kernels.triton_{name}")
        assert module._agrees(kernels, torch.device("cuda")), name
        print(f"{name}: equal", flush=True)


def dense() -> None:
    x, ids = torch.randn(20, 96).bfloat16().cuda(), torch.randint(0, 4, (20, 2)).cuda()
    gate_up, down = torch.randn(4, 128, 96) / 10, torch.randn(4, 96, 64) / 8
    args = (x, ids, torch.rand(20, 2).cuda(), gate_up.bfloat16().cuda(), down.bfloat16().cuda())
    got = cuda_dense.dense_moe(*args, activation="silu")
    wide = [each.float() if each.is_floating_point() else each for each in args]
    near(got, reference_dense.dense_moe(*wide, activation="silu"), "dense")


FAMILIES: dict[str, Callable[[], None]] = {
    "decode": decode, "routing": decode, "router": partial(routers, "router"),
    "choice": partial(routers, "choice"), "prompts": prompts, "arrange": prompts, "expand": expand,
    **{name: partial(few_rows, name.partition("-")[2]) for name in KERNELS if "products" in name},
    "attention": attention, "joint-attention": joint_attention, "triton-moe": triton_experts,
    "triton-attention": partial(attention, triton_attention), "triton-step": steps,
    "triton-offline": offline, "dense": dense,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("family", choices=FAMILIES)
    torch.manual_seed(0)
    FAMILIES[parser.parse_args().family]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
