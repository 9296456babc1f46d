"""The floors that stages state: no more than the products they make, and not far below."""

import io
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pw.config import QuantizeConfig
from pw.models.checkpoint import Checkpoint
from pw.models.tokenizer import load_tokenizer
from pw_pipelines import quantize, sensitivity, trace
from pw_pipelines.calibration import calibration_set
from pw_pipelines.costs import forward_operations, sensitivity_operations
from pw_pipelines.observation import ObservedModel
from pw_pipelines.progress import Progress, Style
from support.offline import QUIET, calibration, random_checkpoint

MATRIX = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
WIDE = {"hidden_size": 64, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}


def products(counter: FlopCounterMode) -> int:
    """Operations of matrix products; those of attention have no weights."""
    return sum(counter.get_flop_counts()["Global"].get(kind, 0) for kind in MATRIX)


def test_one_reading_makes_the_products_that_its_floor_counts(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "model", **WIDE)
    checkpoint = Checkpoint.open(tmp_path / "model")
    windows = torch.randint(3, 200, (20, 64))
    with FlopCounterMode(display=False) as counter:
        ObservedModel(checkpoint, "cpu").read(windows)
    floor = forward_operations(checkpoint, windows.numel())
    assert floor == pytest.approx(products(counter), rel=0.03)


def test_stages_say_what_they_took_and_their_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint(tmp_path / "model", **WIDE)
    model, out = str(tmp_path / "model"), tmp_path / "a.pw"
    text = calibration(tmp_path, nsamples=40)
    quantize.run(model, out, QuantizeConfig(max_bits=4, calibration=text), QUIET, device="cpu")
    checkpoint = Checkpoint.open(tmp_path / "model")
    windows = calibration_set(text, load_tokenizer(out)).windows
    monkeypatch.setattr(sensitivity, "measure_agreement", None)
    told = io.StringIO()
    with pytest.raises(TypeError), FlopCounterMode(display=False) as counter:
        sensitivity.run(out, text, QUIET, device="cpu")  # up to the agreement
    floor = sensitivity_operations(checkpoint, windows.numel(), widths=3)
    assert 0.6 * products(counter) < floor <= products(counter)
    monkeypatch.undo()
    for stage in (sensitivity, trace):
        stage.run(out, text, Progress(Style.PLAIN, stream=told), device="cpu")
    for name in ("sensitivity", "trace"):
        (line,) = [s for s in told.getvalue().splitlines() if s.startswith(name) and "read" in s]
        assert "times the checkpoint; floor: matrix products alone take" in line
