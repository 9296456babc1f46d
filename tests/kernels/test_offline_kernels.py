"""Kernels of the offline fits: used where they agree with torch, else left aside with a word."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from pw_kernels import offline

CPU = torch.device("cpu")


def broken(*_: object) -> bool:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("agrees", "says"),
    [(broken, "do not run, torch does it: no compiler"), (lambda *_: False, "are wrong here")],
)
def test_kernels_that_fail_are_left_aside_with_a_word(agrees: object, says: str) -> None:
    with pytest.warns(UserWarning, match=f"kernels `x` {says}"):
        assert not offline.tried("x", ModuleType("x"), CPU, agrees)  # type: ignore[arg-type]


def test_a_cpu_has_torch_unless_told_otherwise() -> None:
    def never(*_: object) -> bool:
        raise AssertionError("tried")

    assert offline.kernels_for("splits", "auto", CPU, never) is None
    assert offline.kernels_for("splits", "torch", CPU, never) is None
    found = offline.kernels_for("splits", "triton", CPU, never)
    assert found is not None
    assert found.__name__ == "pw_kernels.triton_splits"
    with pytest.raises(ValueError, match="backend must be one of"):
        offline.kernels_for("splits", "cuda", CPU, never)
