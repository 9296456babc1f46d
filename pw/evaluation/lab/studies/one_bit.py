"""A width of one bit, which the product does not have: what it would win where bytes are few.

The codes of one bit are the first plane that the artifact has; the two levels of a row are least
squares under the second moments of the block's inputs. A block then holds one plane less than at
two bits and pages of tables as at two bits. Damage at one bit is that of the artifact's table at
two, times the ratio of both on some windows of calibration text. Plans with and without the width
are hulls over the same table.

Axes: E experts, N rows, K columns, W widths, n blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.blocks import MODULES, BlockKey
from pw.evaluation.baselines.static import hull
from pw.evaluation.lab.costs import Costs
from pw.evaluation.lab.damage_scores import measure_scores
from pw.evaluation.lab.lab import Lab
from pw.evaluation.lab.model import UNQUANTIZED, LabModel
from pw.evaluation.lab.room import CALIBRATION_WINDOW, Room
from pw.evaluation.lab.studies.common import interval, markdown, show
from pw.evaluation.lab.texts import read_documents, spread_windows
from pw.memory.budget import layouts_of
from pw.models.dense import ExpertCall, ExpertObserver
from pw.planning.damage import transition_costs
from pw_kernels.bitplane import TILE_WORDS, plane_bytes, unpack_planes

BUDGETS = (2.0, 2.2, 2.5)  # mean bits of uniform widths of the same bytes
MOMENT_WINDOWS, SCORE_WINDOWS = 24, 8  # of calibration text, evenly spread
_DAMPING = 1e-2  # of the mean diagonal, added to second moments

Floats = NDArray[np.float64]


class Moments(ExpertObserver):
    """Second moments [K, K] of the inputs of every block, tokens weighted by the router's r^2."""

    def __init__(self, model: LabModel) -> None:
        self._geometry = model.geometry
        self.sums: dict[int, Tensor] = {}  # by block

    def expert(self, call: ExpertCall) -> None:
        """Add an expert's tokens."""
        layer = self._geometry.layers[call.slot]
        for module, inputs in zip(MODULES, (call.inputs, call.hidden), strict=True):
            scaled = inputs.detach() * call.weights.detach()[:, None]
            place = self._geometry.index(BlockKey(layer, call.expert, module))
            self.sums[place] = self.sums.get(place, torch.zeros(())) + scaled.T @ scaled


