"""A rank's own experts: ids of the model become its own, also before kernels have run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pw.engine.parallel import own_experts
from pw.engine.parallel.own_experts import OwnExperts

LOCAL = torch.tensor([[0, -1, 1, -1]])  # a layer of four experts, two of them here


class Noted:
    """Experts that note who is asked."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.asked: list[list[int]] = []

    def __call__(
        self, slot: int, _module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        self.asked += ids.tolist()
        return x

    def rehearse(self, tokens: int, dtype: torch.dtype) -> None:
        raise NotImplementedError


def asked(ids: list[list[int]]) -> list[list[int]]:
    inner = Noted()
    x, chosen = torch.zeros(len(ids), 4), torch.tensor(ids)
    OwnExperts(inner, LOCAL, None)(0, nn.Identity(), x, chosen, torch.ones(chosen.shape))
    return inner.asked


def test_the_experts_of_others_add_nothing() -> None:
    assert asked([[0, 1], [2, 3]]) == [[0, -1], [1, -1]]


def test_ids_that_nobody_has_written_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_experts, "rehearsing", lambda _: True)
    assert asked([[1 << 40, -7]]) == [[0, 0]]
