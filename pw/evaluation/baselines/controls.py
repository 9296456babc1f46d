"""Controls: allocations that know less than they should need. Axes: n blocks, W widths, L, E."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pw.blocks import MODULES, ExpertGeometry

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_PER_BIT = 4.0  # by which the squared error of a uniform quantizer falls with each bit


def frequency_damage(geometry: ExpertGeometry, mass: Floats, widths: range) -> Floats:
    """Damage [n, W] from router mass [L, E] alone: mass x weights x 4^-bits."""
    share = mass / mass.sum(1, keepdims=True)
    weights = np.array([geometry.shape(module).weights for module in MODULES], dtype=np.float64)
    per_block = (share[:, :, None] * weights).ravel()
    return np.asarray(per_block[:, None] * _PER_BIT ** -np.arange(len(widths), dtype=np.float64))


def shuffled(bits: Ints, seed: int) -> Ints:
    """The widths of a plan dealt again at random among the blocks of each module: same bytes."""
    dealt = bits.copy()
    rng = np.random.default_rng(seed)
    for module in range(len(MODULES)):
        dealt[module :: len(MODULES)] = rng.permutation(bits[module :: len(MODULES)])
    return dealt
