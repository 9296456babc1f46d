"""Norms, MLPs and experts of the flat forward passes (`pw.models.flat`), most with their residual.

Axes: T tokens, H hidden, I inner, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from pw.models.beside import FEW, MOST, Beside, pays, side_stream
from pw.models.experts import activation_name, is_joined
from pw.models.fusion import concatenate
from pw.models.routers import Route, fused_route
from pw.models.slicing import AllReduce
from pw_kernels import products, routers, step
from pw_kernels.products import Gated
from pw_kernels.slots import Choice, SlotResults, chosen
from pw_kernels.step import Norm

_FEWEST_WHOLE = 5  # tokens whose router and choice are quicker as one launch


class FlatNorm:
    """RMS norm: one kernel on a GPU, five small calls on a CPU, where torch's own takes ten.

    Attributes:
        joined: What a product needs that takes it along.
    """

    def __init__(self, module: Any, kernels: bool) -> None:
        weight: Tensor = module.weight
        self._kernel = kernels
        size, self._epsilon = weight.shape[0], float(module.variance_epsilon)
        self._weight = weight
        self.joined = Norm(weight, self._epsilon)
        on_cpu = weight.device.type == "cpu"
        self._split = not kernels and on_cpu and weight.dtype == torch.float32
        if self._split:
            self._offset = weight.new_full((1, 1), self._epsilon)
            self._mean = weight.new_full((size, 1), 1 / size)

    def __call__(self, x: Tensor) -> Tensor:
        """Rows of x, normed."""
        if self._split:
            return x * torch.addmm(self._offset, x * x, self._mean).rsqrt_() * self._weight
        if self._kernel:
            return step.rms_norm(x, self._weight, self._epsilon)
        return rms_norm(x, self._weight.shape, self._weight, self._epsilon)


class Residual:
    """`x + linear(y)` in one call; where the product is a rank's part, it is summed up first."""

    def __init__(self, module: Any, kernels: bool) -> None:
        self._weight: Tensor = module.weight
        self._bias: Tensor | None = module.bias
        self._reduce = reduction(module)
        self._kernels = kernels

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """[T, H] of x [T, H] and y [T, K]."""
        if self._reduce is not None:
            multiply = products.product if self._kernels else linear
            return self._reduce(multiply(y, self._weight, self._bias), x)
        if self._kernels:
            return products.product(y, self._weight, self._bias, add=(x,))
        out = torch.addmm(x, y, self._weight.t())
        return out if self._bias is None else out + self._bias


class GatedMlp:
    """act(gate(y)) * up(y) of y = norm(x): the two projections, and others of y, as one product.

    Without a norm, rows come normed.
    """

    def __init__(self, module: Any, norm: FlatNorm | None, kernels: bool, *others: Any) -> None:
        self._in = concatenate([module.gate_proj, module.up_proj, *others])
        self.weight, self.bias = self._in
        self._norm = norm
        self._inner = module.gate_proj.out_features
        rest = len(self._in[0]) - 2 * self._inner  # of the others, and padding
        self._sizes = [self._inner, self._inner, rest]
        name = activation_name(module.act_fn)
        self._kernel = name if kernels else None
        self._function: Callable[[Tensor], Tensor] = silu if name == "silu" else module.act_fn

    def __call__(self, x: Tensor) -> Gated:
        """What the others gave side by side, then padding, is `rest`."""
        weight, bias = self._in
        if self._kernel is not None:
            norm = None if self._norm is None else self._norm.joined
            return products.gated_product(x, weight, self._inner, self._kernel, bias, norm=norm)
        y = x if self._norm is None else self._norm(x)
        gate, up, rest = torch.split(linear(y, weight, bias), self._sizes, -1)
        return Gated(self._function(gate) * up, rest, y)

    @property
    def is_plain(self) -> bool:
        """Whether `out` can be had alone: of no bias, with an activation that the kernels know."""
        return self._kernel is not None and self.bias is None

    def activated(self, y: Tensor) -> Tensor:
        """`out` alone, of normed rows; see `is_plain`."""
        assert self._kernel is not None
        return products.gated_product(y, self._gates, self._inner, self._kernel).out

    def activated_beside(self, x: Tensor) -> Tensor:
        """As `activated`, of few rows before their norm if there is one, beside other launches."""
        assert self._kernel is not None
        norm = None if self._norm is None else self._norm.joined
        return products.gated_product(
            x, self._gates, self._inner, self._kernel, norm=norm, beside=True
        ).out

    def takes_norm(self, x: Tensor) -> bool:
        """Whether `activated_beside` is one launch."""
        return products.takes_norm(x, self._gates, self._inner)

    @property
    def _gates(self) -> Tensor:
        return self.weight[: 2 * self._inner]

    @property
    def others(self) -> Tensor:
        """Rows of the weight that make `rest`."""
        return self.weight[2 * self._inner :]


