"""How much memory a GPU or the host has left for the offline stages."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """What the driver has free, and what torch holds without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def host_bytes() -> int:
    """What the host has free, caches that it would give up included where the system says so."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, ValueError, IndexError, StopIteration):  # not Linux, or a sandbox
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
