"""The model without its routed experts: real dense weights, experts left on `meta`.

Experts and attention come from outside: `bind_experts` and the `pw_context` of each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pw.blocks import ExpertGeometry
from pw.errors import ModelError
from pw.models.architecture import Architecture, text_model
from pw.models.attention import NAME as ATTENTION
from pw.models.attention import AttentionContext, bind_attention
from pw.models.beside import fork_shared_experts, side_stream
from pw.models.checkpoint import Checkpoint
from pw.models.decoder import Decoder
from pw.models.experts import NAME as EXPERTS
from pw.models.experts import (
    Activation,
    ExpertsFunction,
    activation_of,
    bind_experts,
    expert_modules,
    gate_first,
)
from pw.models.flat import flat_decoder
from pw.models.flat_attention import fuse_attention
from pw.models.fusion import fuse_linears, fuse_norms
from pw.models.geometry import KvGeometry
from pw.models.header import some
from pw.models.routers import fuse_routers
from pw.models.slicing import DensePart


@dataclass(frozen=True)
class Skeleton:
    """A loaded model that needs experts and an attention context to run."""

    model: Any  # transformers' PreTrainedModel
    geometry: ExpertGeometry
    kv: KvGeometry
    dtype: torch.dtype
    device: torch.device
    dense_bytes: int  # of all loaded tensors, each once
    activations: tuple[Activation, ...]  # of the routed experts, per slot
    # of the routed experts, per slot: gate_up [E, 2I] gate first, down [E, H]
    biases: tuple[tuple[Tensor | None, Tensor | None], ...]
    vocab_size: int
    hidden_size: int
    max_model_len: int  # tokens that the model states as its limit

    flat: Decoder | None  # a faster forward pass with the same result, where there is one

    @property
    def ends_bytes(self) -> int:
        """Bytes of embedding and head, once if they are one."""
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        weights = {end.weight.data_ptr(): end.weight.nbytes for end in ends}
        return sum(weights.values())

    def bind_experts(self, function: ExpertsFunction) -> None:
        """Let every MoE layer call `function(slot, module, x, ids, weights)`."""
        bind_experts(self.model, function)

    def forward(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64, each within its own sequence
        context: AttentionContext,
        keep: Tensor,  # [n] int64, indices of the tokens whose logits are wanted
    ) -> Tensor:
        """Logits [n, vocab] of a packed batch of chunks of several sequences."""
        return self.logits(self.hidden(input_ids, positions, context, keep))

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        keep: Tensor | None = None,  # None: all tokens
    ) -> Tensor:
        """What `forward` makes logits of: [n, H], a small part of their bytes."""
        if self.flat is not None:
            return self.flat.hidden(input_ids, positions, context, keep)
        return _general_hidden(self.model, input_ids, positions, context, keep)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of any rows of `hidden` [n, H]."""
        if self.flat is not None:
            return self.flat.logits(hidden)
        return _general_logits(self.model, hidden)


def general_forward(
    model: Any, input_ids: Tensor, positions: Tensor, context: AttentionContext, keep: Tensor
) -> Tensor:
    """`Skeleton.forward` through transformers' own forward pass."""
    return _general_logits(model, _general_hidden(model, input_ids, positions, context, keep))


def _general_hidden(
    model: Any, input_ids: Tensor, positions: Tensor, context: AttentionContext, keep: Tensor | None
) -> Tensor:
    output = model.base_model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        pw_context=context,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden if keep is None else hidden.index_select(0, keep)


def _general_logits(model: Any, hidden: Tensor) -> Tensor:
    """Head of a model, with whatever it does to the logits after it."""
    ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)  # only counted
    output = model(input_ids=ids, pw_hidden=hidden.unsqueeze(0), use_cache=False)
    logits: Tensor = output.logits[0]
    return logits


