"""A recipe: one TOML file that says how an artifact is made, and the run that follows it.

Every stage skips what is done already, so a recipe that was stopped goes on when run again.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pw.config import CalibrationConfig, QuantizeConfig
from pw.errors import ConfigError, PwError
from pw_pipelines import quantize, residuals, sensitivity, trace
from pw_pipelines.progress import Progress
from pw_pipelines.residuals import ResidualConfig

_TABLES = ("quantize", "calibration", "residuals")


@dataclass(frozen=True)
class Recipe:
    """What to make, from what, and how."""

    model: str
    output: Path
    quantize: QuantizeConfig
    residuals: ResidualConfig


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe.

    Raises:
        ConfigError: The file is missing or malformed, lacks `model` or `output`, or has a setting
            that no stage knows.
    """
    try:
        data = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read recipe: `{path}`: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"recipe is not TOML: `{path}`: {error}") from error
    tables = {name: data.pop(name, {}) for name in _TABLES}
    model, output = data.pop("model", None), data.pop("output", None)
    if data or not isinstance(model, str) or not isinstance(output, str):
        raise ConfigError(
            f"recipe must name `model` and `output`, both strings, and may have the tables "
            f"{', '.join(_TABLES)}: `{path}`",
            f"unknown: {', '.join(data)}" if data else "",
        )
    if tables["quantize"].get("max_bits") == "auto":
        del tables["quantize"]["max_bits"]
    calibration = _settings(CalibrationConfig, tables["calibration"], "calibration")
    return Recipe(
        model,
        Path(output),
        _settings(QuantizeConfig, tables["quantize"], "quantize", calibration=calibration),
        _settings(ResidualConfig, tables["residuals"], "residuals"),
    )


def run(recipe: Recipe, progress: Progress, *, overwrite: bool = False) -> None:
    """Run all stages of a recipe.

    Raises:
        PwError: See its subclasses; run again to go on.
    """
    text = recipe.quantize.calibration
    quantize.run(recipe.model, recipe.output, recipe.quantize, progress, overwrite=overwrite)
    sensitivity.run(recipe.output, text, progress, model=recipe.model, overwrite=overwrite)
    trace.run(recipe.output, text, progress, model=recipe.model, overwrite=overwrite)
    residuals.run(recipe.output, progress, recipe.residuals, overwrite=overwrite)


def _settings(kind: Any, values: Any, table: str, **others: Any) -> Any:
    try:
        return kind(**values, **others)
    except TypeError as error:
        raise ConfigError(f"recipe table `{table}` is not valid: {error}") from error


def main(arguments: list[str]) -> int:
    """Run the recipe named on the command line; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m pw_pipelines.recipe RECIPE.toml", file=sys.stderr)
        return 2
    try:
        run(load_recipe(arguments[0]), Progress())
    except PwError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
