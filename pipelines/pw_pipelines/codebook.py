"""The codebook fit: rows of weights to nested codes and one lookup table per width.

Pure maths on tensors, batched over rows, in float64. Each row is sorted once; a cluster is an
interval of the sorted row, so every sum over a cluster is a difference of two prefix sums. The
seed at `min_bits` is a weighted 1-D k-means; each further width splits every interval where the
weighted squared error is least (incremental upscaling of Any-Precision LLM, arXiv 2402.10517), so
the code of a smaller width is a prefix of the code of a larger one. Knows nothing of models,
planes or files.

Axes: R rows, K columns, C = 2^b clusters, S starts of the k-means.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pw_kernels.splits import best_splits, interval_of, squared

_WEIGHT_FLOOR = 1e-6  # of the row's mean: columns that saw no input still get a sane code
_LLOYD_ITERATIONS = 40
_SEARCH_ROUNDS = 16
_SPREADS = (0.6, 0.85, 1.0, 1.25)  # widths of the starts, relative to the Gaussian optimum


@dataclass(frozen=True)
class Codebook:
    """Codes of the widest width and the tables of all widths, in natural (ascending) order.

    The code of width b is `codes >> (max_bits - b)`.
    """

    codes: Tensor  # [R, K] uint8, width max_bits
    luts: dict[int, Tensor]  # b -> [R, 2^b] in the LUT dtype, each row ascending
    centroids: dict[int, Tensor]  # the same before rounding, float64

    def dequantize(self, bits: int) -> Tensor:
        """[R, K] weights at one width, in the LUT dtype."""
        codes = self.codes >> (max(self.luts) - bits)
        return self.luts[bits].gather(1, codes.long())


@dataclass(frozen=True)
class _SortedRows:
    """Rows in ascending order with prefix sums; entry k of a sum covers positions [0, k)."""

    values: Tensor  # [R, K] float64, ascending
    order: Tensor  # [R, K] int64, column of each sorted position
    mass: Tensor  # [R, K+1] float64, sums of w
    moment: Tensor  # [R, K+1] float64, sums of w * (x - center)
    center: Tensor  # [R, 1] float64, subtracted to keep the sums free of cancellation

    def rows(self, index: Tensor) -> _SortedRows:
        """Some of the rows."""
        return _SortedRows(*(getattr(self, f.name)[index] for f in fields(self)))


def fit_codebook(
    rows: Tensor, weights: Tensor, min_bits: int, max_bits: int, lut_dtype: torch.dtype
) -> Codebook:
    """Fit nested codes and lookup tables to each row. Deterministic.

    Args:
        rows: [R, K], finite.
        weights: [R, K] or [1, K], finite and not negative: what one unit of squared error of each
            weight costs. A row of zeros counts as uniform.
        min_bits: Width of the k-means seed.
        max_bits: Widest width, at most 8.
        lut_dtype: Dtype of the tables, `torch.bfloat16` or `torch.float16`.

    Raises:
        ValueError: A value is not finite or a shape or width does not fit.
    """
    if rows.ndim != 2 or weights.shape[-1] != rows.shape[1]:
        raise ValueError(f"rows {tuple(rows.shape)} and weights {tuple(weights.shape)} do not fit")
    if not 1 <= min_bits <= max_bits <= 8:
        raise ValueError(f"widths must satisfy 1 <= min <= max <= 8: {min_bits}, {max_bits}")
    if not (torch.isfinite(rows).all() and torch.isfinite(weights).all()):
        raise ValueError("rows and weights must be finite")
    count = _rows_per_chunk(rows)
    parts = [
        _fit_chunk(
            rows[i : i + count],
            weights if weights.shape[0] == 1 else weights[i : i + count],
            min_bits,
            max_bits,
        )
        for i in range(0, rows.shape[0], count)
    ]
    centroids = {b: torch.cat([c[b] for _, c in parts]) for b in range(min_bits, max_bits + 1)}
    return Codebook(
        codes=torch.cat([codes for codes, _ in parts]),
        luts={b: c.to(lut_dtype) for b, c in centroids.items()},
        centroids=centroids,
    )


def weighted_error(rows: Tensor, weights: Tensor, approximation: Tensor) -> Tensor:
    """[R] float64: weighted squared error of each row, with the weights that the fit uses."""
    weights = _floored(weights.double().expand(rows.shape))
    return (weights * (rows.double() - approximation.double()).square()).sum(1)


def _rows_per_chunk(rows: Tensor) -> int:
    """Rows fitted at once: temporaries stay in cache on a CPU and below 8 GB on a GPU."""
    elements = 1 << 18 if rows.device.type == "cpu" else 1 << 26
    return max(1, elements // max(1, rows.shape[1]))


def _floored(weights: Tensor) -> Tensor:
    mean = weights.mean(1, keepdim=True)
    return torch.where(mean > 0, weights.clamp_min(_WEIGHT_FLOOR * mean), torch.ones_like(weights))


def _fit_chunk(
    rows: Tensor, weights: Tensor, min_bits: int, max_bits: int
) -> tuple[Tensor, dict[int, Tensor]]:
    """Codes [R, K] uint8 and unrounded centroids of every width."""
    data = _sort_rows(rows, weights)
    bounds = _seed(data, 1 << min_bits)
    codes = interval_of(bounds, rows.shape[1])
    centroids = {min_bits: _centroids(data, bounds)}
    for bits in range(min_bits + 1, max_bits + 1):
        split = best_splits(data.mass, data.moment, bounds, codes)
        bounds, codes = _refine(bounds, codes, split)
        centroids[bits] = _centroids(data, bounds)
    unsorted = torch.empty_like(codes, dtype=torch.uint8)
    unsorted.scatter_(1, data.order, codes.to(torch.uint8))
    return unsorted, centroids


def _sort_rows(rows: Tensor, weights: Tensor) -> _SortedRows:
    values, order = torch.sort(rows, dim=1, stable=True)
    values = values.double()
    w = _floored(weights.double().expand(rows.shape)).gather(1, order)
    center = (w * values).sum(1, keepdim=True) / w.sum(1, keepdim=True)
    zero = torch.zeros_like(center)
    return _SortedRows(
        values=values,
        order=order,
        mass=torch.cat([zero, w.cumsum(1)], 1),
        moment=torch.cat([zero, (w * (values - center)).cumsum(1)], 1),
        center=center,
    )


def _refine(bounds: Tensor, codes: Tensor, split: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds [R, 2C+1] and codes one width up; the split position opens the right child."""
    position = torch.arange(codes.shape[1], device=codes.device)
    finer = torch.stack([bounds[:, :-1], split], 2).flatten(1)
    right = position >= split.gather(1, codes)
    return torch.cat([finer, bounds[:, -1:]], 1), 2 * codes + right


