"""The bundled model's recipe, followed twice: the same bytes. Minutes: `make reliability`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.offline import tree_digests

ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "pipelines" / "recipes" / "tiny.toml").read_text("utf-8")


def follow(recipe: Path, out: Path) -> dict[str, str]:
    """Digests of all files that a run in a process of its own makes."""
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "pipelines"))
    subprocess.run(
        [sys.executable, "-m", "pw", "run", str(recipe), "-o", str(out), "--device", "cpu", "-q"],
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
    )
    return tree_digests(out)


@pytest.mark.figures
def test_the_bundled_models_recipe_repeats_byte_for_byte(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    assert "nsamples = 128" in RECIPE
    stages = RECIPE.split("[evaluation]")[0]
    recipe.write_text(stages.replace("nsamples = 128", "nsamples = 40"), "utf-8")
    first = follow(recipe, tmp_path / "first.pw")
    again = follow(tmp_path / "first.pw" / "recipe.toml", tmp_path / "again.pw")
    assert len(first) > 30
    assert again == first
