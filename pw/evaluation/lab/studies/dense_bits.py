"""What it costs to give the dense weights a static width too: `--dense-bits`, which is not built.

Attention, shared experts and head are rounded by a k-means of each row, as a table for each row
would hold them; the routed experts stay unquantized. Routers, norms, embeddings and whatever has
one output stay as they are. Speed of the same idea: `kernels/bench/dense_bits.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pw.evaluation.lab.lab import Lab, Scores
from pw.evaluation.lab.model import LabModel, Memo
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import Row, interval, markdown, show

WIDTHS = (8, 6, 5, 4)
_ROUNDS = 12  # of Lloyd's algorithm
_ENTRY = 16  # bits of a table's entry, and of a weight


def run(room: Room) -> dict[str, Any]:
    """Score each width on the held-out text."""
    lab: Lab = room.heldout.lab
    dense, model = lab.dense, room.model
    rows: list[Row] = []
    for bits in WIDTHS:
        with rounded(model, bits) as share:
            scores = _score(lab)
        rows.append(
            {
                "bits": bits,
                "bytes_share": round(share, 4),
                "perplexity": round(scores.perplexity, 4),
                "nll": interval(scores.nll, dense.nll),
                "kl": interval(scores.kl),
            }
        )
    return {"rows": rows, "perplexity": round(dense.perplexity, 4)}


def _score(lab: Lab) -> Scores:
    """With unquantized experts, and nothing kept of earlier passes: attention has changed."""
    model = lab.model
    model.hold(model.unquantized())
    pairs = []
    with torch.no_grad():
        for place, window in enumerate(lab.windows):
            logits = model.logits(window.ids, window.scored - 1, Memo())
            pairs.append(lab.compare(place, logits))
    nll, kl = np.array(pairs, dtype=np.float64).T
    return Scores(nll, kl)


@contextmanager
def rounded(model: LabModel, bits: int) -> Iterator[float]:
    """Dense weights rounded inside; bytes of theirs, tables included, over those of 16 bits."""
    before: list[tuple[nn.Linear, Any]] = []
    held = wide = 0
    skeleton = model._skeleton
    try:
        model._skeleton = replace(skeleton, flat=None)  # which has joined copies of its own
        for module in skeleton.model.modules():
            if not isinstance(module, nn.Linear) or module.weight.is_meta or len(module.weight) < 2:
                continue
            before.append((module, module.weight))
            values = round_rows(module.weight.detach(), bits)
            module.weight = nn.Parameter(values, requires_grad=False)  # an embedding keeps its own
            rows, cols = values.shape
            wide += _ENTRY * rows * cols
            held += min(_ENTRY * rows * cols, rows * (bits * cols + (_ENTRY << bits)))
        yield held / wide
    finally:
        model._skeleton = skeleton
        for module, weight in before:
            module.weight = weight


def round_rows(weight: Tensor, bits: int) -> Tensor:
    """Each row of a weight [N, K] rounded to the 2^bits means of its own k-means."""
    cols = weight.shape[1]
    count = 1 << bits
    if count >= cols:
        return weight.clone()
    ordered, order = weight.float().contiguous().sort(dim=1)
    middles = ((torch.arange(count, device=weight.device) + 0.5) / count * cols).long()
    means = ordered[:, middles].contiguous()
    for _ in range(_ROUNDS):
        borders = (means[:, 1:] + means[:, :-1]) / 2
        cluster = torch.searchsorted(borders, ordered)
        ones = torch.ones_like(ordered)
        sums = torch.zeros_like(means).scatter_add_(1, cluster, ordered)
        sizes = torch.zeros_like(means).scatter_add_(1, cluster, ones)
        means = torch.where(sizes > 0, sums / sizes.clamp(min=1), means)
        means = means.sort(dim=1).values
    borders = (means[:, 1:] + means[:, :-1]) / 2
    cluster = torch.searchsorted(borders, ordered)
    values = means.to(torch.bfloat16).float().gather(1, cluster)
    return torch.empty_like(values).scatter_(1, order, values).to(weight.dtype)


def tables(result: dict[str, Any]) -> str:
    """Markdown."""
    head = ("dense bits", "bytes % of bf16", "ppl", "NLL over bf16 [95 %]", "KL")
    rows: list[tuple[object, ...]] = [("16", "100", result["perplexity"], "", "")]
    rows += [
        (
            row["bits"], f"{100 * row['bytes_share']:.1f}", row["perplexity"], show(row["nll"]),
            f"{row['kl']['mean']:.5f}",
        )
        for row in result["rows"]
    ]  # fmt: skip
    return markdown(head, rows)