def _centroids(data: _SortedRows, bounds: Tensor) -> Tensor:
    """[R, C] float64 weighted means, never decreasing along a row.

    An empty interval takes the value of the interval to its left (a right child then inherits the
    mean of its parent); at the very left, the smallest value of the row.
    """
    start, end = bounds[:, :-1], bounds[:, 1:]
    mass = data.mass.gather(1, end) - data.mass.gather(1, start)
    moment = data.moment.gather(1, end) - data.moment.gather(1, start)
    empty = end == start
    last = data.values.shape[1] - 1
    low = data.values.gather(1, start.clamp_max(last))
    high = data.values.gather(1, (end - 1).clamp_min(0))
    mean = torch.where(empty, data.values[:, :1], data.center + moment / mass.where(~empty, 1.0))
    mean = torch.where(empty, mean, mean.maximum(low).minimum(high))
    return mean.cummax(1).values


def _reduction(data: _SortedRows, start: Tensor, end: Tensor) -> Tensor:
    """Moment^2 / mass of intervals [start, end), 0 where empty.

    The weighted squared error of a row is a constant minus the sum of this over its intervals.
    """
    mass = data.mass.gather(1, end) - data.mass.gather(1, start)
    moment = data.moment.gather(1, end) - data.moment.gather(1, start)
    return squared(moment, mass)


def _seed(data: _SortedRows, clusters: int) -> Tensor:
    """Bounds [R, C+1] of a weighted k-means: best of several Lloyd runs, then a local search."""
    candidates = _lloyd(data, torch.stack(_starts(data, clusters), 1))
    scores = torch.stack([_score(data, bounds) for bounds in candidates.unbind(1)])
    rows = torch.arange(data.values.shape[0], device=data.values.device)
    bounds = candidates[rows, scores.argmax(0)]
    for at_a_loss in (False, True):
        rows = torch.arange(data.values.shape[0], device=data.values.device)
        for _ in range(_SEARCH_ROUNDS):
            part, before = data.rows(rows), bounds[rows]
            moved = _relocate(part, before, at_a_loss=at_a_loss)
            for _ in range(1 + at_a_loss):
                moved = _polish(part, _polish(part, moved, 1), 2)
            better = _score(part, moved) > _score(part, before)
            rows = rows[better]
            if not rows.numel():
                break
            bounds[rows] = moved[better]
    return bounds


def _score(data: _SortedRows, bounds: Tensor) -> Tensor:
    """[R]: what the intervals take off the weighted squared error of each row."""
    return _reduction(data, bounds[:, :-1], bounds[:, 1:]).sum(1)


