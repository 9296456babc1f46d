"""The command that carries out a recipe: all offline stages, then its evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pw.cli.command import print_json
from pw.cli.eval_options import ComparisonOptions, TextOptions
from pw.cli.evaluation import compare, print_report, run_evaluation
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
    fetch(loaded.model, download)
    if dry_run:
        _plan(loaded, device, common, overwrite=overwrite, elsewhere=model is not None)
        return
    loaded = replace(loaded, model=stage.find_model(loaded))
    stage.run(loaded, progress_of(common), overwrite=overwrite, device=device)
    described = _evaluate(loaded, device, common)
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
        "artifacts": 1 if recipe.tune is None else 2,
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


def _evaluate(recipe: Recipe, device: str, common: Common) -> dict[str, Any] | None:
    """The recipe's evaluation; those with the same inputs are read from the file of results."""
    from pw.store import Artifact
    from pw.store.files import replace_file
    from pw.store.manifest import canonical_json, plain

    settings = recipe.evaluation
    if not settings.policies:
        return None
    inputs = plain({"artifact": Artifact.open(recipe.output).artifact_hash, "settings": settings})
    file = recipe.output.with_name(f"{recipe.output.stem}.eval.json")
    if file.is_file():
        earlier: dict[str, Any] = json.loads(file.read_bytes())
        if earlier["inputs"] == inputs and "report" in earlier:
            progress_of(common).note(f"evaluation: done already, in `{file}`")
            return dict(earlier["report"])
    budget = None if settings.memory_budget is None else parse_bytes(settings.memory_budget)
    policies = ",".join(settings.policies)
    config = EngineConfig(memory_budget=budget, device=device)
    text = TextOptions(settings.text, settings.seqlen, settings.max_chunks)
    compared = compare(config, ComparisonOptions(policies))
    _, described = run_evaluation(recipe.output, compared, text, common)
    replace_file(file, canonical_json(plain({"inputs": inputs, "report": described})))
    return described
