"""Small artifacts and engines for tests: random checkpoints with a byte tokenizer, quantized."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from pw.config import (
    CalibrationConfig,
    EngineConfig,
    PlannerConfig,
    PrecisionPolicy,
    QuantizeConfig,
)
from pw.engine import Engine
from pw.models.testing import make_checkpoint, make_model
from pw_pipelines import quantize, sensitivity
from support.offline import QUIET, write_tokenizer

SHARED = "PW_TESTS_SHARED"  # names a folder of what several tests use; unset: nothing is kept
VOCABULARY = 260  # three specials, 256 bytes, one spare
SAMPLES = CalibrationConfig(nsamples=4, seqlen=48)


def make_artifact(
    kind: str, folder: Path, change: Callable[[Any], None] | None = None, **overrides: Any
) -> tuple[Any, Path]:
    """A random model of a kind and its quantized artifact, sensitivities measured.

    One that was made before in the same test run is copied.

    Args:
        kind: One of `pw.models.testing.KINDS`.
        folder: Where both go.
        change: Of the model, before it is written.
        overrides: Further settings of its config.
    """
    settings = {"vocab_size": VOCABULARY, **overrides}
    if kind == "gemma4_shared":
        settings["vocab_size_per_layer_input"] = VOCABULARY
    if change is not None or SHARED not in os.environ:
        return _make(kind, folder, change, settings)
    name = hashlib.sha256(repr((kind, sorted(settings.items()))).encode()).hexdigest()[:16]
    kept = Path(os.environ[SHARED]) / name
    whole = kept.with_suffix(".whole")
    with FileLock(f"{kept}.lock"):
        if not whole.exists():
            shutil.rmtree(kept, ignore_errors=True)  # of a test that was stopped
            _make(kind, kept, None, settings)
            whole.touch()
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    return make_model(kind, **settings), folder / "model.pw"


def _make(
    kind: str, folder: Path, change: Callable[[Any], None] | None, settings: dict[str, Any]
) -> tuple[Any, Path]:
    checkpoint = folder / "checkpoint"
    model = make_checkpoint(kind, checkpoint, **settings)
    if change is not None:
        change(model)
        model.save_pretrained(checkpoint)
    write_tokenizer(checkpoint)
    artifact = folder / "model.pw"
    quantize.run(str(checkpoint), artifact, QuantizeConfig(max_bits=6, calibration=SAMPLES), QUIET)
    sensitivity.run(artifact, SAMPLES, QUIET)
    return model.float().eval(), artifact


def open_engine(artifact: Path, policy: str = "adaptive", **settings: Any) -> Engine:
    """An engine on the CPU with small limits; planner settings are given as `planner_...`."""
    planner: dict[str, Any] = {"residual": "off", "dwell_steps": 2, "idle_grace_seconds": 0.0}
    for name in [name for name in settings if name.startswith("planner_")]:
        planner[name.removeprefix("planner_")] = settings.pop(name)
    defaults: dict[str, Any] = {
        "memory_budget": 64 << 20,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "device": "cpu",
    }
    return Engine.from_artifact(
        artifact,
        EngineConfig(
            policy=PrecisionPolicy.parse(policy),
            planner=PlannerConfig(**planner),
            **(defaults | settings),
        ),
    )


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY - 1, (length,), generator=generator).tolist()


def tight_budget(artifact: Path, kv_tokens: int, policy: str = "adaptive", **settings: Any) -> int:
    """A budget whose arena holds all planes at the widest width and so many tokens of KV less."""
    roomy = open_engine(artifact, policy, **settings)
    status = roomy.status()
    page = status.page_bytes
    pages = roomy._parts.kv.pages_for_tokens(kv_tokens)
    fixed = status.bytes.total - status.bytes.free - status.bytes.kv
    return fixed + pages * page
