"""What all flat forward passes have: the ends of a model, and the angles of a step.

Axes: T tokens, H hidden, D head size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from pw.models.attention import AttentionContext
from pw_kernels import products, step

_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn", "proportional")


class Decoder(ABC):
    """The loop over the layers of one model.

    Args:
        model: transformers' model with dense weights loaded and attention bound.
        kernels: Small parts by `pw_kernels`; None: where they are kernels, on a GPU.
    """

    def __init__(self, model: Any, kernels: bool | None = None) -> None:
        self._embedding: Tensor = model.model.embed_tokens.weight
        self._head: Tensor = model.lm_head.weight
        self._kernels = self._head.device.type == "cuda" if kernels is None else kernels

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self._head.dtype

    def __call__(
        self, input_ids: Tensor, positions: Tensor, context: AttentionContext, keep: Tensor
    ) -> Tensor:
        """See `Skeleton.forward`."""
        return self.logits(self.hidden(input_ids, positions, context, keep))

    @abstractmethod
    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        keep: Tensor | None = None,
    ) -> Tensor:
        """See `Skeleton.hidden`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Skeleton.logits`."""
        return products.product(hidden, self._head)


class Turn:
    """The angles of a step's tokens.

    Args:
        signs: [R], -1 for the first half and 1 for the second; None: made when they are needed.

    Attributes:
        cos: [T, R].
        sin: [T, R].
    """

    def __init__(self, cos: Tensor, sin: Tensor, signs: Tensor | None = None) -> None:
        self.cos, self.sin, self._signs = cos, sin, signs
        self._factors: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Heads [T, n, D], turned: rotate_half(x) * sin = roll(x, R/2) * (signs * sin).

        What a head has beyond R stays as it is.
        """
        size = self.cos.shape[-1]
        if self._factors is None:
            signs = signs_of(size // 2, self.sin) if self._signs is None else self._signs
            self._factors = (self.cos[:, None], (self.sin * signs)[:, None])
        cos, sin = self._factors
        part = x if size == x.shape[-1] else x[..., :size]
        turned = torch.addcmul(part * cos, part.roll(size // 2, -1), sin)
        return turned if part is x else torch.cat((turned, x[..., size:]), -1)


def signs_of(half: int, like: Tensor) -> Tensor:
    """[2 half]: -1 for the first half and 1 for the second."""
    signs = torch.ones(2 * half, device=like.device, dtype=like.dtype)
    signs[:half] = -1
    return signs


class Rotary:
    """Angles of positions: on a GPU one kernel, if frequencies never change.

    Args:
        module: A model's rotary embedding.
        like: A tensor of the activations' dtype and device.
        kernels: As for a GPU.
        kind: Layers that it is for, where a model has several; they have frequencies of their own.
    """

    def __init__(self, module: Any, like: Tensor, kernels: bool, kind: str | None = None) -> None:
        self._module, self._kinds = module, () if kind is None else (kind,)
        prefix = "" if kind is None else f"{kind}_"
        self._frequencies: Tensor = getattr(module, f"{prefix}inv_freq")
        self._scaling = float(getattr(module, f"{prefix}attention_scaling"))
        rotation = getattr(module, "rope_type", None)
        if isinstance(rotation, dict):
            rotation = rotation[kind]
        self._kernel = kernels and rotation in _FIXED_ROTATIONS
        self._signs = signs_of(len(self._frequencies), like)

    def __call__(self, x: Tensor, positions: Tensor) -> Turn:
        """Of positions [T], in the dtype of x."""
        if self._kernel:
            angles = step.angles(positions, self._frequencies, self._scaling, x.dtype)
            return Turn(*angles, self._signs)
        cos, sin = self._module.forward(x, positions.unsqueeze(0), *self._kinds)
        return Turn(cos[0], sin[0], self._signs)
