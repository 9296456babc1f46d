"""Where numbers stop being finite: the block behind logits that are not, found by a second look."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pw.blocks import ExpertGeometry
from pw.engine.experts import RoutedExperts


class FiniteWatch:
    """Experts that look at what goes in and what comes out. Slow: for one chunk, after a fault.

    Attributes:
        found: Where the first numbers that are not finite came from; None: not from the layers.
    """

    def __init__(self, experts: RoutedExperts, geometry: ExpertGeometry) -> None:
        self._experts, self._layers = experts, geometry.layers
        self.batch = None
        self.found: str | None = None

    def __call__(
        self, slot: int, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """See `RoutedExperts`."""
        out = self._experts(slot, module, x, ids, weights)
        if self.found is None:
            layer = self._layers[slot]
            if not bool(x.isfinite().all()):
                self.found = f"attention or dense weights up to layer {layer}"
            elif not bool(out.isfinite().all()):
                rows = (~out.isfinite().all(-1)).nonzero()[:, 0]
                bad = self._bad_experts(slot, module, x, ids, rows)
                self.found = f"layer {layer}, experts {', '.join(map(str, bad))}"
        return out

    def _bad_experts(
        self, slot: int, module: nn.Module, x: Tensor, ids: Tensor, rows: Tensor
    ) -> list[int]:
        """Experts that alone give numbers which are not finite for one of the rows."""
        bad = set()
        for row in rows.tolist():
            for expert in ids[row].tolist():
                one = torch.full_like(ids[row : row + 1], expert)
                alone = torch.zeros(one.shape, dtype=torch.float32, device=x.device)
                alone[:, 0] = 1
                out = self._experts(slot, module, x[row : row + 1], one, alone.to(x.dtype))
                if not bool(out.isfinite().all()):
                    bad.add(expert)
        return sorted(bad)
