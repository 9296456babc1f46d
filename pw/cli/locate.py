"""What MODEL means: a checkpoint when an artifact is made, an artifact after that, `tiny` both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pw import __version__
from pw.cli.options import Calibration, Common, Widths
from pw.errors import StoreError

TINY = "tiny"


def cache_home() -> Path:
    """Folder for what can be made again: `$PW_HOME`, else under `$XDG_CACHE_HOME`."""
    if own := os.environ.get("PW_HOME"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedweight"


def default_output(model: str) -> Path:
    """Where `pw quantize MODEL` writes when not told: `<name>.pw` in the current folder."""
    return Path(Path(model).resolve().name.partition("@")[0].removesuffix(".pw") + ".pw")


def artifact_path(model: str, *, quiet: bool = False) -> Path:
    """The artifact that MODEL names; `tiny` is calibrated into the cache on first use.

    Raises:
        StoreError: MODEL is missing, unfinished, or a checkpoint; the hint is the line to run.
    """
    if model == TINY:
        return _tiny_artifact(quiet)
    path = Path(model)
    if (path / "manifest.json").is_file():
        return path
    output = default_output(model)
    if path.with_name(path.name + ".partial").is_dir():
        raise StoreError(
            f"artifact is not finished: `{model}`",
            f"resume it: `pw calibrate MODEL -o {model}`, with the MODEL and flags of before",
        )
    if (path / "config.json").is_file() or _names_a_hub_model(model):
        raise StoreError(
            f"not an artifact but an unquantized checkpoint: `{model}`",
            f"quantize it first: `pw calibrate {model} -o {output}`, then use `{output}`",
        )
    if path.exists():
        raise StoreError(
            f"not an artifact, it has no manifest.json: `{model}`",
            f"make one: `pw calibrate MODEL -o {output}`",
        )
    wanted = model if path.suffix == ".pw" else output
    raise StoreError(
        f"no such artifact: `{model}`",
        f"make it: `pw calibrate MODEL -o {wanted}`, or try `{TINY}`",
    )


def _names_a_hub_model(model: str) -> bool:
    """Whether MODEL looks like `organization/name` of a model hub and is no path."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~")) and ".pw" not in model


def _tiny_artifact(quiet: bool) -> Path:
    """The finished artifact of the bundled model: what `make demo` left here, else the cache's."""
    made_here = Path("artifacts") / f"{TINY}.pw"
    path = cache_home() / __version__ / f"{TINY}.pw"
    for place in (made_here, path):
        if (place / "residuals.zarr").is_dir():  # what its last stage writes
            return place
    if not quiet:
        print(
            f"calibrating the bundled model once, half a minute on two idle cores, into {path}",
            file=sys.stderr,
        )
    from pw.cli.offline import build, fit  # offline commands locate artifacts too

    path.parent.mkdir(parents=True, exist_ok=True)
    common = Common(quiet=quiet)
    build(TINY, path, Widths(), Calibration(), common)
    fit(path, common)
    return path
