"""`pw tune`, and what `pw inspect` says of its artifact."""

import json
from pathlib import Path

from support.cli import Made, run


def test_tune_says_what_it_made_and_inspect_for_which_widths(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "made.tuned.pw"
    done = run("tune", str(made.artifact), "-o", str(out), "--bits", "2.5")
    assert done.code == 0, done.err
    assert f"{out}: tuned for the bytes of 2.5 bits: " in done.out
    assert f"pw serve {out}" in done.out
    assert "quantize: 12 blocks" in done.err
    again = run("tune", str(made.artifact), "-o", str(out), "--bits", "2.5", "--json", "-q")
    report = json.loads(again.out)
    assert report["damage_after"] < report["damage_before"]
    blocks = ", ".join(f"{count} at {width}" for width, count in report["blocks"].items())
    shown = run("inspect", str(out))
    assert f"tuned     for the bytes of 2.5 bits; blocks: {blocks} bits" in shown.out
    assert "tuned" not in run("inspect", str(made.artifact)).out


def test_an_artifact_is_not_tuned_in_its_own_place(made: Made) -> None:
    refused = run("tune", str(made.artifact), "-o", str(made.artifact))
    assert refused.code == 2
    assert "in its own place" in refused.err


def test_text_without_training_is_refused_in_one_line(made: Made, tmp_path: Path) -> None:
    refused = run(
        "tune", str(made.artifact), "-o", str(tmp_path / "a.pw"), "--distill-text", "more.txt"
    )
    assert refused.code == 2
    error, hint = refused.err.strip().splitlines()
    assert "trained on by distillation alone: `more.txt`" in error
    assert "--distill 240" in hint
    assert not list(tmp_path.iterdir())
