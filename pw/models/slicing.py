"""The dense weights of one of several ranks: attention by heads, MLPs by inner columns.

Where there are fewer KV heads than ranks, several ranks have the same one, that of their queries.

Maps that read the whole hidden state are cut by outputs (queries, keys, values, gate, up), maps
that give it back are cut by inputs (attention output, down): a rank's results of these are partial
sums, and the module carries `pw_reduce`, which adds them up over the ranks in place. Everything
else, the router, norms, embedding and head, is whole on every rank.

    x -> q, k, v of own heads -> attention -> own columns of o_proj -> sum over the ranks
    x -> own rows of gate, up -> act       -> own columns of down   -> sum over the ranks

Knows module names and shapes, no processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from pw.errors import ConfigError, ModelError
from pw.models.architecture import Architecture
from pw.models.experts import expert_modules
from pw.models.geometry import KvGeometry


class AllReduce(Protocol):
    """The sum over the ranks."""

    def __call__(self, tensor: Tensor, add: Tensor | None = None) -> Tensor:
        """Of a rank's part, plus `add` where it is given; the part's memory may be the result's."""


_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
_BY_INPUTS = "o_proj"
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
_BY_KV_HEADS = ("k_proj", "v_proj")  # of _BY_OUTPUTS
_PER_HEAD = ("sinks",)  # parameters of attention with a number for each query head
_MLP = {"gate_proj", "up_proj", "down_proj"}
_MOST_NAMED = 16  # ranks that a hint names


