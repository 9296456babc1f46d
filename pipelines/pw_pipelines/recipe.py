"""A recipe: one TOML file that says how an artifact is made, and the run that follows it.

Every stage recognizes by its inputs what is done already, so a recipe that was stopped goes on when
run again. The artifact keeps its recipe, as `recipe.toml`; running that gives the same bytes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch

from pw.config import CalibrationConfig, QuantizeConfig, TuneConfig
from pw.errors import ConfigError, ModelError
from pw.models.checkpoint import Checkpoint
from pw.models.resolve import resolve_model
from pw.store.artifact import QUANTIZE, Artifact
from pw.store.manifest import MANIFEST
from pw_pipelines import quantize, residuals, sensitivity, trace, tune
from pw_pipelines.distill import check_room
from pw_pipelines.progress import Progress
from pw_pipelines.ranks import usable_device
from pw_pipelines.residuals import ResidualConfig

_TABLES = ("quantize", "calibration", "tune", "residuals", "evaluation")
_FORMS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: type(value) is int, "a whole number"),
    float: (lambda value: type(value) in (int, float), "a number"),
    str: (lambda value: isinstance(value, str), "a text"),
    list: (
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
        "a list of texts",
    ),
}


@dataclass(frozen=True)
class EvaluationSettings:
    """Perplexity runs after the stages; the command line carries them out."""

    policies: tuple[str, ...] = ()  # precision policies, one run each
    text: str = "bundled"  # held-out text: "bundled" or a .txt or .jsonl
    seqlen: int = 2048  # tokens of a chunk
    max_chunks: int | None = None
    memory_budget: str | None = None  # like `24GiB`; None = most of the device


@dataclass(frozen=True)
class Recipe:
    """What to make, from what, and how."""

    path: Path  # the file
    model: str
    output: Path
    quantize: QuantizeConfig
    residuals: ResidualConfig
    tune: TuneConfig | None = None  # None: not tuned
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)


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
    tuned = "tune" in data
    tables = {name: data.pop(name, {}) for name in _TABLES}
    model, output = data.pop("model", None), data.pop("output", None)
    if data:
        raise ConfigError(
            f"recipe has what no stage knows: `{next(iter(data))}`: `{path}`",
            f"it may have `model`, `output` and the tables {', '.join(_TABLES)}",
        )
    if not isinstance(model, str) or not isinstance(output, str):
        raise ConfigError(
            f"recipe must name `model` and `output`, both strings: `{path}`",
            'for example: model = "tiny" and output = "tiny.pw", above all tables',
        )
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"recipe's `{name}` must be a table: `{table}`", f"write `[{name}]`")
    if tables["quantize"].get("max_bits") == "auto":
        del tables["quantize"]["max_bits"]
    calibration = _settings(CalibrationConfig, tables["calibration"], "calibration")
    return Recipe(
        Path(path),
        model,
        Path(output),
        _settings(QuantizeConfig, tables["quantize"], "quantize", calibration=calibration),
        _settings(ResidualConfig, tables["residuals"], "residuals"),
        _settings(TuneConfig, tables["tune"], "tune") if tuned else None,
        _settings(EvaluationSettings, tables["evaluation"], "evaluation"),
    )


def run(
    recipe: Recipe, progress: Progress, *, overwrite: bool = False, device: str = "auto"
) -> None:
    """Run all stages of a recipe; what is done already is not done again.

    A recipe with `[tune]` leaves the artifact that it tunes beside the output, `<name>.untuned.pw`.

    Raises:
        PwError: See its subclasses; run again to go on.
    """
    common: dict[str, Any] = {"overwrite": overwrite, "device": device}
    text, out, model = recipe.quantize.calibration, recipe.output, recipe.model
    first = first_output(recipe)
    if recipe.tune is not None and recipe.tune.distill and not (out / MANIFEST).exists():
        weights = Checkpoint.open(resolve_model(model)).geometry.weights
        check_room(weights, torch.device(usable_device(device)))  # not after hours of other stages
    quantize.run(model, first, recipe.quantize, progress, recipe=recipe.path, **common)
    sensitivity.run(first, text, progress, model=model, **common)
    if recipe.tune is None:
        trace.run(out, text, progress, model=model, **common)
    else:
        how = {"model": model, "recipe": recipe.path, **common}
        tune.run(first, out, recipe.tune, progress, **how)
    residuals.run(out, progress, recipe.residuals, overwrite=overwrite)


def stages_that_read(recipe: Recipe) -> tuple[str, ...]:
    """Names of the stages of `run` that read the model, in order."""
    if recipe.tune is None:
        return (QUANTIZE, sensitivity.STAGE, "trace")
    trained = ("distillation",) if recipe.tune.distill else ()
    return (QUANTIZE, sensitivity.STAGE, "tune", *trained, sensitivity.STAGE, "trace")


def artifacts_at_once(recipe: Recipe) -> int:
    """How many folders of an artifact's size `run` has on the disk at a time.

    Beside the output what it tunes; before a training the fit, too, and what was trained.
    """
    if recipe.tune is None:
        return 1
    return 4 if recipe.tune.distill else 2


def find_model(recipe: Recipe) -> str:
    """Name or folder of the recipe's model, where it is now.

    A relative path counts from the folder that this process runs in; the recipe that an artifact
    keeps finds the model where the artifact was made from, too.

    Raises:
        ModelError: It is not here.
    """
    names, beside = [recipe.model], recipe.path.parent
    if recipe.path.name == quantize.RECIPE and (beside / MANIFEST).is_file():
        names.append(Artifact.open(beside).manifest.model.source)
    refusals = []
    for name in names:
        try:
            resolve_model(name)
        except ModelError as error:
            refusals.append(error)
        else:
            return name
    raise ModelError(
        refusals[0].message,
        "say where it is with --model, or fetch a hub id with --download (make run: MODEL=folder, "
        f"DOWNLOAD=1); a path counts from `{Path.cwd()}`",
    ) from refusals[0]


def first_output(recipe: Recipe) -> Path:
    """The artifact that a recipe makes first: what it tunes, if it does."""
    out = recipe.output
    return out if recipe.tune is None else out.with_name(f"{out.stem}.untuned.pw")


def _settings(kind: Any, values: Any, table: str, **others: Any) -> Any:
    kinds = {f.name: get_type_hints(kind)[f.name] for f in fields(kind) if f.name not in others}
    if unknown := [name for name in values if name not in kinds]:
        raise ConfigError(
            f"recipe table `{table}` has no setting `{unknown[0]}`", f"it has {', '.join(kinds)}"
        )
    for name, value in values.items():
        hint = kinds[name]  # `int`, `int | None` (absent in TOML) or `tuple[str, ...]`
        asked = list if get_origin(hint) is tuple else (get_args(hint) or (hint,))[0]
        fits, form = _FORMS[asked]
        if not fits(value):
            raise ConfigError(f"recipe's `{table}.{name}` must be {form}: `{value}`")
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return kind(**given, **others)
