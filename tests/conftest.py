"""Settings that must hold before any import: Triton interprets, torch keeps to two threads."""

import os

# Read once, at the first import of triton by anyone; GPU tests run with TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Torch's threads wait asleep, not spinning: ten times faster where other jobs share the cores.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Give every test the same random numbers, whatever ran before it."""
    torch.manual_seed(0)
