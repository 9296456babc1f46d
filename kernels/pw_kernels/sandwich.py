"""What stands between two layers' products where norms come before and after each branch.

A branch of such a layer is normed, added to the residual and normed again for those who read it
next. On a GPU all of it is one Triton kernel (`triton_sandwich`), which adds up what experts give
on its way; elsewhere a few calls of torch: the reference. The choice is made per call by the device
of the tensors; `backend` names one for tests.

Axes: T tokens, H hidden, V vocabulary, F norms that follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pw_kernels.slots import SlotResults
from pw_kernels.step import kernels_of, rms_norm


@dataclass(frozen=True, eq=False)
class NormedSum:
    """Branches normed, their sum with the residual, and norms of it; norm(x) = x / rms(x).

        value  = norm(first) * norms[0]
        value  = norm(value + norm(second) * norms[1]) * norms[2]     of two branches
        out    = (x + value) * scale
        normed = norm(out) * following                                for each that follows

    Attributes:
        norms: [1, H] of one branch, [3, H] of two.
        following: [F, H], F at most 3.
        epsilon: Added to each mean square.
        scale: Of the residual that comes out.
    """

    norms: Tensor
    following: Tensor
    epsilon: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        if len(self.norms) not in (1, 3):
            raise ValueError(f"one branch has one norm and two have three, not {len(self.norms)}")
        if not 1 <= len(self.following) <= 3:
            raise ValueError(f"one to three norms may follow, not {len(self.following)}")


def normed_sum(
    x: Tensor,
    first: Tensor,
    second: Tensor | SlotResults | None,
    joint: NormedSum,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The residual that comes out [T, H], and its norms [F, T, H].

    Args:
        x: [T, H], the residual.
        first: [T, H], a branch.
        second: [T, H] or what experts give before its sum: the other branch, if there are two.
        joint: What is done with them.
        backend: One of `step.BACKENDS`.
    """
    if (kernels := kernels_of(backend, x, "triton_sandwich")) is not None:
        return kernels.normed_sum(x, first, second, joint)  # type: ignore[no-any-return]
    norms, epsilon = joint.norms, joint.epsilon
    value = rms_norm(first, norms[0], epsilon, backend="torch")
    if second is not None:
        rows = second.sum(x.dtype) if isinstance(second, SlotResults) else second
        value = value + rms_norm(rows, norms[1], epsilon, backend="torch")
        value = rms_norm(value, norms[2], epsilon, backend="torch")
    out = x + value
    if joint.scale != 1.0:
        out = out * joint.scale
    wide = rms_norm(out.float(), None, epsilon, backend="torch")
    return out, (wide * joint.following.float()[:, None]).to(x.dtype)


def softcap(logits: Tensor, cap: float, *, backend: str = "auto") -> Tensor:
    """Logits within bounds, cap * tanh(logits / cap) [T, V], in the memory of the logits.

    Args:
        logits: [T, V].
        cap: Greatest amount that comes out.
        backend: One of `step.BACKENDS`.
    """
    if (kernels := kernels_of(backend, logits, "triton_sandwich")) is not None:
        return kernels.softcap(logits, cap)  # type: ignore[no-any-return]
    return logits.div_(cap).tanh_().mul_(cap)
