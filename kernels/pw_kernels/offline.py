"""Which of the kernels of the offline fits run on a device: tried once, on few rows each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch

BACKENDS = ("auto", "torch", "triton")

_tried: dict[tuple[str, torch.device], bool] = {}


def kernels_for(
    name: str,
    backend: str,
    device: torch.device,
    agrees: Callable[[ModuleType, torch.device], bool],
) -> ModuleType | None:
    """The module `triton_<name>` where it is to be used; None: torch does it.

    Args:
        name: Of the kernels.
        backend: One of BACKENDS; "auto" takes kernels that agree, on a GPU.
        device: Where the tensors are.
        agrees: Tells whether they give what torch gives there.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return None
    try:
        kernels = import_module(f"pw_kernels.triton_{name}")
    except ImportError:
        if backend == "triton":
            raise ValueError("backend 'triton' is not installed") from None
        return None
    if backend == "auto":
        if (name, device) not in _tried:
            _tried[name, device] = tried(name, kernels, device, agrees)
        return kernels if _tried[name, device] else None
    return kernels


def tried(
    name: str,
    kernels: ModuleType,
    device: torch.device,
    agrees: Callable[[ModuleType, torch.device], bool],
) -> bool:
    """Whether kernels agree with torch on a device; says so if they do not."""
    try:
        if agrees(kernels, device):
            return True
    except Exception as error:  # a compiler's, of any kind
        warnings.warn(f"kernels `{name}` do not run, torch does it: {error}", stacklevel=4)
        return False
    warnings.warn(f"kernels `{name}` are wrong here, torch does it", stacklevel=4)
    return False
