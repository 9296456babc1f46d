"""The command that carries out a recipe: all offline stages, then its evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pw.cli.command import print_json
from pw.cli.eval_options import ComparisonOptions, TextOptions
from pw.cli.evaluation import Compared, compare, print_report, read_text, run_evaluation
from pw.cli.offline import Download, DryRun, Overwrite
from pw.cli.options import Common
from pw.cli.plans import print_plan
from pw.cli.stages import fetch, progress_of
from pw.config import EngineConfig, parse_bytes
from pw.errors import ModelError

if TYPE_CHECKING:
    from pw_pipelines.recipe import Recipe


def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A .toml file.")],
    common: Common,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Another place of the recipe's model."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Another folder than the recipe's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    download: Download = False,
) -> None:
    """Carry out a recipe: quantize, sensitivity, trace, residual heads, evaluation.

    What is done already, by its inputs, is not done again. Results of the evaluation are kept
    beside the artifact, as `<name>.eval.json`.
    """
    from pw_pipelines import recipe as stage

    loaded = stage.load_recipe(recipe)
    loaded = replace(loaded, model=model or loaded.model, output=output or loaded.output)
    evaluation = _evaluation(loaded, device)
    fetch(loaded.model, download)
    if dry_run:
        _plan(loaded, device, common, overwrite=overwrite, elsewhere=model is not None)
        return
    loaded = replace(loaded, model=stage.find_model(loaded))
    stage.run(loaded, progress_of(common), overwrite=overwrite, device=device)
    described = None if evaluation is None else _evaluate(loaded, *evaluation, common)
    if common.json:
        print_json({"artifact": loaded.output, "evaluation": described})
        return
    if described is not None:
        print_report(described)
    print(f"artifact: `{loaded.output}`")


def _plan(recipe: Recipe, device: str, common: Common, *, overwrite: bool, elsewhere: bool) -> None:
    """Say what all stages would do; from the config beside the recipe where no model is."""
    from pw_pipelines import dry_run
    from pw_pipelines import recipe as stage

    first, settings = stage.first_output(recipe), recipe.quantize
    how: dict[str, Any] = {
        "device": device,
        "stages": stage.stages_that_read(recipe),
        "artifacts": stage.artifacts_at_once(recipe),
        "steps": 0 if recipe.tune is None else recipe.tune.distill,
    }
    file = recipe.path.parent / "configs" / f"{recipe.path.stem}.json"
    try:
        model = stage.find_model(recipe)
    except ModelError:
        if elsewhere or not file.is_file():
            raise
        report = dry_run.run_config(recipe.model, file, first, settings, **how)
    else:
        report = dry_run.run(model, first, settings, overwrite=overwrite, **how)
    more = {"fit-residuals": f"{report.blocks} heads, a linear fit each"}
    if asked := recipe.evaluation.policies:
        text = recipe.evaluation
        most = "" if text.max_chunks is None else f"{text.max_chunks} "
        more["evaluation"] = (
            f"{', '.join(asked)} on {most}chunks of {text.seqlen:,} tokens of `{text.text}`"
        )
    print_plan(report, common, more)


def _evaluation(recipe: Recipe, device: str) -> tuple[Compared, TextOptions] | None:
    """What the recipe's evaluation compares on which text; None if it has none.

    Raises:
        ConfigError: It would fail after the stages.
    """
    settings = recipe.evaluation
    if not settings.policies:
        return None
    budget = None if settings.memory_budget is None else parse_bytes(settings.memory_budget)
    config = EngineConfig(memory_budget=budget, device=device)
    compared = compare(config, ComparisonOptions(",".join(settings.policies)))
    text = TextOptions(settings.text, settings.seqlen, settings.max_chunks)
    text.check()
    read_text(text.text)
    return compared, text


def _evaluate(
    recipe: Recipe, compared: Compared, text: TextOptions, common: Common
) -> dict[str, Any]:
    """Score the recipe's artifact; what has the same inputs is read from the file of results."""
    from pw.store import Artifact
    from pw.store.files import replace_file
    from pw.store.manifest import canonical_json, plain

    settings = recipe.evaluation
    inputs = plain({"artifact": Artifact.open(recipe.output).artifact_hash, "settings": settings})
    file = recipe.output.with_name(f"{recipe.output.stem}.eval.json")
    if (earlier := _earlier(file, inputs)) is not None:
        progress_of(common).note(f"evaluation: done already, in `{file}`")
        return earlier
    _, described = run_evaluation(recipe.output, compared, text, common)
    replace_file(file, canonical_json(plain({"inputs": inputs, "report": described})))
    return described


def _earlier(file: Path, inputs: Any) -> dict[str, Any] | None:
    """The report of an earlier run with these inputs; None where the file holds none."""
    try:
        found = json.loads(file.read_bytes())
        return dict(found["report"]) if found["inputs"] == inputs else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
