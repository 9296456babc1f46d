"""What is wrong with an artifact and can be told at once, before torch is loaded for the rest.

The engine checks all of it again, and more; this only spares people the wait. What it leaves to
those who start it is whether the longest context that fits is long enough.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pw import FORMAT_VERSION
from pw.config import EngineConfig, format_bytes, format_exactly
from pw.errors import BudgetError, ConfigError, StoreError

if TYPE_CHECKING:
    from pw.engine.request import EngineStatus

_MANIFEST_BYTES = 256 << 20
_HASHED_BYTES = (
    1 << 30
)  # of all files that are read; planes and larger files are left to the engine
_DENSE = "dense.safetensors"
_NARROW = ("bfloat16", "float16")
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def check_artifact(path: Path, config: EngineConfig) -> None:
    """Refuse an artifact that the engine would refuse after seconds.

    Args:
        path: Its folder.
        config: With what it is to be served.

    Raises:
        StoreError: It is of a newer format, or a file is missing, cut short or another one.
        ConfigError: A width is not to be had.
        BudgetError: Its weights alone are more than the memory budget.
    """
    manifest = _read(path / "manifest.json")
    if manifest is None:
        return
    version = manifest.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise StoreError(
            f"artifact has a newer format: `{path / 'manifest.json'}`: version {version}, "
            f"this program reads up to {FORMAT_VERSION}",
            "upgrade pagedweight",
        )
    read = 0
    for file, size, sha256 in sorted(_files(path, manifest), key=lambda each: each[1]):
        read += size
        _check(file, size, sha256 if read <= _HASHED_BYTES else None)
    _check_widths(manifest, config)
    _check_budget(manifest, config)


def check_settings(path: Path, config: EngineConfig) -> None:
    """Refuse widths that an artifact does not have, and a budget below its weights.

    Args:
        path: Its folder.
        config: With what it is to be run.

    Raises:
        ConfigError: A width is not to be had.
        BudgetError: Its weights alone are more than the memory budget.
    """
    manifest = _read(path / "manifest.json")
    if manifest is not None:
        _check_widths(manifest, config)
        _check_budget(manifest, config)


def check_context(wanted: int | None, started: EngineStatus) -> None:
    """Refuse to run with shorter contexts than somebody has asked for by name.

    What counts is one sequence alone beside the weights at the least widths that the policy can
    reach: an adaptive engine gives planes up for it.

    Args:
        wanted: Tokens of --max-model-len; None: as many as fit.
        started: Of the engine.

    Raises:
        BudgetError: They do not fit.
    """
    found = started.max_model_len
    if wanted is None or wanted <= found:
        return
    widths = {"adaptive": " at their least widths", "dense": ", unquantized"}
    raise BudgetError(
        f"--max-model-len of {wanted:,} tokens does not fit in the memory budget of "
        f"{format_exactly(started.bytes.budget)}: beside the experts"
        f"{widths.get(started.policy, f' at {started.policy}')} {found:,} tokens do",
        f"lower it to {found}, raise --memory-budget, or give `auto`: as many as fit",
    )


def _read(path: Path) -> dict[str, Any] | None:
    """A manifest; None where only the engine can say what is wrong with it."""
    if not path.is_file() or path.stat().st_size > _MANIFEST_BYTES:
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _files(path: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[Path, int, str]]:
    """Files inside the artifact that its manifest describes: with bytes and SHA-256."""
    files = manifest.get("files")
    for name, record in files.items() if isinstance(files, dict) else ():
        inside = PurePosixPath(name)
        size = record.get("bytes") if isinstance(record, dict) else None
        if isinstance(size, int) and not inside.is_absolute() and ".." not in inside.parts:
            yield path / inside, size, str(record.get("sha256"))


def _check(file: Path, size: int, sha256: str | None) -> None:
    """Refuse a file that is not the one described; without a digest its size must do."""
    if not file.is_file():
        raise StoreError(f"artifact file is missing: `{file}`", "copy the whole folder again")
    found = file.stat().st_size
    problem = "" if found == size else f"has {found} bytes instead of {size}"
    if not problem and sha256 is not None:
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
                problem = "SHA-256 differs"
    if problem:
        raise StoreError(
            f"artifact file is damaged: `{file}`: {problem}",
            "it is not the file that the artifact was made with: copy it again",
        )


def _check_widths(manifest: Mapping[str, Any], config: EngineConfig) -> None:
    """Refuse widths of which the artifact has no planes."""
    low, high = manifest.get("min_bits"), manifest.get("max_bits")
    if not isinstance(low, int) or not isinstance(high, int) or config.policy.kind == "dense":
        return
    least, most = config.min_bits or low, config.max_bits or high
    if least > most:
        raise ConfigError(f"--min-bits is above --max-bits: {least}, {most}", "swap them")
    named = (
        (f"policy `{config.policy}`", config.policy.bits),
        (f"--min-bits {config.min_bits}", config.min_bits),
        (f"--max-bits {config.max_bits}", config.max_bits),
    )
    for what, bits in named:
        if bits is not None and not low <= bits <= high:
            raise ConfigError(
                f"{what} is not to be had: the artifact has {low} to {high} bits",
                f"choose one of these, or make another artifact: "
                f"`pw calibrate MODEL --max-bits {bits}`"
                if bits > high
                else f"choose {low} to {high}",
            )


def _check_budget(manifest: Mapping[str, Any], config: EngineConfig) -> None:
    """Refuse a budget below the weights at their least widths; the engine knows the whole need."""
    budget = config.memory_budget
    if budget is None or config.tensor_parallel_size > 1 or config.policy.kind == "dense":
        return
    try:
        # In the dtype of the file, or wider, unless a narrower one is asked for.
        dense = int(manifest["files"][_DENSE]["bytes"]) // (2 if config.dtype in _NARROW else 1)
        stated = None if config.policy.path else config.policy.bits or config.min_bits
        bits = max(stated or 0, int(manifest["min_bits"]))
        experts = _expert_bytes(manifest, bits)
    except (KeyError, TypeError, ValueError):
        return
    if dense + experts > budget:
        raise BudgetError(
            f"memory budget of {format_exactly(budget)} is too small: weights alone, as they are "
            f"stored, take {format_exactly(dense + experts)} (dense {format_bytes(dense)}, "
            f"experts at {bits} bits {format_bytes(experts)})",
            "raise --memory-budget: workspace and KV come on top, and a CPU widens dense weights",
        )


def _expert_bytes(manifest: Mapping[str, Any], bits: int) -> int:
    """Planes and lookup tables of all experts at a width, without padding."""
    geometry = manifest["geometry"]
    entry = _ITEM_BYTES[manifest["lut_dtype"]]
    of_one: int = sum(
        int(shape["rows"]) * (int(shape["cols"]) * bits // 8 + 2**bits * entry)
        for shape in (geometry["gate_up"], geometry["down"])
    )
    return len(geometry["layers"]) * int(geometry["experts"]) * of_one
