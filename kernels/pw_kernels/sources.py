"""Text of the CUDA sources of this package."""

from __future__ import annotations

import re
from importlib.resources import files


def cuda_text(name: str) -> str:
    """A .cu file with the .cuh files of this package that it includes."""
    text = files("pw_kernels").joinpath(name).read_text()
    return re.sub(r'#include "(\w+\.cuh)"\n', lambda found: cuda_text(found[1]), text)
