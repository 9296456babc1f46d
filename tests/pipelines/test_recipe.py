from pathlib import Path

import pytest

from pw.errors import ConfigError
from pw.store.artifact import Artifact
from pw_pipelines import recipe
from pw_pipelines.recipe import load_recipe
from support.offline import QUIET, random_checkpoint, write_text

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_all_recipes_of_the_repository_are_valid() -> None:
    paths = sorted((ROOT / "pipelines" / "recipes").glob("*.toml"))
    assert paths
    for path in paths:
        loaded = load_recipe(path)
        assert loaded.output.parent == Path("artifacts")


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
        ('model = "tiny"\noutput = "a.pw"\nbits = 3', "may have the tables"),
        ('model = "tiny"\noutput = "a.pw"\n[quantize]\nbits = 3', "`quantize` is not valid"),
        ('model = "tiny"\noutput = "a.pw"\n[quantize]\nmin_bits = 4', "min_bits must be 2 or 3"),
    ],
)
def test_a_bad_recipe_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(tmp_path, text))


def test_the_command_line_reports_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recipe.main([]) == 2
    assert recipe.main([str(tmp_path / "none.toml")]) == 2
    assert "error: cannot read recipe" in capsys.readouterr().err
