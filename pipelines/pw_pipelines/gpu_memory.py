"""How much memory a GPU has left for the offline stages."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """What the driver has free, and what torch holds without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
