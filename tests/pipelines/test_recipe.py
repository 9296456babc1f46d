from dataclasses import replace
from pathlib import Path

import pytest

from pw.config import PrecisionPolicy
from pw.errors import ConfigError
from pw.store.artifact import Artifact
from pw.store.verify import verify
from pw_pipelines import distill, recipe
from pw_pipelines.recipe import load_recipe
from support.offline import QUIET, random_checkpoint, tree_digests, write_text

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_all_recipes_of_the_repository_are_valid() -> None:
    paths = sorted((ROOT / "pipelines" / "recipes").glob("*.toml"))
    names = {path.stem for path in paths}
    assert {"tiny", "moe-small", "qwen1.5-moe-a2.7b", "mixtral-8x7b"} <= names
    assert {"gemma-4-26b-a4b", "qwen3-30b-a3b"} <= names
    for path in paths:
        loaded = load_recipe(path)
        assert loaded.output == Path("artifacts") / f"{path.stem}.pw"
        assert [PrecisionPolicy.parse(policy) for policy in loaded.evaluation.policies]


def test_a_recipe_runs_all_stages_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_checkpoint(tmp_path / "model", "mixtral")
    write_text(tmp_path / "text.txt")
    made = load_recipe(
        write(
            tmp_path,
            f'model = "{tmp_path / "model"}"\noutput = "{tmp_path / "out.pw"}"\n'
            "[quantize]\nmax_bits = 3\n[residuals]\nseed = 2\n"
            f'[calibration]\ndataset = "{tmp_path / "text.txt"}"\nnsamples = 40\nseqlen = 32\n',
        )
    )
    recipe.run(made, QUIET)
    assert not (tmp_path / "out.untuned.pw").exists()
    stages = Artifact.open(made.output).manifest.stages
    assert set(stages) == {"quantize", "moments", "sensitivity", "routing", "residuals"}
    assert stages["residuals"].settings["seed"] == 2
    before = (made.output / "manifest.json").read_bytes()
    for stage in (recipe.quantize, recipe.sensitivity, recipe.trace):
        monkeypatch.setattr(stage, "ObservedModel", None)
    recipe.run(made, QUIET)
    assert (made.output / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = ", "not TOML"),
        ('model = "tiny"', "must name `model` and `output`"),
        ('model = "tiny"\noutput = "a.pw"\nbits = 3', "what no stage knows: `bits`"),
        ('model = "tiny"\noutput = "a.pw"\nquantize = 3', "`quantize` must be a table: `3`"),
        (
            'model = "tiny"\noutput = "a.pw"\n[quantize]\nbits = 3',
            "`quantize` has no setting `bits`",
        ),
        (
            'model = "tiny"\noutput = "a.pw"\n[evaluation]\ntask = 1',
            "`evaluation` has no setting `task`",
        ),
        ('model = "tiny"\noutput = "a.pw"\n[tune]\nwidth = 3', "`tune` has no setting `width`"),
        ('model = "tiny"\noutput = "a.pw"\n[quantize]\nmin_bits = 4', "min_bits must be 2 or 3"),
        *(
            (f'model = "tiny"\noutput = "a.pw"\n[{table}]\n{setting}', message)
            for table, setting, message in (
                ("calibration", 'nsamples = "many"', "nsamples` must be a whole number: `many`"),
                ("calibration", "seed = 1.5", "calibration.seed` must be a whole number: `1.5`"),
                ("calibration", "seed = -1", "seed must be between 0 and"),
                ("calibration", "dataset = 5", "calibration.dataset` must be a text: `5`"),
                ("quantize", 'strict_coverage = "no"', "must be true or false: `no`"),
                ("quantize", "max_bits = true", "max_bits` must be a whole number: `True`"),
                ("tune", 'bits = "a"', "tune.bits` must be a number: `a`"),
                ("residuals", 'validation = "x"', "validation` must be a number: `x`"),
                ("evaluation", 'policies = "dense"', "policies` must be a list of texts: `dense`"),
                ("evaluation", "policies = [3]", "policies` must be a list of texts"),
                ("evaluation", 'max_chunks = "few"', "max_chunks` must be a whole number: `few`"),
            )
        ),
    ],
)
def test_a_bad_recipe_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(tmp_path, text))


def test_the_kept_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "model", "mixtral")
    write_text(tmp_path / "text.txt")
    path = write(
        tmp_path,
        f'model = "{tmp_path / "model"}"\noutput = "{tmp_path / "out.pw"}"\n'
        "[quantize]\nmax_bits = 3\n[tune]\nbits = 2.5\n"
        f'[calibration]\ndataset = "{tmp_path / "text.txt"}"\nnsamples = 40\nseqlen = 32\n',
    )
    recipe.run(load_recipe(path), QUIET)
    assert (tmp_path / "out.untuned.pw").exists()
    kept = tmp_path / "out.pw" / "recipe.toml"
    assert kept.read_bytes() == path.read_bytes()
    assert verify(Artifact.open(tmp_path / "out.pw")) == []
    recipe.run(replace(load_recipe(kept), output=tmp_path / "again.pw"), QUIET)
    assert tree_digests(tmp_path / "again.pw") == tree_digests(tmp_path / "out.pw")


def test_a_training_that_has_no_room_is_refused_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint(tmp_path / "model", "mixtral")
    write_text(tmp_path / "text.txt")
    head = f'model = "{tmp_path / "model"}"\noutput = "{tmp_path / "out.pw"}"\n'
    made = load_recipe(write(tmp_path, f"{head}[tune]\ndistill = 6\n"))
    stages = ("quantize", "sensitivity", "tune", "distillation", "sensitivity", "trace")
    assert recipe.stages_that_read(made) == stages
    assert recipe.artifacts_at_once(made) == 4
    plain = load_recipe(write(tmp_path, f"{head}[tune]\nbits = 2.5\n"))
    assert recipe.stages_that_read(plain) == (*stages[:3], *stages[4:])
    assert recipe.artifacts_at_once(plain) == 2
    monkeypatch.setattr(distill, "host_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match="for all routed experts at once"):
        recipe.run(made, QUIET, device="cpu")
    assert not list(tmp_path.glob("out*"))
