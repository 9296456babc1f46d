"""What a squeeze is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass

PROBE = 16  # tokens of a probe's prompt


@dataclass(frozen=True)
class Squeeze:
    """How hard and how often."""

    cycles: int = 10
    probes: int = 4
    steady_steps: int = 32
    ease_steps: int = 64
    # KV of the long requests over the room beside the widest experts, as far as all of it fits
    # beside the narrowest.
    load: float = 1.5
    max_long: int = 60  # long requests at a time; with the probes no more than may run
    output_len: int = 8  # tokens of a long request's answer
    return_seconds: float = 10.0  # for planes to be back
    seconds: float = math.inf  # after which no cycle is begun
    seed: int = 0
