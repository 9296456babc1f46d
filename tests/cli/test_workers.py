"""How many cores the offline commands take."""

import torch

from pw.cli.options import Calibration


def test_workers_set_the_cores_that_torch_uses() -> None:
    before = torch.get_num_threads()
    try:
        Calibration().use_cores()
        assert torch.get_num_threads() == before
        Calibration(workers=1).use_cores()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
