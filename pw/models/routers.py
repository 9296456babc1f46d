"""Routers as one kernel: what a router module does, read off its attributes and tried out.

transformers' routers differ in a few choices (`pw_kernels.step.Routing` lists them). A module that
looks like one of the known kinds is run on random hidden states beside the kernel; only one that
sends every token to the same experts with the same weights is replaced. All others keep their code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pw.models.experts import expert_modules
from pw_kernels import step
from pw_kernels.step import Routing

_log = logging.getLogger(__name__)
_TRIALS = 64  # tokens
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

Prepare = Callable[[Tensor], Tensor]  # [T, H] -> what the logits are made of, [T, H]


@dataclass(frozen=True)
class Route:
    """What a router does.

    Attributes:
        routing: How, from what `prepare` makes of the hidden states.
        prepare: None: of the hidden states themselves.
        backend: One of `pw_kernels.step.BACKENDS`.
    """

    routing: Routing
    prepare: Prepare | None
    backend: str

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [T, H] -> ids [T, k] int64, weights [T, k]."""
        x = x if self.prepare is None else self.prepare(x)
        return step.route(x, self.routing, backend=self.backend)

    @property
    def joins(self) -> bool:
        """Whether the logits are a plain product, which may be part of a larger one."""
        routing = self.routing
        return self.prepare is None and routing.bias is None and not routing.wide


def router_of(model: nn.Module, experts: str) -> nn.Module | None:
    """The router beside the experts module at a path; None where there is none, or several."""
    parent = model.get_submodule(experts.rpartition(".")[0])
    found = [child for child in parent.children() if "Router" in type(child).__name__]
    return found[0] if len(found) == 1 else None


def fused_route(router: Any, dtype: torch.dtype, *, backend: str = "auto") -> Route | None:
    """What a router does, as one kernel; None if that is not known.

    Args:
        router: A router module of transformers with its weights.
        dtype: Of the hidden states.
        backend: One of `pw_kernels.step.BACKENDS`.
    """
    try:
        return _route(router, dtype, backend)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


def fuse_routers(model: Any, *, backend: str = "auto") -> int:
    """Replace the forward passes of routers that are known; how many."""
    fused = 0
    for name, _ in expert_modules(model):
        router = router_of(model, name)
        route = None if router is None else fused_route(router, model.dtype, backend=backend)
        if router is None or route is None:
            _log.warning("the router beside `%s` keeps its own code", name)
            continue
        router.__dict__["forward"] = _Replacement(route)
        fused += 1
    return fused


class _Replacement:
    """The forward pass of a router: logits, which nobody reads, weights, ids."""

    def __init__(self, route: Route) -> None:
        self._route = route

    def __call__(self, hidden: Tensor) -> tuple[None, Tensor, Tensor]:
        ids, weights = self._route(hidden.reshape(-1, hidden.shape[-1]))
        return None, weights, ids


def _route(router: Any, dtype: torch.dtype, backend: str) -> Route | None:
    """The kernel with what a router says of itself, in the variant that does what it does.

    Raises:
        AttributeError, TypeError, ValueError: It says something else.
    """
    x = _hidden_states(router, dtype)
    ids, weights = _own(router, x)
    expected = _spread(ids, weights, _experts(router))
    for routing, prepare in _variants(router, weights.dtype):
        route = Route(routing, prepare, backend)
        with torch.inference_mode():
            found = route(x)
        tolerance = _TOLERANCE[dtype]
        same = torch.isclose(_spread(*found, len(expected[0])), expected, tolerance, tolerance)
        wanted = 1.0 if dtype == torch.float32 else 0.9  # of the tokens: rounding may turn a tie
        if found[1].dtype == weights.dtype and float(same.all(1).float().mean()) >= wanted:
            return route
    return None


def _variants(router: Any, dtype: torch.dtype) -> Iterator[tuple[Routing, Prepare | None]]:
    """What a router may do with its weights, likeliest first, and what comes before."""
    if hasattr(router, "proj"):  # Gemma 4: a norm, a scale of each column, a scale of each expert
        scale = router.scale * router.scalar_root_size
        epsilon = float(router.eps)
        yield (
            Routing(
                router.proj.weight,
                int(router.config.top_k_experts),
                dtype,
                normalize=True,
                expert_scale=router.per_expert_scale,
            ),
            lambda x: step.rms_norm(x, scale, epsilon),
        )
        return
    options: dict[str, Any] = {"normalize": bool(getattr(router, "norm_topk_prob", False))}
    options["bias"] = getattr(router, "bias", None)
    options["scale"] = float(getattr(router, "routed_scaling_factor", 1.0))
    options["wide"] = hasattr(router, "routed_scaling_factor")  # the DeepSeek family computes fp32
    if hasattr(router, "e_score_correction_bias"):
        options |= {"score": "sigmoid", "choice_bias": router.e_score_correction_bias}
    groups = int(getattr(router, "num_group", None) or 1)
    if groups > 1 and getattr(router, "topk_method", "") != "greedy":
        options |= {"groups": groups, "chosen_groups": int(router.topk_group)}
        options["pairs"] = "choice_bias" in options
    variants: tuple[dict[str, Any], ...] = ({}, {"normalize": True})
    if "score" not in options:
        variants += ({"score": "none", "normalize": False},)
    for variant in variants:
        routing = Routing(router.weight, int(router.top_k), dtype, **(options | variant))
        yield routing, None


def _experts(router: Any) -> int:
    weight: Tensor = router.proj.weight if hasattr(router, "proj") else router.weight
    return weight.shape[0]


def _hidden_states(router: Any, dtype: torch.dtype) -> Tensor:
    """Random [_TRIALS, H]."""
    weight: Tensor = router.proj.weight if hasattr(router, "proj") else router.weight
    generator = torch.Generator().manual_seed(weight.shape[1])
    return torch.randn(_TRIALS, weight.shape[1], generator=generator).to(weight.device, dtype)


@torch.inference_mode()
def _own(router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights by the module's own code."""
    _, weights, ids = type(router).forward(router, x)
    return ids, weights


def _spread(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Weights by expert [T, E], whatever their order."""
    return torch.zeros(len(ids), experts, device=ids.device).scatter_(1, ids, weights.float())
