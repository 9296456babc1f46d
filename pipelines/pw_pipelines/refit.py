"""Codes and tables of all widths, refitted together under the full Hessian of a block.

The k-means of `pw_pipelines.codebook` rounds each weight to its nearest level, as if the inputs of
a block were not correlated. They are: errors of different columns can cancel in the output. With
H the second moment of the inputs (`pw_pipelines.hessians`), the error of a row w at width b is

    e_b = (w - q_b) H (w - q_b)^T,       q_b[j] = table_b[code[j] >> (max_bits - b)]

and all widths share one code. The refit minimises SUM_b importance_b * e_b / e_b(k-means) by turns:

    codes    coordinate descent: column by column, the code whose levels at all widths cost least,
             given the other columns (LNQ of GuidedQuant, arXiv 2505.07004, does so for one width)
    tables   least squares at each width, by conjugate gradients

Fitting the widths together is what keeps the code nested: descent for the narrowest width alone
leaves codes that wider widths cannot use (docs/quality-planner.md has the figures). Where it is
known at which width a block will mostly be, its `focus`, that width counts most, its neighbours
some, the others hardly (`pw_pipelines.tune`), and codes start from a rounding that feeds errors
forward. Pure maths on tensors, in float32; rows do not depend on each other, but for those that
share tables (`pw_pipelines.sharing`) and those whose errors cancel (`pw_pipelines.outputs`). Tables
need not ascend along a row.

Axes: E blocks, N rows, K columns, W widths, C levels of all widths' tables side by side, S columns
of a strip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pw_kernels.descents import descend
from pw_kernels.places import Places, places_of
from pw_pipelines.codebook import Codebook
from pw_pipelines.gpu_memory import free_bytes
from pw_pipelines.precision import tensor_cores
from pw_pipelines.sharing import TiedPlaces, tie

IMPORTANCE: Mapping[int, float] = {2: 1.0, 3: 1.0, 4: 1.0, 5: 0.5, 6: 0.3, 7: 0.1, 8: 0.1}

_NEAR, _FAR = 0.1, 0.01  # importance of the widths beside the focus, and of those farther away
_ROUNDS = 2
_FOCUSED_ROUNDS = 4
_STRIP = 32  # columns whose changes reach the others of their part by one product
_PART = 256  # columns whose changes reach all others by one: pulls are read and written less often
_PER_LEVEL = 8  # weights of a row; with fewer, levels fit single weights, which a new start loses
_ROWS = 16  # at most, that change together where errors of rows cancel in what follows
_LARGEST = 1.5  # eigenvalue for which they do, see `rows_apart`
_STEPS = 8  # of conjugate gradients; tables start from the last ones
_RIDGE = 1e-3  # pull of a level toward the one before, relative to the mean of diag H
_DAMPING = 1e-2  # of the mean of diag H, added to it
_BYTES = 240  # of temporaries for a weight and seven widths, see `refit_bytes`
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Refit:
    """A refitted codebook and how its errors compare."""

    book: Codebook  # rows of all blocks, one after the other
    before: dict[int, Tensor]  # b -> [E] float32, sum of e_b over rows, of the codebook given
    after: dict[int, Tensor]  # b -> [E] float32, before the tables are rounded


def refit(
    book: Codebook,
    weights: Tensor,  # [E, N, K], finite
    hessians: Tensor,  # [E, K, K], symmetric, not negative, in any scale
    importance: Mapping[int, float] = IMPORTANCE,
    focus: Tensor | None = None,  # [E] int64
    table_bytes: int | None = None,
    outputs: Tensor | None = None,  # [N, N]
) -> Refit:
    """Refit nested codes of some blocks of one shape. Deterministic on a CPU; a GPU adds up in no
    fixed order.

    Args:
        book: The start, fitted to the rows of `weights`.
        weights: What to approximate.
        hessians: One of each block; damped here.
        importance: Width -> weight of its error, relative to that of the start.
        focus: The width of each block that counts most, in place of `importance`.
        table_bytes: Of tables that rows share, see `pw_pipelines.sharing`; None: each has its own.
        outputs: Second moments of gradients at the blocks' outputs (`pw_pipelines.outputs`), of
            which codes then take account; None: errors of rows do not cancel.
    """
    hessians = damped(hessians)
    blocks, rows, cols = weights.shape
    widths = list(book.luts)
    counts, rounds = torch.tensor([[importance.get(b, 0.0) for b in widths]]), _ROUNDS
    fed = torch.zeros(blocks, dtype=torch.bool)  # which blocks start from `round_anew`
    if focus is not None:
        counts, rounds = focused(widths, focus), _FOCUSED_ROUNDS
        fed = (cols >> focus.cpu() >= _PER_LEVEL) | (table_bytes is not None)
    counts = counts.to(weights.device)
    codes = book.codes.view(weights.shape)
    levels = torch.cat([book.centroids[b] for b in widths], 1).float().view(blocks, rows, -1)
    room = _at_once(weights.device)
    if table_bytes is None and outputs is None:  # some rows of all blocks, else some blocks
        along, count = 1, max(1, room // (blocks * cols))
    else:
        along, count = 0, max(1, room // (rows * cols))
    parts = [torch.split(tensor, count, along) for tensor in (codes, levels, weights)]
    fits = []
    with tensor_cores():
        for part, (own_codes, own_levels, own_weights) in enumerate(zip(*parts, strict=True)):
            some = slice(None) if along else slice(part * count, (part + 1) * count)
            fit = _Fit(
                own_codes, own_levels, own_weights.float(), hessians[some], widths, table_bytes,
                outputs,
            )  # fmt: skip
            own_counts = counts if len(counts) == 1 else counts[some]
            fit.run(own_counts, rounds, fed if along else fed[some])
            fits.append(fit)
    tables = torch.cat([fit.tables for fit in fits], along).flatten(0, 1)
    by_width = dict(zip(widths, torch.split(tables, [1 << b for b in widths], 1), strict=True))
    before, after = (
        dict(zip(widths, torch.cat(errors, along).sum(1).unbind(1), strict=True))
        for errors in ([fit.before for fit in fits], [fit.errors() for fit in fits])
    )
    fitted = Codebook(
        codes=torch.cat([fit.codes for fit in fits], along).flatten(0, 1),
        luts={b: table.to(book.luts[b].dtype) for b, table in by_width.items()},
        centroids={b: table.double() for b, table in by_width.items()},
    )
    return Refit(fitted, before, after)


def focused(widths: Sequence[int], focus: Tensor) -> Tensor:
    """Importance [E, W] of widths [W] for blocks whose focus is [E]."""
    distance = (torch.tensor(widths) - focus.cpu()[:, None]).abs()
    return torch.where(distance == 0, 1.0, torch.where(distance == 1, _NEAR, _FAR))


def rows_apart(outputs: Tensor) -> int:
    """How far rows must be apart to change together, as if the others stood still.

    Such a step falls while the largest eigenvalue of their part of G [N, N], scaled to a diagonal
    of 1, is below 2.
    """
    roots = outputs.diagonal().rsqrt()
    scaled, rows = roots[:, None] * outputs * roots, len(outputs)
    apart = -(-rows // _ROWS)
    while apart < rows:
        parts = (scaled[first::apart, first::apart] for first in range(apart))
        if max(float(torch.linalg.eigvalsh(part)[-1]) for part in parts) < _LARGEST:
            break
        apart *= 2
    return min(apart, rows)


def refit_operations(weights: int, cols: int, widths: int) -> int:
    """Of the products with H that a refit of so many weights of rows of `cols` takes."""
    products = 2 + (_ROUNDS + 1) * (1 + _STEPS) + 2 * _ROUNDS
    return 2 * weights * cols * widths * products


def refit_bytes(weights: int, widths: int, device: torch.device) -> int:
    """Most bytes of temporaries for so many weights on a device: five tensors and an index
    for each weight and width, rounded up.
    """
    return min(weights, _at_once(device)) * (widths * 32 + 16)


def damped(hessians: Tensor) -> Tensor:
    """[E, K, K] float32 with a mean diagonal of 1, plus a small multiple of the identity.

    A block whose Hessian is zero gets the identity: plain squared error.
    """
    scale = hessians.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    eye = torch.eye(hessians.shape[1], device=hessians.device, dtype=hessians.dtype)
    return torch.where(scale > 0, hessians / scale.clamp_min(_TINY), eye).float() + _DAMPING * eye


def _at_once(device: torch.device) -> int:
    """Weights fitted together, some 240 bytes each: 0.5 GB on a CPU, a quarter of what a GPU has
    free, 32 GB at most.
    """
    least = 1 << 21
    if device.type == "cpu":
        return least
    free = free_bytes(device)
    return int(min(max(free // 4 // _BYTES, least), 1 << 27))


class _Fit:
    """Codes and tables of some rows on their way.

    Attributes:
        codes: [E, N, K] uint8.
        tables: [E, N, C].
        before: e_b [E, N, W] at the start.
    """

    def __init__(
        self,
        codes: Tensor,
        tables: Tensor,
        weights: Tensor,
        hessians: Tensor,
        widths: list[int],
        table_bytes: int | None = None,
        outputs: Tensor | None = None,
    ) -> None:
        self.codes, self.tables = codes.clone(), tables
        self.outputs = outputs
        self.widths, self.table_bytes = widths, table_bytes
        if table_bytes is not None:
            self.tables = tie(tables, widths, table_bytes, mean=True)
        self.weights, self.hessians = weights, hessians
        self.sizes, self.min_bits = [1 << b for b in widths], widths[0]
        device = weights.device
        sizes = torch.tensor(self.sizes, device=device)
        self.width_of = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)
        self.before = self.errors()
        self.roots = torch.ones_like(self.before)  # of what a unit of e_b counts, [E, N, W]

    def run(self, importance: Tensor, rounds: int, fed: Tensor) -> None:
        """Fit by turns; importance [E or 1, W] is of errors relative to those at the start.

        The codes of blocks that are `fed` [E] start from `round_anew`.
        """
        self.roots = (importance[:, None] / self.before.clamp_min(_TINY)).sqrt()
        if fed.any():
            anew = self.round_anew()
            self.codes = torch.where(fed.to(anew.device)[:, None, None], anew, self.codes)
        self.fit_tables()
        for _ in range(rounds):
            self.sweep()
            self.fit_tables()

    def places(self) -> Places:
        """Where the weights are in the tables."""
        places = places_of(self.codes, self.min_bits, len(self.sizes))
        if self.table_bytes is None:
            return places
        return TiedPlaces(places, self.widths, self.table_bytes)

    def times_hessian(self, values: Tensor) -> Tensor:
        """[E, N, W, K] times H."""
        blocks, _, cols = self.weights.shape
        product = torch.bmm(values.view(blocks, -1, cols), self.hessians)
        return product.view(values.shape)

    def gap(self, levels: Tensor) -> Tensor:
        """[E, N, W, K]: weights minus levels; in place of these."""
        return torch.sub(self.weights[:, :, None], levels, out=levels)

    def errors(self) -> Tensor:
        """e_b [E, N, W] of every row."""
        gap = self.gap(self.places().levels(self.tables))
        return (self.times_hessian(gap) * gap).sum(3)

    def fit_tables(self) -> None:
        """Least squares of every table, given the codes.

        Minimises (w - P c) H (w - P c)^T + ridge * SUM n_c (c - table)^2 over tables c; P puts a
        level where the code says so, n_c counts its weights. Levels without weights stay.
        """
        places, tables = self.places(), self.tables

        def per_width(values: Tensor) -> Tensor:  # sums [E, N, C] of each width's table
            sums = torch.zeros_like(self.roots).index_add_(2, self.width_of, values)
            return sums.index_select(2, self.width_of)

        levels = places.levels(tables)
        diagonal = self.hessians.diagonal(dim1=1, dim2=2)[:, None, None].expand(levels.shape)
        pull = _RIDGE * places.sums(torch.ones_like(levels))
        inverse = _ratio(torch.ones_like(pull), places.sums(diagonal) + pull)
        residual = places.sums(self.times_hessian(self.gap(levels)))
        direction = inverse * residual
        size = per_width(residual * direction)
        for _ in range(_STEPS):
            image = places.sums(self.times_hessian(places.levels(direction))) + pull * direction
            length = _ratio(size, per_width(direction * image))
            tables = tables + length * direction
            residual = residual - length * image
            step = inverse * residual
            size, last = per_width(residual * step), size
            direction = step + _ratio(size, last) * direction
        self.tables = tables

    def round_anew(self) -> Tensor:
        """Codes chosen once, column by column, each making up for the columns before it.

        What an error leaves to pay depends on the columns to come: here these count as free to
        follow (GPTQ, arXiv 2210.17323; LDLQ of QuIP), in `sweep` as fixed. With H = V D V^T, V of
        unit diagonal and upper, column k wants w_k + SUM_(j<k) (w_j - q_j) V_jk. The columns of
        the largest H_kk come first.
        """
        order = self.hessians.diagonal(dim1=1, dim2=2).argsort(1, descending=True)  # [E, K]
        across = order[:, None].expand_as(self.weights)
        ordered = self.hessians.gather(1, order[:, :, None].expand_as(self.hessians))
        ordered = ordered.gather(2, order[:, None].expand_as(self.hessians))
        factor = torch.linalg.cholesky(ordered.flip(1, 2)).flip(1, 2)
        factor /= factor.diagonal(dim1=1, dim2=2)[:, None].clone()
        wanted = self.weights.gather(2, across)[:, :, None].repeat(1, 1, len(self.sizes), 1)
        codes = self.descend(factor, wanted, torch.zeros_like(wanted))
        return torch.empty_like(codes).scatter_(2, across, codes)

    def sweep(self) -> None:
        """One pass of coordinate descent over the columns of all rows.

        Where errors of rows cancel in what follows, some rows at a time: given the others' errors
        e_m, row n wants w_n + SUM_(m != n) G_nm e_m / G_nn.
        """
        levels = self.places().levels(self.tables)
        gaps = self.weights[:, :, None] - levels
        if self.outputs is None:
            self.codes = self.descend(self.hessians, levels, self.times_hessian(gaps))
            return
        blocks, rows, _ = self.weights.shape
        shares = self.outputs / self.outputs.diagonal()[:, None]
        apart = rows_apart(self.outputs)
        for first in range(apart):
            some = slice(first, None, apart)
            wanted = (shares[some] @ gaps.view(blocks, rows, -1)).view(blocks, -1, *gaps.shape[2:])
            pulls = self.times_hessian(wanted)
            self.codes[:, some] = self.descend(self.hessians, levels[:, some], pulls, some)
            places = places_of(self.codes[:, some].contiguous(), self.min_bits, len(self.sizes))
            gaps[:, some] = self.weights[:, some, None] - places.levels(self.tables[:, some])

    def descend(
        self, matrix: Tensor, levels: Tensor, pulls: Tensor, some: slice = slice(None)
    ) -> Tensor:
        """Codes [E, N, K] of some rows, all by default, chosen column by column.

        Args:
            matrix: [E, K, K]; a change of column j by its row pulls at the columns after j.
            levels: [E, N, W, K], what the weights have now.
            pulls: [E, N, W, K], changed in place. Column j wants level + pull / matrix_jj.
            some: Which rows.
        """
        blocks, rows, widths, cols = pulls.shape
        codes = torch.empty((blocks, rows, cols), dtype=torch.uint8, device=pulls.device)
        tables, roots = (t[:, some].contiguous() for t in (self.tables, self.roots))
        scaled = tables * roots.index_select(2, self.width_of)
        flat = pulls.view(blocks, rows * widths, cols)
        for first in range(0, cols, _PART):
            part, after = slice(first, first + _PART), slice(first + _PART, None)
            fallen = []
            for start in range(first, min(first + _PART, cols), _STRIP):
                strip, later = slice(start, start + _STRIP), slice(start + _STRIP, part.stop)
                codes[:, :, strip], falls = descend(
                    tables,
                    scaled,
                    roots,
                    matrix[:, strip, strip],
                    levels[..., strip],
                    pulls[..., strip],
                    self.min_bits,
                )
                fallen.append(falls.reshape(blocks, rows * widths, -1))
                flat[..., later].baddbmm_(fallen[-1], matrix[:, strip, later])
            if part.stop < cols:
                flat[..., after].baddbmm_(torch.cat(fallen, 2), matrix[:, part, after])
        return codes


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Quotient; 0 where it is not finite."""
    return torch.nan_to_num(above / below, nan=0.0, posinf=0.0, neginf=0.0)
