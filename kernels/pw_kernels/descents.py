"""A descent through some columns of a block that chooses their codes anew: inner step of a fit.

On a GPU one Triton kernel (`triton_descents`), elsewhere a few calls of torch for each column: the
reference.

Axes: E blocks, N rows, W widths, C levels of all widths' tables side by side, S columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from pw_kernels.offline import kernels_for

_CODE = 255  # bits of a distance that make room for the code


def descend(
    tables: Tensor,
    scaled: Tensor,
    roots: Tensor,
    hessians: Tensor,
    levels: Tensor,
    pulls: Tensor,
    min_bits: int,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Choose the codes of some columns anew, one after the other.

    A column's code is the nearest to what its weights want at each width, level + pull / H_jj, an
    error at a width counting roots^2. What its levels fall by then pulls at the columns after it.

    Args:
        tables: [E, N, C] float32, C = 2^min_bits + ... + 2^max_bits.
        scaled: [E, N, C] float32, each width's table times its root.
        roots: [E, N, W] float32.
        hessians: H of the columns with each other, [E, S, S] float32.
        levels: Of their weights [E, N, W, S] float32.
        pulls: (w - q) H of these columns [E, N, W, S] float32.
        min_bits: Width of the first table.
        backend: "auto", "torch" or "triton".

    Returns:
        Codes [E, N, S] uint8, and by how much levels fell [E, N, W, S].
    """
    if (kernels := kernels_for("descents", backend, tables.device, _agrees)) is not None:
        found: tuple[Tensor, Tensor] = kernels.descend(
            tables, scaled, roots, hessians, levels, pulls, min_bits
        )
        return found
    widths = torch.arange(roots.shape[2], device=tables.device)
    by_width = torch.split(
        scaled.permute(2, 0, 1).contiguous(), [1 << (min_bits + w) for w in range(len(widths))]
    )
    sizes = 1 << (min_bits + widths)  # [W]
    offsets, shifts = sizes.cumsum(0) - sizes, widths.flip(0)
    levels, pulls = (t.permute(3, 0, 1, 2).contiguous() for t in (levels, pulls))
    falls, codes = torch.empty_like(pulls), []
    for column, (level, pull) in enumerate(zip(levels, pulls, strict=True)):
        row = hessians[:, column]
        wanted = (level + pull / row[:, column, None, None]) * roots
        codes.append(_nearest(by_width, wanted.permute(2, 0, 1)))
        chosen = tables.gather(2, (codes[-1].long()[..., None] >> shifts) + offsets)
        fall = torch.sub(level, chosen, out=falls[column])
        pulls[column + 1 :].addcmul_(fall, row[:, column + 1 :].T[..., None, None])
    return torch.stack(codes, 2), falls.permute(1, 2, 3, 0)


def _nearest(tables: Sequence[Tensor], wanted: Tensor) -> Tensor:
    """The code c that minimises SUM_w (table_w[c >> (W - 1 - w)] - wanted_w)^2.

    Positive floats ascend with their bits. The code replaces the last eight of these, so that a
    minimum, which is quick, gives what argmin would; of distances within 2^-15 of each other the
    lowest code is taken.

    Args:
        tables: [levels, E, N] of each width, each twice as long as the one before.
        wanted: [W, E, N].

    Returns:
        [E, N] uint8.
    """
    cost = (tables[0] - wanted[0]).square_()
    for table, want in zip(tables[1:], wanted[1:], strict=True):
        own = (table - want).square_()
        own.view(len(cost), 2, *want.shape).add_(cost[:, None])
        cost = own
    numbers = torch.arange(len(cost), dtype=torch.int32, device=cost.device)
    bits = cost.view(torch.int32).bitwise_and_(~_CODE).bitwise_or_(numbers[:, None, None])
    return bits.amin(0).bitwise_and_(_CODE).to(torch.uint8)


def _agrees(kernels: ModuleType, device: torch.device) -> bool:
    """Whether the kernel gives what torch gives, on few rows of a usual size."""
    generator, widths = torch.Generator().manual_seed(0), range(2, 9)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    tables, roots, inputs = random(2, 9, 508), random(2, 9, 7).abs(), random(2, 90, 32)
    by_width = torch.split(tables, [1 << bits for bits in widths], 2)
    scaled = torch.cat([t * roots[..., w, None] for w, t in enumerate(by_width)], 2)
    columns = (inputs.mT @ inputs, random(2, 9, 7, 32), random(2, 9, 7, 32))
    codes, falls = descend(tables, scaled, roots, *columns, 2, backend="torch")
    found = kernels.descend(tables, scaled, roots, *columns, 2)
    same = (found[0] == codes).all(2)  # a near tie may go either way, and what follows with it
    return bool(
        same.float().mean() > 0.7 and torch.allclose(found[1][same], falls[same], atol=1e-2)
    )
