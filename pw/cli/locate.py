"""What MODEL means: a checkpoint when an artifact is made, an artifact after that, `tiny` both."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from pathlib import Path
from shlex import quote

from pw import __version__
from pw.cli.options import Calibration, Common, Runtime, Widths
from pw.cli.stages import build, fit
from pw.errors import ConfigError, StoreError

TINY = "tiny"


def cache_home() -> Path:
    """Folder for what can be made again: `$PW_HOME`, else under `$XDG_CACHE_HOME`."""
    if own := os.environ.get("PW_HOME"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedweight"


def default_output(model: str) -> Path:
    """Where `pw quantize MODEL` writes when not told: `<name>.pw` here, never over MODEL."""
    name = Path(model).resolve().name.partition("@")[0].removesuffix(".pw").removesuffix(".json")
    output = Path(f"{name}.pw")
    return Path(f"{name}-quantized.pw") if output.resolve() == Path(model).resolve() else output


def artifact_path(model: str, *, quiet: bool = False) -> Path:
    """The artifact that MODEL names; `tiny` is calibrated into the cache on first use.

    Raises:
        StoreError: MODEL is missing, unfinished, incomplete, or a checkpoint; the hint is the line
            to run.
    """
    if model == TINY:
        return _tiny_artifact(quiet)
    path = Path(model)
    if (path / "manifest.json").is_file():
        return path
    output, name = quote(str(default_output(model))), quote(model)
    if Path(f"{path}.partial").is_dir():
        raise StoreError(
            f"artifact is not finished: `{model}`",
            f"resume it: `pw calibrate MODEL -o {name}`, with the MODEL and flags of before",
        )
    if any((path / part).is_dir() for part in ("planes.zarr", "luts.zarr")):
        raise StoreError(
            f"artifact without manifest.json, an incomplete copy: `{model}`",
            f"copy the whole folder again, or make it anew: `pw calibrate MODEL -o {output}`",
        )
    if (path / "config.json").is_file() or _names_a_hub_model(model):
        fetch = "" if path.exists() else " --download"
        raise StoreError(
            f"not an artifact but an unquantized checkpoint: `{model}`",
            f"quantize it first: `pw calibrate {name} -o {output}{fetch}`, then use `{output}`",
        )
    if path.exists():
        raise StoreError(
            f"not an artifact, it has no manifest.json: `{model}`",
            f"make one: `pw calibrate MODEL -o {output}`",
        )
    wanted = name if path.suffix == ".pw" else output
    raise StoreError(
        f"no such artifact: `{model}`",
        f"make it: `pw calibrate MODEL -o {wanted}`, or try `{TINY}`",
    )


def model_folder(model: str, runtime: Runtime, *, quiet: bool = False) -> Path:
    """What an engine is loaded from: an artifact, or the folder that stands for dummy weights.

    Raises:
        StoreError: See `artifact_path`.
        ConfigError: MODEL names no config, or `--hf-overrides` are not for it.
    """
    if runtime.load_format != "dummy":
        if runtime.hf_overrides is not None:
            raise ConfigError("--hf-overrides is for --load-format dummy alone")
        return artifact_path(model, quiet=quiet)
    try:
        overrides = json.loads(runtime.hf_overrides or "{}")
    except ValueError as error:
        raise ConfigError(f"--hf-overrides is not JSON: {error}") from error
    if not isinstance(overrides, dict):
        raise ConfigError("--hf-overrides must be a JSON object")

    from pw.models.stand_in import write_folder

    config = _config_file(model)
    mark = hashlib.sha256(config.read_bytes() + json.dumps(overrides).encode()).hexdigest()[:8]
    name = config.parent.name if config.name == "config.json" else config.stem
    out = cache_home() / "dummy" / f"{name}-{mark}"
    write_folder(config, out, overrides)
    return out


def _config_file(model: str) -> Path:
    """The config that MODEL names: a .json, a folder with config.json, a recipe beside configs/."""
    from pw.models.resolve import resolve_model

    path = resolve_model(TINY) if model == TINY else Path(model)
    found = path / "config.json" if path.is_dir() else path
    if path.suffix == ".toml":
        found = path.parent / "configs" / f"{path.stem}.json"
    if found.suffix != ".json" or not found.is_file():
        raise ConfigError(
            f"no model config: `{found}`",
            "name a config.json, its folder, or a recipe like pipelines/recipes/mixtral-8x7b.toml",
        )
    return found


def _names_a_hub_model(model: str) -> bool:
    """Whether MODEL looks like `organization/name` of a model hub and is no path."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~")) and ".pw" not in model


def _tiny_artifact(quiet: bool) -> Path:
    """The finished artifact of the bundled model: what `make demo` left here, else the cache's."""
    made_here = Path("artifacts") / f"{TINY}.pw"
    path = cache_home() / __version__ / f"{TINY}.pw"
    for place in (made_here, path):
        if _is_finished(place):
            return place
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".once").open("w")
    except OSError as error:
        raise ConfigError(
            f"cannot write the cache `{path.parent}`: {error.strerror}",
            "name another folder in PW_HOME",
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not quiet:
                print(f"another process calibrates the bundled model into {path}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_finished(path):
            _calibrate_tiny(path, quiet)
    return path


def _is_finished(artifact: Path) -> bool:
    return (artifact / "residuals.zarr").is_dir()  # what its last stage writes


def _calibrate_tiny(path: Path, quiet: bool) -> None:
    if not quiet:
        print(
            f"calibrating the bundled model once, half a minute on two idle cores, into {path}",
            file=sys.stderr,
        )
    common = Common(quiet=quiet)
    build(TINY, path, Widths(), Calibration(), common)
    fit(path, common)
