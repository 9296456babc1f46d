from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pw.errors import PwError
from pw.evaluation.divergence import Reference


def test_divergence_token_by_token_in_pieces(tmp_path: Path) -> None:
    dense, other = torch.randn(150, 33) * 3, torch.randn(150, 33) * 3
    p, q = dense.double().log_softmax(-1), other.double().log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1)
    with Reference(2, 150, tmp_path) as kept:
        for start in range(0, 150, 70):
            kept.keep(1, start, dense[start : start + 70])
        found = torch.from_numpy(kept.divergence(1, 0, other))
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=1e-4)
        late = torch.from_numpy(kept.divergence(1, 100, other[100:]))
        torch.testing.assert_close(late, found[100:])
        assert abs(kept.divergence(1, 0, dense)).max() < 1e-5  # what float16 costs, squared
        with pytest.raises(ValueError, match="no reference for all tokens from 0 on of chunk 0"):
            kept.divergence(0, 0, other)
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**30 + 1000))
    with (
        Reference(3, 7, tmp_path) as kept,
        pytest.raises(PwError, match="takes 1,050 bytes of disk, 1,073,742,824 are free") as error,
    ):
        kept.keep(0, 0, torch.zeros(7, 25))
    assert "--no-kl" in error.value.hint