class _OnlyHidden:
    """Output of layers that were not run: a hidden state, and None for all else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None


def _split_head(model: Any) -> None:
    """Let `model(pw_hidden=h)` begin behind the layers, with h [1, n, H]."""
    base = model.base_model
    layers = base.forward

    def forward(*args: Any, pw_hidden: Tensor | None = None, **options: Any) -> Any:
        if pw_hidden is None:
            return layers(*args, **options)
        return _OnlyHidden(pw_hidden)

    base.forward = forward


def load_skeleton(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    part: DensePart | None = None,
    *,
    plain: bool = False,
) -> Skeleton:
    """Load everything but the routed experts, cast to `dtype`.

    Args:
        checkpoint: Where the weights are.
        dtype: Of weights and activations.
        device: Where they go.
        part: What to keep of them, where several ranks share the model.
        plain: See `finish`.

    Raises:
        ModelError: A tensor of the model is neither on disk nor tied to one that is.
    """
    device = torch.device(device)
    model = build(checkpoint.architecture, dtype, attention=ATTENTION, experts=EXPERTS)
    load_tensors(model, checkpoint, checkpoint.keymap.dense, dtype, device, part)
    model.tie_weights()
    _check_loaded(model)
    return finish(model, checkpoint.architecture, dtype, device, part, plain=plain)


def finish(
    model: Any,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    part: DensePart | None = None,
    *,
    plain: bool = False,
) -> Skeleton:
    """Make a skeleton of a model whose dense weights, or a rank's part of them, are in place.

    Plain: transformers' own code, in which torch follows gradients; nothing is fused.
    """
    if part is not None:
        part.bind(model)
    if device.type == "cpu" and dtype == torch.float32:
        _store_by_column(model)
    bind_attention(model, architecture.probe.bindings)
    _split_head(model)
    modules = [module for _, module in expert_modules(model)]
    config = architecture.config
    forward = partial(general_forward, model)
    flat = None if plain else flat_decoder(model, forward)
    if flat is None and not plain and device.type == "cuda":  # measured on a CPU: no faster
        fuse_attention(model, forward)
        fuse_linears(model, forward)
        fuse_norms(model)
        fuse_routers(model)
        if (beside := side_stream(device)) is not None:
            fork_shared_experts(model, forward, beside)
    return Skeleton(
        model=model,
        geometry=architecture.geometry,
        kv=architecture.probe.kv if part is None else part.kv(architecture.probe.kv),
        dtype=dtype,
        device=device,
        dense_bytes=_loaded_bytes(model),
        activations=tuple(activation_of(module) for module in modules),
        biases=tuple(_biases(module) for module in modules),
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        max_model_len=int(config.max_position_embeddings),
        flat=flat,
    )


def build(architecture: Architecture, dtype: torch.dtype, *, attention: str, experts: str) -> Any:
    """The module tree: parameters on `meta`, computed buffers (rope frequencies) real."""
    with _parameters_on_meta():
        return text_model(architecture.config, dtype, attention=attention, experts=experts)


def load_tensors(
    model: Any,
    checkpoint: Checkpoint,
    names: Iterable[str],
    dtype: torch.dtype,
    device: torch.device,
    part: DensePart | None = None,
) -> None:
    """Fill the parameters and buffers of `model` that are stored under `names`.

    Computed buffers go to `device` too.
    """
    wide = _kept_wide(model, dtype)
    for name in names:
        target = checkpoint.keymap.dense[name]
        parent, _, leaf = target.rpartition(".")
        module = model.get_submodule(parent)
        old = module._parameters.get(leaf)
        is_parameter = old is not None
        old = old if is_parameter else module._buffers[leaf]
        keep = any(part in wide for part in target.split("."))
        tensor = checkpoint.read(name)
        if part is not None:
            tensor = part.cut(target, tensor)
        tensor = tensor.to(device, torch.float32 if keep else old.dtype)
        if is_parameter:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[leaf] = buffer.to(device)


def _store_by_column(model: nn.Module) -> None:
    """Lay the weights of linear maps out as [K, N] in memory; their shape stays [N, K].

    For products of 4 to 64 rows the CPU's matrix library is 1.5 to 2.2 times as fast on this
    layout as on the usual one, and about equal for one row and for many.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_meta:
            # `data` reaches a tied embedding too.
            module.weight.data = module.weight.data.t().contiguous().t()


def _check_loaded(model: nn.Module) -> None:
    """Nothing but expert weights may have stayed on `meta`."""
    experts = {name for name, _ in expert_modules(model)}
    left = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_meta and name.rpartition(".")[0] not in experts
    ]
    if left:
        raise ModelError(f"{len(left)} tensors of the model were not loaded: {some(left)}")


def _biases(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Biases of an experts module, rows as in the blocks."""
    if not module.has_bias:
        return None, None
    return gate_first(module.gate_up_proj_bias, module, axis=1), module.down_proj_bias


def _kept_wide(model: Any, dtype: torch.dtype) -> set[str]:
    """Path components whose tensors transformers keeps in fp32 at this dtype."""
    kept: set[str] = set()
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(model._keep_in_fp32_modules_strict or ())
    return kept


def _loaded_bytes(model: nn.Module) -> int:
    """Bytes of all tensors that are not on `meta`, shared storage counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
        if not tensor.is_meta
    }
    return sum(storages.values())


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """New parameters are moved to `meta` when registered; buffers are made for real."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None:
            meta = nn.Parameter(parameter.data.to("meta"), requires_grad=False)
            module._parameters[name] = meta

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