class Reduction:
    """Adds partial sums up over the ranks, in place; leaves them alone until it is connected.

    Modules keep it for life, so that it can be handed out before the ranks have met.
    """

    def __init__(self) -> None:
        self._all_reduce: AllReduce | None = None

    def connect(self, all_reduce: AllReduce) -> None:
        """Add up with this from now on."""
        self._all_reduce = all_reduce

    def __call__(self, partial: Tensor, add: Tensor | None = None) -> Tensor:
        """The sum over the ranks, which may be in the memory of `partial`, plus `add`."""
        if self._all_reduce is not None:
            return self._all_reduce(partial, add)
        return partial if add is None else add + partial

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Leave partial sums alone in here, and wait for no other rank."""
        connected, self._all_reduce = self._all_reduce, None
        try:
            yield
        finally:
            self._all_reduce = connected


@contextlib.contextmanager
def ranks_apart(model: nn.Module) -> Iterator[None]:
    """Let a rank run its part of a model in here without the others: the results mean nothing."""
    found = {module.__dict__.get("pw_reduce") for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for reduction in found:
            if isinstance(reduction, Reduction):
                stack.enter_context(reduction.apart())
        yield


@dataclass(frozen=True)
class _Cut:
    """Of a parameter: the axis along which it is cut; None: only rank 0 has it at all."""

    axis: int | None
    parts: int
    mine: int


class DensePart:
    """What one rank keeps of the dense weights of a model.

    Args:
        architecture: The model's.
        rank: 0 to size - 1.
        size: How many ranks share the model.
        reduction: Goes to the modules whose results are partial.

    Raises:
        ConfigError: Heads or inner sizes are no multiples of `size`.
        ModelError: An attention that cannot be cut by heads.
    """

    def __init__(
        self, architecture: Architecture, rank: int, size: int, reduction: Reduction
    ) -> None:
        self._rank, self._size = rank, size
        self._reduction = reduction
        self._cuts: dict[str, _Cut] = {}
        self._partial: list[str] = []  # linear maps cut by inputs
        model = architecture.meta
        self._check_heads(architecture)
        kv_heads = {layer.layer: layer.kv_heads for layer in architecture.probe.kv.layers}
        for name, binding in architecture.probe.bindings.items():
            self._cut_attention(name, model.get_submodule(name), kv_heads[binding.layer])
        experts = tuple(f"{name}." for name in architecture.experts)
        for name, module in model.named_modules():
            routed = f"{name}.".startswith(experts)
            if not routed and set(dict(module.named_children())) >= _MLP:
                self._cut_mlp(name, module)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter, given its path in the model and all of it."""
        cut = self._cuts.get(name)
        if cut is None:
            return tensor
        if cut.axis is None:
            return tensor if self._rank == 0 else tensor.new_zeros(tensor.shape)
        part: Tensor = tensor.chunk(cut.parts, cut.axis)[cut.mine]
        return part.clone()  # the rest is not to be kept alive

    def kv(self, geometry: KvGeometry) -> KvGeometry:
        """Keys and values that this rank stores."""
        size = self._size
        layers = (replace(x, kv_heads=max(1, x.kv_heads // size)) for x in geometry.layers)
        return KvGeometry(tuple(layers))

    def bind(self, model: Any) -> None:
        """Prepare a model whose parameters have been cut: sizes, and sums where they are due."""
        for name in self._cuts:
            module = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
        for name in self._partial:
            module = model.get_submodule(name)
            module.__dict__["pw_reduce"] = self._reduction
            module.register_forward_hook(lambda _module, _inputs, out: self._reduction(out))
        for _, module in expert_modules(model):
            module.__dict__["pw_reduce"] = self._reduction

    def _check_heads(self, architecture: Architecture) -> None:
        size, config = self._size, architecture.config
        heads = int(config.num_attention_heads)
        if heads % size:
            raise ConfigError(
                f"{heads} attention heads cannot be shared evenly by {size} ranks",
                sizes_that_divide(heads),
            )
        for layer in architecture.probe.kv.layers:
            if layer.kv_heads % size and size % layer.kv_heads:
                raise ConfigError(
                    f"{layer.kv_heads} KV heads of layer {layer.layer} cannot be shared evenly by "
                    f"{size} ranks",
                    "use a --tensor-parallel-size that divides them, or a multiple of them",
                )

    def _cut_attention(self, name: str, module: nn.Module, kv_heads: int) -> None:
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf in _PER_HEAD:
                self._cuts[f"{name}.{leaf}"] = self._cut(0)
            else:
                raise _cannot(name, f"a parameter `{leaf}` {list(parameter.shape)}")
        for leaf, child in module.named_children():
            if leaf in _BY_OUTPUTS:
                parts = min(self._size, kv_heads) if leaf in _BY_KV_HEADS else self._size
                self._by_outputs(f"{name}.{leaf}", child, parts)
            elif leaf == _BY_INPUTS:
                self._by_inputs(f"{name}.{leaf}", child)
            elif isinstance(child, nn.Linear) and leaf not in _WHOLE:
                raise _cannot(name, f"a linear map `{leaf}`")
        self._check_norms(name, module)

    @staticmethod
    def _check_norms(name: str, module: Any) -> None:
        """Norms of queries and keys must be norms of each head."""
        for leaf in ("q_norm", "k_norm"):
            weight = getattr(getattr(module, leaf, None), "weight", None)
            if weight is not None and len(weight) != int(module.head_dim):
                raise _cannot(name, f"`{leaf}` over {len(weight)} numbers, all heads together")

    def _cut_mlp(self, name: str, module: nn.Module) -> None:
        for leaf, child in module.named_children():
            if leaf == "down_proj":
                self._by_inputs(f"{name}.{leaf}", child)
            elif leaf in _MLP:
                self._by_outputs(f"{name}.{leaf}", child, self._size)

    def _by_outputs(self, name: str, module: Any, parts: int) -> None:
        self._check_size(name, module.weight.shape[0], parts)
        for leaf, _ in module.named_parameters():
            self._cuts[f"{name}.{leaf}"] = self._cut(0, parts)

    def _by_inputs(self, name: str, module: Any) -> None:
        self._check_size(name, module.weight.shape[1], self._size)
        self._cuts[f"{name}.weight"] = self._cut(1)
        if module.bias is not None:
            self._cuts[f"{name}.bias"] = self._cut(None)
        self._partial.append(name)

    def _cut(self, axis: int | None, parts: int | None = None) -> _Cut:
        """A part for each rank, or fewer: then neighbours have the same one."""
        parts = parts or self._size
        return _Cut(axis, parts, self._rank * parts // self._size)

    def _check_size(self, name: str, extent: int, parts: int) -> None:
        if extent % parts:
            raise ConfigError(
                f"{extent} numbers of `{name}` cannot be shared evenly by {self._size} ranks",
                sizes_that_divide(extent),
            )


def sizes_that_divide(count: int) -> str:
    """A hint: how many ranks share so many things evenly, up to a machine's worth of them."""
    sizes = [str(size) for size in range(1, _MOST_NAMED + 1) if count % size == 0]
    among = f"{', '.join(sizes[:-1])} or " if len(sizes) > 1 else ""
    return f"use --tensor-parallel-size {among}{sizes[-1]}"


def _cannot(name: str, what: str) -> ModelError:
    return ModelError(
        f"attention cannot be shared by heads: `{name}` has {what}",
        "serve this model with --tensor-parallel-size 1",
    )
