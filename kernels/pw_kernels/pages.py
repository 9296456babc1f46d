"""Where the blocks of one (layer, module) lie in the arena. Knows no policy: it is only read here.

Axes: E experts, B planes (most significant first), PP pages of one plane, LP pages of a table
region, P pages of the arena.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw_kernels.bitplane import MAX_BITS

NO_PAGE = -1


@dataclass(frozen=True, eq=False)
class WeightPages:
    """The blocks of all experts of one (layer, module), as page ids into an arena [P, page_bytes].

    The tensors stay where they are for the life of the object; the owner writes new bits and page
    ids into them at a safe point. Byte `o` of plane p of expert e lies in page
    `plane_pages[e, p, o // page_bytes]`; byte `o` of the table in use lies at byte
    `lut_offset[e] + o` of the region `lut_pages[e]`.
    """

    rows: int  # N
    cols: int  # K
    bits: Tensor  # [E] int32, committed width
    plane_pages: Tensor  # [E, B, PP] int32, NO_PAGE where absent
    lut_pages: Tensor  # [E, LP] int32, pages of the region that holds the table in use
    lut_offset: Tensor  # [E] int32, byte offset of that table in its region, multiple of 512
    widths: tuple[int, int] = (2, MAX_BITS)  # least and greatest that a block can ever have
    # Experts that the slots of a call are spread over, where some lie on other ranks; None: these.
    routed: int | None = None

    def __post_init__(self) -> None:
        named = {
            "bits": (self.bits, 1),
            "plane_pages": (self.plane_pages, 3),
            "lut_pages": (self.lut_pages, 2),
            "lut_offset": (self.lut_offset, 1),
        }
        for name, (tensor, dims) in named.items():
            if tensor.dtype != torch.int32 or tensor.dim() != dims or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous int32 with {dims} dimensions")
            if tensor.shape[0] != self.experts:
                raise ValueError(f"{name} has {tensor.shape[0]} experts, expected {self.experts}")

    @property
    def experts(self) -> int:
        """Number of experts E."""
        return self.bits.shape[0]

    @property
    def spread(self) -> int:
        """Experts that slots are spread over: a call has S * E / spread slots here on average."""
        return self.experts if self.routed is None else self.routed

    @property
    def possible_widths(self) -> tuple[int, int]:
        """Least and greatest width that a block can ever have, as far as there are planes."""
        return self.widths[0], min(self.widths[1], self.plane_pages.shape[1])

    @cached_property
    def arrays(self) -> tuple[NDArray[np.int32], ...]:
        """NumPy views (bits, plane_pages, lut_pages, lut_offset) of CPU tensors, made once."""
        tensors = (self.bits, self.plane_pages, self.lut_pages, self.lut_offset)
        return tuple(tensor.numpy() for tensor in tensors)
