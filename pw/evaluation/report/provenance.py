"""Where figures come from: command, machine, date, versions, seeds, artifact, text."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pw import __version__
from pw.store.artifact import Artifact

_LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "zarr", "numba", "triton", "lm_eval")


def provenance(
    arguments: Sequence[str], artifact: Path, device: str, seeds: Mapping[str, int]
) -> dict[str, Any]:
    """All of it, ready for JSON.

    Args:
        arguments: What followed `pw` on the command line.
        artifact: What was run.
        device: `auto`, `cpu` or `cuda`, as asked for.
        seeds: What each is for, and the seed.
    """
    opened = Artifact.open(artifact)
    return {
        "command": shlex.join(["pw", *arguments]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(device),
        "versions": {"pagedweight": __version__, "python": platform.python_version()}
        | {name: version for name in _LIBRARIES if (version := _version(name))},
        "seeds": dict(seeds),
        "artifact": {
            "name": artifact.name,
            "hash": opened.artifact_hash,
            "model": opened.manifest.model.name,
            "architecture": opened.manifest.model.architecture,
            "bits": [opened.min_bits, opened.max_bits],
        },
    }


def hardware(device: str) -> dict[str, Any]:
    """The machine: processor, cores, memory, and the GPUs where one is used."""
    import torch

    uses_gpu = device != "cpu" and torch.cuda.is_available()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "gpus": [
            torch.cuda.get_device_name(place)
            for place in range(torch.cuda.device_count() if uses_gpu else 0)
        ],
    }


def sha256_of(text: str) -> str:
    """Digest of a text, so that another one is noticed."""
    return hashlib.sha256(text.encode()).hexdigest()


def _processor() -> str:
    """Name of the CPU, as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
