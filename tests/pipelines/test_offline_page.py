"""The tables of docs/offline.md are those of the code."""

import re
from pathlib import Path

from pw.models.testing import CONFIGS, KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "offline.md").read_text("utf-8")


def column(title: str) -> list[str]:
    """First column of the table with this title in it."""
    rows = PAGE[PAGE.index(f"| {title} |") :].split("\n\n")[0].splitlines()[2:]
    return [row.split("|")[1] for row in rows]


def test_all_tried_kinds_of_models_are_listed_and_no_others() -> None:
    listed = set(re.findall(r"`(\w+)`", " ".join(column("`model_type`"))))
    assert listed == {config["model_type"] for config in CONFIGS.values()} | {"gemma4"}
    assert f"{len(KINDS)} checkpoints are tried" in PAGE


def test_refusals_are_those_that_the_code_gives() -> None:
    source = "".join(file.read_text("utf-8") for file in (ROOT / "pw" / "models").glob("*.py"))
    reasons = re.findall(r"`([^`]+)`", " ".join(column("reason")))
    assert len(reasons) >= 10
    for reason in reasons:
        assert reason in source, reason