class OneBitModel(LabModel):
    """A lab's model whose blocks can have one bit, too; `moments` are to be set before."""

    moments: dict[int, Tensor]  # by block; none: inputs that count alike

    def weight(self, index: int, bits: int) -> Tensor:
        """See `LabModel.weight`."""
        if bits != 1:
            return super().weight(index, bits)
        kept = self._decoded.get((index, 1))
        if kept is None:
            exact = super().weight(index, UNQUANTIZED)
            upper = self._first_plane(index).to(self.device) == 1
            found = two_levels(exact, upper, self.moments.get(index))
            kept = self._decoded[index, 1] = found.to(self.artifact.lut_dtype)
        return kept.float()

    def _first_plane(self, index: int) -> Tensor:
        """Codes [N, K] of one bit."""
        key = self.geometry.key(index)
        shape = self.geometry.shape(key.module)
        words = np.empty(plane_bytes(shape.rows, shape.cols) // 4, np.int32)
        self.artifact.read_planes(key, 0, 1, words.view(np.uint8))
        planes = torch.from_numpy(words).view(1, -1, TILE_WORDS)
        return unpack_planes(planes, shape.rows, shape.cols)


def two_levels(weights: Tensor, upper: Tensor, moment: Tensor | None) -> Tensor:
    """Weights [N, K] of two levels a row, those of least squares under `moment` [K, K].

    Args:
        weights: [N, K].
        upper: [N, K] bool, which of them have the upper level.
        moment: Of the inputs; None: the identity.
    """
    eye = torch.eye(weights.shape[1], device=weights.device)
    moment = eye if moment is None else moment + _DAMPING * moment.diagonal().mean() * eye
    high, low = upper.float(), (~upper).float()
    seen = high @ moment
    both, own = (seen * low).sum(1), (seen * high).sum(1)
    rest = ((low @ moment) * low).sum(1)
    wanted = weights @ moment
    right = torch.stack([(wanted * high).sum(1), (wanted * low).sum(1)], 1)  # [N, 2]
    left = torch.stack([own, both, both, rest], 1).view(-1, 2, 2)
    # This driver, which bears rows of one level only, is the CPU's.
    fit = torch.linalg.lstsq(left.cpu(), right[..., None].cpu(), driver="gelsd")
    levels = fit.solution[..., 0].to(weights.device)
    return torch.where(upper, levels[:, :1], levels[:, 1:])


def run(room: Room) -> dict[str, Any]:
    """Score plans with and without one bit."""
    texts, known = room.texts, room.model
    model = OneBitModel(known.artifact, known.checkpoint, known.device)
    windows = _windows(room, texts.calibration, MOMENT_WINDOWS)
    moments = Moments(model)
    with model.watched(moments), torch.no_grad():
        for ids in windows:
            model.logits(ids)
    model.moments = moments.sums
    model.widths = range(1, known.widths[-1] + 1)
    ratio = _ratio(model, _windows(room, texts.calibration, SCORE_WINDOWS))
    table = known.artifact.table("sensitivity").arrays["output_gradient"]
    scores = table.reshape(known.geometry.blocks, -1).astype(np.float64)
    wider = np.concatenate([scores[:, :1] * ratio[:, None], scores], 1)
    costs = np.concatenate([_one_plane_less(room), room.costs], 1)
    lab, rows = Lab(model, room.heldout.lab.windows, like=room.heldout.lab), []
    for mean in BUDGETS:
        budget = room.budget(mean)
        plain = hull(transition_costs(scores), room.costs, known.widths, budget)
        mixed = hull(transition_costs(wider), costs, model.widths, budget)
        without, found = room.heldout.score(plain), lab.score(mixed)
        rows.append(
            {
                "budget_bits": mean,
                "blocks_of_one": int((mixed == 1).sum()),
                "without": interval(without.nll, lab.dense.nll),
                "with": interval(found.nll, lab.dense.nll),
                "difference": interval(found.nll, without.nll),
                "kl_without": interval(without.kl),
                "kl_with": interval(found.kl),
            }
        )
    return {
        "rows": rows,
        "blocks": known.geometry.blocks,
        "damage_ratio": round(float((scores[:, 0] * ratio).sum() / scores[:, 0].sum()), 3),
    }


def _windows(room: Room, path: Path, count: int) -> list[Tensor]:
    return spread_windows(read_documents(path), room.tokenizer, CALIBRATION_WINDOW, count)


def _ratio(model: OneBitModel, windows: list[Tensor]) -> Floats:
    """Damage [n] of each block at one bit over that at two; the mean where none was seen."""
    token = measure_scores(model, windows)["token"].reshape(model.geometry.blocks, -1)
    usual = token[:, 0].sum() / token[:, 1].sum()
    seen = np.divide(
        token[:, 0], token[:, 1], out=np.full(len(token), usual), where=token[:, 1] > 0
    )
    return np.asarray(np.maximum(seen, 1.0))


def _one_plane_less(room: Room) -> Costs:
    """Bytes [n, 1] of one bit: those of two without a plane."""
    model = room.model
    layouts = layouts_of(
        model.geometry, model.checkpoint.kv, torch.float32, (model.widths[0], model.widths[-1]),
        None, model.artifact.table_bytes,
    )  # fmt: skip
    planes = [layout.plane_pages * layout.page_bytes for layout in layouts]
    return np.asarray(room.costs[:, :1] - np.tile(planes, len(room.costs) // 2)[:, None])


def tables(result: dict[str, Any]) -> str:
    """Markdown."""
    head = (
        "bytes of uniform", "blocks at 1 bit", "NLL over BF16 without", "with",
        "difference [95 %]", "KL without, with",
    )  # fmt: skip
    rows = [
        (
            f"{row['budget_bits']:g} bits", f"{row['blocks_of_one']} of {result['blocks']}",
            show(row["without"]), show(row["with"]), show(row["difference"]),
            f"{row['kl_without']['mean']:.4f}, {row['kl_with']['mean']:.4f}",
        )
        for row in result["rows"]
    ]  # fmt: skip
    return markdown(head, rows)
