"""Triton launches that begin while the launch before them ends (programmatic dependent launch).

A kernel calls `begin` first: the next launch may be made, and what earlier ones wrote is there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_FIRST_CAPABILITY = 9


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Let the next launch begin, and wait for the earlier ones."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Options of a launch of a kernel that calls `begin`."""
    if device.type != "cuda" or torch.version.hip is not None:
        return {"OVERLAP": False}
    if torch.cuda.get_device_capability(device)[0] < _FIRST_CAPABILITY:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