def _relocate(data: _SortedRows, bounds: Tensor, *, at_a_loss: bool) -> Tensor:
    """Merge the two neighbours that lose least and split the interval that gains most.

    Takes a row out of a local optimum that moving single bounds cannot leave. Does so only where it
    pays at once, unless `at_a_loss`: moving bounds afterwards may win more than was lost.
    """
    split = best_splits(data.mass, data.moment, bounds)
    start, end = bounds[:, :-1], bounds[:, 1:]
    whole = _reduction(data, start, end)
    gain = _reduction(data, start, split) + _reduction(data, split, end) - whole
    loss = whole[:, :-1] + whole[:, 1:] - _reduction(data, start[:, :-1], end[:, 1:])
    clusters = whole.shape[1]
    net = gain[:, :, None] - loss[:, None, :]  # [R, split interval, first of the merged pair]
    index = torch.arange(clusters, device=bounds.device)
    overlap = (index[:, None] == index[:-1]) | (index[:, None] == index[:-1] + 1)
    best = net.masked_fill_(overlap, -torch.inf).flatten(1).max(1)
    cut, merged = best.indices // (clusters - 1), best.indices % (clusters - 1)
    moved = bounds.clone()
    moved.scatter_(1, merged[:, None] + 1, split.gather(1, cut[:, None]))
    allowed = best.values.isfinite() if at_a_loss else best.values > 0
    return torch.where(allowed[:, None], moved.sort(1).values, bounds)


def _starts(data: _SortedRows, clusters: int) -> list[Tensor]:
    """Centroids [R, C] from which Lloyd runs start; the same for the same row, no randomness."""
    rows, cols = data.values.shape
    # Optimal levels follow density^(1/3), for a Gaussian one of sqrt(3) times the deviation.
    quantile = (
        torch.arange(clusters, dtype=torch.float64, device=data.values.device) + 0.5
    ) / clusters
    levels = 3**0.5 * torch.special.ndtri(quantile)
    mass = data.mass[:, -1:]
    w = data.mass.diff(dim=1)
    deviation = ((w * (data.values - data.center).square()).sum(1, keepdim=True) / mass).sqrt()
    starts = [data.center + spread * deviation * levels for spread in _SPREADS]
    low, high = data.values[:, :1], data.values[:, -1:]
    starts.append(low + (high - low) * quantile)
    position = torch.searchsorted(data.mass, mass * quantile, right=True).sub_(1)
    starts.append(data.values.gather(1, position.clamp_(0, cols - 1)))
    starts.append(_companded(data, w, quantile))
    bounds = torch.tensor([[0, cols]], device=data.values.device).repeat(rows, 1)
    codes = torch.zeros((rows, cols), dtype=torch.int64, device=data.values.device)
    while bounds.shape[1] <= clusters:
        bounds, codes = _refine(bounds, codes, best_splits(data.mass, data.moment, bounds, codes))
    starts.append(_centroids(data, bounds))
    return starts


def _companded(data: _SortedRows, w: Tensor, quantile: Tensor) -> Tensor:
    """Quantiles of (w * density)^(1/3), the optimal density of levels, from the row's own gaps."""
    gaps = data.values.diff(dim=1)
    share = (w[:, 1:] + w[:, :-1]).pow(1 / 3) * gaps.pow(2 / 3)
    cumulated = torch.cat([torch.zeros_like(data.center), share.cumsum(1)], 1)
    position = torch.searchsorted(cumulated, cumulated[:, -1:] * quantile)
    return data.values.gather(1, position.clamp_(max=data.values.shape[1] - 1))


def _lloyd(data: _SortedRows, centroids: Tensor) -> Tensor:
    """Bounds [R, S, C+1] to which Lloyd's iteration takes the given centroids [R, S, C]."""
    rows, cols = data.values.shape
    starts, clusters = centroids.shape[1:]
    first = torch.zeros((rows, starts, 1), dtype=torch.int64, device=data.values.device)
    bounds = first.expand(-1, -1, clusters + 1)
    for _ in range(_LLOYD_ITERATIONS):
        middles = (centroids[..., 1:] + centroids[..., :-1]) / 2
        inner = torch.searchsorted(data.values, middles.flatten(1)).view(middles.shape)
        moved = torch.cat([first, inner, first + cols], 2)
        if torch.equal(bounds, moved):
            break
        bounds = moved
        at = bounds.flatten(1)
        mass = data.mass.gather(1, at).view(bounds.shape).diff(dim=2)
        moment = data.moment.gather(1, at).view(bounds.shape).diff(dim=2)
        full = bounds.diff(dim=2) > 0
        mean = data.center[..., None] + moment / mass.where(full, 1.0)
        centroids = torch.where(full, mean, centroids)
    return bounds


def _polish(data: _SortedRows, bounds: Tensor, first: int) -> Tensor:
    """Move the inner bounds first, first + 2, ... to their exact optimum between their neighbours.

    Args:
        data: The rows.
        bounds: [R, C+1].
        first: 1 or 2.
    """
    last = bounds.shape[1] - 1
    moving = list(range(first, last, 2))
    fixed = [i for i in range(last + 1) if i not in moving]
    keep = bounds[:, fixed]
    split = best_splits(data.mass, data.moment, keep)
    out = bounds.clone()
    out[:, moving] = split[:, [fixed.index(i - 1) for i in moving]]
    return out