class Mlp:
    """Gated MLP with its residual."""

    def __init__(self, module: Any, norm: FlatNorm, kernels: bool) -> None:
        self._gated = GatedMlp(module, norm, kernels)
        self._down = Residual(module.down_proj, kernels)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> same."""
        return self._down(x, self._gated(x).out)


class Moe:
    """Routed experts, a gated shared expert where there is one, and the residual."""

    def __init__(self, block: Any, norm: FlatNorm, kernels: bool) -> None:
        self._router: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = block.gate.forward
        self._experts = block.experts
        self._norm, self._kernels = norm, kernels
        self._reduce = reduction(block.experts)
        route = fused_route(block.gate, block.experts.gate_up_proj.dtype) if kernels else None
        self._joined = route is not None and route.joins  # the router's product is part of another
        self._gated: GatedMlp | None = None
        if hasattr(block, "shared_expert"):
            others = [block.shared_expert_gate, *([block.gate] if self._joined else [])]
            self._gated = GatedMlp(block.shared_expert, norm, kernels, *others)
            self._down: Tensor = block.shared_expert.down_proj.weight
        self._beside: Beside | None = None
        self._urgent: Beside | None = None
        whole = self._joined and self._reduce is None
        if self._gated is not None and self._gated.is_plain and whole:
            self._beside = side_stream(self._down.device)
            self._urgent = side_stream(self._down.device, urgent=True)
        if route is not None:  # the weight may be a view by now; experts want fp32
            routing = replace(route.routing, weight=block.gate.weight, widened=True)
            route = replace(route, routing=routing)
        self._route: Route | None = route

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> same."""
        if self._gated is None:
            if self._reduce is not None:
                return self._reduce(self._routed(*self._choose(x)), x)
            routed = self._routed_slots(*self._choose(x), summed=not self._kernels)
            return step.add_slots(x, routed) if isinstance(routed, SlotResults) else x + routed
        if self._beside is not None and self._beside.open and pays(len(x)):
            return self._both(x, self._gated, self._beside)
        if self._urgent is not None and self._urgent.open and self._takes_few(x, self._gated):
            return self._few(x, self._gated, self._urgent)
        shared = self._gated(x)
        share = shared.rest[:, :1]
        ids: Tensor | Choice
        weights: Tensor | None
        if self._route is not None and self._joined:
            logits = shared.rest[:, 1 : 1 + len(self._route.routing.weight)]
            ids, weights = routers.choose(logits, self._route.routing)
        else:
            ids, weights = self._by_router(shared.normed)
        if self._kernels and self._reduce is None:
            summed = not products.takes_slots(shared.out, self._down)
            parts = self._routed_slots(shared.normed, ids, weights, summed=summed)
            return products.product(shared.out, self._down, add=(x, parts), share=share)
        routed = self._routed(shared.normed, ids, weights)
        if self._reduce is not None:  # one sum over the ranks for all that is added to x
            added = torch.addcmul(routed, share.sigmoid(), linear(shared.out, self._down))
            return self._reduce(added, x)
        return torch.addcmul(x + routed, share.sigmoid(), linear(shared.out, self._down))

    def _both(self, x: Tensor, gated: GatedMlp, beside: Beside) -> Tensor:
        """The shared expert beside the routed ones, which leave much of memory idle."""
        assert self._route is not None
        y = self._norm(x)
        with beside.apart():
            shared = products.product(gated.activated(y), self._down, beside=True)
        ids, weights, share, _ = routers.choice(y, gated.others, 1, self._route.routing)
        routed = self._routed(y, ids, weights)
        beside.meet()
        return step.join(x, routed, shared, share)

    def _takes_few(self, x: Tensor, gated: GatedMlp) -> bool:
        """Whether `_few` takes a batch: each launch where its streams part or meet waits itself."""
        assert self._route is not None
        routing = self._route.routing
        return (
            1 < len(x) <= FEW  # one token is as quick or quicker on one stream: docs/decode.md
            and routers.is_one_launch(x, gated.others, 1, routing)
            and gated.takes_norm(x)
        )

    def _few(self, x: Tensor, gated: GatedMlp, urgent: Beside) -> Tensor:
        """As `_both` for few tokens: both take the norm along, and the routed experts go first."""
        assert self._route is not None
        norm = self._norm.joined
        with urgent.apart():
            made = routers.choice(x, gated.others, 1, self._route.routing, norm, beside=True)
            routed = self._routed_slots(made.normed, made.ids, made.weights, summed=False)
        shared = products.product(gated.activated_beside(x), self._down, beside=True)
        urgent.meet()
        return step.join(x, routed, shared, made.others)

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor | Choice, Tensor | None]:
        """The norm of x, and experts and weights of its tokens."""
        if self._route is None or not self._joined:
            normed = self._norm(x)
            return (normed, *self._by_router(normed))
        routing, norm = self._route.routing, self._norm.joined
        if _FEWEST_WHOLE <= len(x) <= MOST:
            made = routers.choice(x, routing.weight, 0, routing, norm)
            return made.normed, made.ids, made.weights
        _, logits, normed = products.gated_product(x, routing.weight, 0, "silu", norm=norm)
        return (normed, *routers.choose(logits, routing))

    def _by_router(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        if self._route is not None:
            return self._route(normed)
        _, weights, ids = self._router(normed)
        return ids, weights

    def _routed(self, normed: Tensor, ids: Tensor | Choice, weights: Tensor | None) -> Tensor:
        """[T, H], summed over the experts of a token."""
        routed = self._routed_slots(normed, ids, weights, summed=True)
        assert isinstance(routed, Tensor)
        return routed

    def _routed_slots(
        self, normed: Tensor, ids: Tensor | Choice, weights: Tensor | None, *, summed: bool
    ) -> Tensor | SlotResults:
        """[T, H]; not `summed`: without the sum over a token's experts, where they can do so."""
        return run_experts(self._experts, normed, ids, weights, summed=summed)


def run_experts(
    experts: Any, x: Tensor, ids: Tensor | Choice, weights: Tensor | None, *, summed: bool
) -> Tensor | SlotResults:
    """What is bound to a module of experts, on rows [T, H]: see `JoinedExperts.joined`."""
    run: Any = experts.pw_experts
    if is_joined(run):
        return run.joined(experts.pw_slot, experts, x, ids, weights, summed=summed)
    routed: Tensor = run(experts.pw_slot, experts, x, *chosen(ids, weights))
    return routed


def reduction(module: nn.Module) -> AllReduce | None:
    """How a rank's partial result of a module is summed up; None where it is the whole."""
    return module.__dict__.get("pw_reduce")
