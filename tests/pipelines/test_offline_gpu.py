"""The offline stages on a GPU give what they give on a CPU, but for rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pw.config import QuantizeConfig
from pw.models.checkpoint import Checkpoint
from pw.models.dequantized import DequantizedBlocks
from pw.store.artifact import Artifact
from pw_kernels.codes import nearest_codes
from pw_pipelines import quantize, sensitivity, trace
from support.offline import QUIET, calibration, random_checkpoint


@pytest.mark.gpu
@pytest.mark.parametrize("codebook", ["joint", "kmeans"])
def test_a_gpu_makes_nearly_what_a_cpu_makes(codebook: str, tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    text = calibration(tmp_path, nsamples=40)
    config = QuantizeConfig(max_bits=5, codebook=codebook, calibration=text)  # type: ignore[arg-type]
    checkpoint, found = Checkpoint.open(tmp_path / "model"), {}
    for device in ("cpu", "cuda"):
        path = tmp_path / f"{device}.pw"
        quantize.run(str(tmp_path / "model"), path, config, QUIET, device=device)
        sensitivity.run(path, text, QUIET, device=device)
        trace.run(path, text, QUIET, device=device)
        artifact = Artifact.open(path)
        blocks = DequantizedBlocks(artifact, torch.device("cpu"))
        errors = [
            blocks.errors(key, checkpoint.expert_weight(key)).square().sum((1, 2))
            for key in artifact.geometry.keys()
        ]
        found[device] = (torch.stack(errors), artifact.table("sensitivity").arrays)
    for one, other in zip(found["cpu"][0], found["cuda"][0], strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=1e-6)
    scores = [tables["output_gradient"].sum((0, 1)) for _, tables in found.values()]
    np.testing.assert_allclose(scores[0], scores[1], rtol=0.1)


@pytest.mark.gpu
def test_the_kernel_for_codes_is_used_and_agrees() -> None:
    tables, wanted = torch.randn(5000, 508, device="cuda"), torch.randn(5000, 7, device="cuda")
    found = nearest_codes(tables, wanted, 2, backend="triton")
    expected = nearest_codes(tables, wanted, 2, backend="torch")
    assert (found != expected).float().mean() < 1e-3
    assert torch.equal(nearest_codes(tables, wanted, 2), found)
