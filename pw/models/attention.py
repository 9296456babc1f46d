"""The attention function that transformers calls: hands packed q, k, v to the caller's context.

Registers `pw_paged` with transformers' attention interface. The model is called with the keyword
`pw_context`; what the context does with keys and values (pages, block tables) is not known here.

Axes: T tokens of all sequences, packed; Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "pw_paged"


class AttentionContext(Protocol):
    """What the engine gives to the model for one step."""

    def attend(
        self,
        layer: int,
        q: Tensor,  # [T, Hq, D]
        k: Tensor,  # [T, Hkv, D], roped
        v: Tensor,  # [T, Hkv, Dv]
        *,
        write: bool,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,  # [Hq]
    ) -> Tensor:  # [T, Hq, Dv]
        """Attend with the keys and values of `layer`; store k and v there first if `write`.

        A layer that shares another's keys comes with that producer's `layer` and `write` False.
        With a window, a query sees the keys at positions above its own minus `window`.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionBinding:
    """What the attention of one module always passes on."""

    layer: int  # whose keys and values are read
    write: bool
    window: int | None
    softcap: float | None


def binding_of(module: Any, options: dict[str, Any]) -> AttentionBinding:
    """Read a binding from an attention module and the keywords that it passes on.

    `qwen2_moe` does not pass its window on, but sets it on sliding layers.
    """
    layer = int(module.layer_idx)
    shared = bool(getattr(module, "is_kv_shared_layer", False))
    window = options.get("sliding_window")
    if window is None:
        window = getattr(module, "sliding_window", None)
    return AttentionBinding(
        _producer(module.config, layer) if shared else layer,
        not shared,
        int(window) if window else None,
        options.get("softcap"),
    )


def _producer(config: Any, layer: int) -> int:
    """The last layer of the same type that computes keys and values of its own."""
    types = list(config.layer_types)
    first_shared = len(types) - int(config.num_kv_shared_layers)
    return max(i for i in range(first_shared) if types[i] == types[layer])


def bind_attention(model: nn.Module, bindings: dict[str, AttentionBinding]) -> None:
    """Attach bindings (by module path) to the attention modules of `model`."""
    for name, binding in bindings.items():
        model.get_submodule(name).__dict__["pw_attention"] = binding


def _attend(
    module: Any,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    *,
    scaling: float,
    pw_context: AttentionContext,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function named `pw_paged`; returns [1, T, Hq, Dv]."""
    assert attention_mask is None
    binding: AttentionBinding = module.pw_attention
    out = pw_context.attend(
        binding.layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        write=binding.write,
        scale=scaling,
        window=binding.window,
        softcap=binding.softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, _attend)
