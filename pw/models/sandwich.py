"""The flat forward pass of Gemma 4: norms before and after each branch, experts beside an MLP.

    x += norm(attention(norm(x)))
    x  = (x + norm(norm(mlp(norm(x))) + norm(experts(norm(x), router(x))))) * scalar

Each layer hands on the residual and its norm for the next one, which one launch makes on a GPU
(`pw_kernels.sandwich`). See `pw.models.flat`.

Axes: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from pw.models.attention import AttentionContext
from pw.models.beside import FEW, Beside, pays, side_stream
from pw.models.decoder import Decoder, Rotary, Turn
from pw.models.flat_attention import FlatAttention
from pw.models.flat_parts import GatedMlp, reduction, run_experts
from pw.models.fusion import epsilon_of
from pw.models.routers import fused_route
from pw_kernels import products, routers, sandwich, step
from pw_kernels.sandwich import NormedSum, normed_sum
from pw_kernels.slots import SlotResults


class SandwichDecoder(Decoder):
    """See `Decoder`.

    Raises:
        ValueError: Layers share keys or have inputs of their own, which models without routed
            experts do.
    """

    def __init__(self, model: Any, kernels: bool | None = None) -> None:
        super().__init__(model, kernels)
        base, config = model.model, model.config
        if config.num_kv_shared_layers or config.hidden_size_per_layer_input:
            raise ValueError("layers share keys or have inputs of their own")
        self._scale = float(base.embed_tokens.embed_scale.to(self.dtype))
        self._rotaries = {
            kind: Rotary(base.rotary_emb, self._head, self._kernels, kind)
            for kind in sorted(set(config.layer_types))
        }
        self._kinds: list[str] = list(config.layer_types)
        first = base.layers[0].input_layernorm
        self._first, self._epsilon = first.weight, epsilon_of(first)
        following = [*(layer.input_layernorm for layer in base.layers[1:]), base.norm]
        self._layers = [
            _Layer(layer, norm, self._kernels)
            for layer, norm in zip(base.layers, following, strict=True)
        ]
        cap = config.final_logit_softcapping
        self._cap = None if cap is None else float(cap)

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        keep: Tensor | None = None,
    ) -> Tensor:
        """See `Skeleton.hidden`."""
        x = embedding(input_ids, self._embedding) * self._scale
        turns = {kind: rotary(x, positions) for kind, rotary in self._rotaries.items()}
        normed = step.rms_norm(x, self._first, self._epsilon)
        for layer, kind in zip(self._layers, self._kinds, strict=True):
            x, normed = layer(x, normed, turns[kind], context)
        return normed if keep is None else normed.index_select(0, keep)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Skeleton.logits`."""
        logits = super().logits(hidden)
        return logits if self._cap is None else sandwich.softcap(logits, self._cap)


class _Layer:
    """One decoder layer on x [T, H] and its norm.

    Args:
        layer: transformers' module.
        following: The norm of what reads its result.
        kernels: As for a GPU.
    """

    def __init__(self, layer: Any, following: Any, kernels: bool) -> None:
        self._attention = FlatAttention(layer.self_attn, None, kernels)
        self._out = _Product(layer.self_attn.o_proj, kernels)
        self._gated = GatedMlp(layer.mlp, None, kernels)
        self._down = _Product(layer.mlp.down_proj, kernels)
        router, self._experts = layer.router, layer.experts
        route = fused_route(router, layer.mlp.gate_proj.weight.dtype)
        if route is None:
            raise ValueError("the router does something else")
        self._routing = replace(route.routing, widened=True)
        self._reduce = reduction(layer.experts)
        before = [
            layer.pre_feedforward_layernorm.weight,
            router.scale * router.scalar_root_size,
            layer.pre_feedforward_layernorm_2.weight,
        ]
        modules = [layer.post_attention_layernorm, layer.pre_feedforward_layernorm]
        modules += [layer.pre_feedforward_layernorm_2, router]
        self._middle = _joint(modules[:1], before, modules)
        modules = [layer.post_feedforward_layernorm_1, layer.post_feedforward_layernorm_2]
        modules += [layer.post_feedforward_layernorm]
        scale = float(layer.layer_scalar)
        self._end = _joint(modules, [following.weight], [*modules, following], scale)
        self._kernels = kernels
        self._beside: Beside | None = None
        self._urgent: Beside | None = None
        if self._reduce is None and self._gated.is_plain:
            device = following.weight.device
            self._beside, self._urgent = side_stream(device), side_stream(device, urgent=True)

    def __call__(
        self, x: Tensor, normed: Tensor, turn: Turn, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """The next residual [T, H] and its norm."""
        heads = self._attention(normed, turn, context)
        x, (dense, router, experts) = normed_sum(x, self._out(heads), None, self._middle)
        if self._beside is not None and self._beside.open and pays(len(x)):
            with self._beside.apart():
                first = self._down(self._gated.activated_beside(dense), beside=True)
            second = self._routed(router, experts)
            self._beside.meet()
        elif self._urgent is not None and self._urgent.open and self._takes_few(router):
            with self._urgent.apart():
                second = self._routed(router, experts)
            first = self._down(self._gated.activated_beside(dense), beside=True)
            self._urgent.meet()
        else:
            first = self._down(self._gated(dense).out)
            second = self._routed(router, experts)
        x, (normed,) = normed_sum(x, first, second, self._end)
        return x, normed

    def _takes_few(self, router: Tensor) -> bool:
        """Whether experts go first: the launch where they leave the stream waits itself then."""
        routing = self._routing
        return len(router) <= FEW and routers.is_one_launch(router, routing.weight, 0, routing)

    def _routed(self, router: Tensor, experts: Tensor) -> Tensor | SlotResults:
        """What the experts give, of the rows that the router reads and those that they do."""
        routing = self._routing
        ids, weights, *_ = routers.choice(router, routing.weight, 0, routing)
        summed = not self._kernels or self._reduce is not None
        routed = run_experts(self._experts, experts, ids, weights, summed=summed)
        if self._reduce is None:
            return routed
        assert isinstance(routed, Tensor)
        return self._reduce(routed)


class _Product:
    """A linear map; where it is a rank's part, its results are summed up."""

    def __init__(self, module: Any, kernels: bool) -> None:
        self._weight: Tensor = module.weight
        self._bias: Tensor | None = module.bias
        self._reduce, self._kernels = reduction(module), kernels

    def __call__(self, x: Tensor, *, beside: bool = False) -> Tensor:
        """Rows of x, mapped; `beside`: see `products.product`."""
        if self._kernels:
            out = products.product(x, self._weight, self._bias, beside=beside)
        else:
            out = linear(x, self._weight, self._bias)
        return out if self._reduce is None else self._reduce(out)


def _joint(
    branches: Sequence[Any], following: Sequence[Tensor], modules: Sequence[Any], scale: float = 1.0
) -> NormedSum:
    """A sum of branches with the norms' own weights.

    Args:
        branches: Norms.
        following: Weights of others.
        modules: All that say what is added to a mean square.
        scale: Of the sum.

    Raises:
        ValueError: They do not say the same.
    """
    epsilons = {epsilon_of(module) for module in modules}
    if len(epsilons) != 1:
        raise ValueError(f"norms of a layer add {sorted(epsilons)}")
    norms = torch.stack([norm.weight for norm in branches])
    return NormedSum(norms, torch.stack(list(following)), epsilons.pop(), scale)
