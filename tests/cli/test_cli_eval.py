"""`pw eval` through the real runner, on a random model."""

import json
import re
from pathlib import Path

import pytest

from support.cli import SMALL, Made, Outcome, run


def text_flags(made: Made, chunks: int = 6) -> tuple[str, ...]:
    return ("--text", str(made.text), "--seqlen", "48", "--max-chunks", str(chunks))


def evaluate(made: Made, *flags: str, chunks: int = 6) -> Outcome:
    batch = ("--max-num-batched-tokens", "32")
    return run("eval", str(made.artifact), *batch, *text_flags(made, chunks), *flags)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    items = [
        {"prompt": f"page {n}:", "choices": ["bit", "plane"], "answer": n % 2} for n in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, items)))
    return path


def test_one_policy_reports_perplexity_bytes_and_a_paired_difference(
    made: Made, tmp_path: Path
) -> None:
    flags = (str(made.artifact), *SMALL, *text_flags(made))
    wide = run("eval", *flags, "--precision-policy", "static:4", "--json")
    assert wide.code == 0, wide.err
    (tmp_path / "wide.json").write_text(wide.out)
    [row] = json.loads(wide.out)["rows"]
    assert len(row["chunk_nll"]) == 6
    assert row["tokens"] == 6 * 47
    assert row["policy"] == "static:4"
    assert row["bytes_over_budget"] == 0
    parts = ("planes", "luts", "experts_dense", "dense", "kv", "free", "tables", "workspace")
    assert row["bytes"]["total"] == sum(row["bytes"][name] for name in parts)
    assert row["bytes"]["kv"] > 0
    assert row["bytes"]["total"] <= row["bytes"]["budget"] == 64 << 20

    baseline = ("--baseline", str(tmp_path / "wide.json"))
    narrow = run("eval", *flags, "--precision-policy", "static:2", *baseline)
    assert narrow.code == 0, narrow.err
    assert "mean 2.00 bits (all 2)" in narrow.out
    assert "against the baseline (static:4)" in narrow.out
    for words in ("padding", "already counted", "budget 64.00 MiB", "over budget 0 B"):
        assert words in narrow.out
    assert not re.search(r"\d,?\d{3},?\d{3}", narrow.out)  # a figure that nobody reads
    assert "outside the budget" not in narrow.out  # nothing can come back: the host keeps nothing
    same = run("eval", *flags, "--precision-policy", "static:4", *baseline, "--json")
    [row] = json.loads(same.out)["rows"]
    assert row["against_baseline"]["nll"]["mean"] == 0

    fewer = run("eval", *flags[:-1], "5", "--precision-policy", "static:2", *baseline)
    assert fewer.code == 2
    assert "needs the same chunks: 5 against 6" in fewer.err


def test_policies_beside_each_other_leave_a_report(made: Made, task: Path, tmp_path: Path) -> None:
    done = evaluate(
        made,
        *("--policies", "dense,static:2..4,adaptive", "--memory-budgets", "static:3"),
        *("--tasks", str(task), "--generate", "--log-samples", "-o", str(tmp_path / "report")),
    )
    assert done.code == 0, done.err
    described = json.loads((tmp_path / "report" / "report.json").read_text())
    rows = {row["policy"]: row for row in described["rows"]}
    assert list(rows) == ["dense", "static:2", "static:3", "static:4", "adaptive"]
    assert rows["adaptive"]["budget"] == "static:3"
    assert rows["adaptive"]["budget_bytes"] == rows["static:3"]["used_peak_bytes"]
    assert rows["adaptive"]["used_peak_bytes"] <= rows["static:3"]["used_peak_bytes"]
    kls = [rows[f"static:{bits}"]["kl"]["mean"] for bits in (2, 3, 4)]
    assert kls == sorted(kls, reverse=True)
    assert kls[-1] > 0
    assert rows["static:2"]["fits"] == ["static:3"]
    assert rows["static:4"]["fits"] == []
    assert set(rows["dense"]["tasks"][0]["metrics"]) == {
        *("acc", "acc_norm", "choice_nll", "exact_match"),
    }
    assert described["provenance"]["artifact"]["hash"]
    assert "adaptive in static:3 " in done.out
    assert done.out.rstrip().endswith(f"report: `{tmp_path / 'report' / 'report.html'}`")
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    samples = (tmp_path / "report" / "samples-own.jsonl").read_text().splitlines()
    assert len(samples) == 5 * 4
    assert {"policy", "prompt", "logprobs", "written"} <= set(json.loads(samples[0]))


def test_a_budget_without_policies_holds_and_with_policies_is_for_those_that_adapt(
    made: Made,
) -> None:
    done = evaluate(made, "--precision-policy", "static:2", "--memory-budget", "100kB")
    assert done.code == 4
    assert "(100,000 bytes) is too small" in done.err
    done = evaluate(
        made,
        "--policies",
        "static:2,adaptive",
        "--memory-budget",
        "100kB",
        "--json",
        "-q",
        chunks=2,
    )
    assert done.code == 0, done.err
    fixed, adaptive = json.loads(done.out)["rows"]
    assert fixed["error"] is None
    assert fixed["fits"] == []
    assert "(100,000 bytes) is too small" in adaptive["error"]
    assert adaptive["budget"] == "97.66 KiB"


def test_a_comparison_of_which_nothing_could_run_is_a_failure(made: Made) -> None:
    flags = ("--policies", "adaptive", "--memory-budget", "100kB", "--json", "-q")
    done = evaluate(made, *flags, chunks=2)
    assert (done.code, done.err.splitlines()[0]) == (4, "error: no policy could run")
    [row] = json.loads(done.out)["rows"]
    assert "(100,000 bytes) is too small" in row["error"]


def test_a_report_that_cannot_be_written_is_refused_before_the_work(made: Made) -> None:
    done = evaluate(made, "--output", "/proc/report")
    assert (done.code, done.out) == (2, "")
    assert "error: cannot write --output `/proc/report`: " in done.err


@pytest.mark.parametrize(
    ("flags", "error", "hint"),
    [
        ("--policies static:4..2", "a range of widths goes upward", "static:2..4"),
        ("--policies dense --memory-budgets 3x", "not a memory budget: `3x`", "`24MiB`"),
        ("--policies static:2 --reference dense", "--reference is not among", "static:2"),
        ("--max-chunks 0", "--max-chunks must be at least 1: 0", ""),
        ("--log-samples", "--log-samples has nowhere to go", "--output"),
        ("--tasks nowhere.jsonl", "cannot read the task `nowhere.jsonl`", "tracking"),
        ("--tasks tracking --num-fewshot 100", "--num-fewshot must be below the 100 items", ""),
        ("--tasks tracking --num-fewshot -1", "--num-fewshot must not be negative: -1", ""),
        ("--tasks tracking --max-gen-tokens 0", "--max-gen-tokens must be at least 1: 0", ""),
        ("--tasks tracking, --limit 0", "--limit must be a positive count or share: 0", ""),
        ("--tasks tracking --limit 0", "--limit must be a positive count or share: 0", ""),
        (
            "--policies adaptive --memory-budgets 1GB,2GB --precision-trace t.jsonl",
            "--precision-trace is for one run that adapts: there are 2",
            "one adaptive policy",
        ),
        ("--baseline pyproject.toml", "not a report of `pw eval`: `pyproject.toml`", "--json"),
    ],
)
def test_what_cannot_be_done_is_one_line(made: Made, flags: str, error: str, hint: str) -> None:
    done = evaluate(made, *flags.split())
    assert (done.code, done.out) == (2, ""), done.err
    lines = done.err.splitlines()
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    assert hint in "".join(lines[1:])
    assert len(lines) <= 2


def test_a_missing_extra_is_told_before_the_work(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    done = evaluate(made, "-o", str(tmp_path / "report"))
    assert (done.code, done.out) == (2, "")
    assert "--output needs matplotlib, which is not installed" in done.err
    assert "pip install 'pagedweight[plot]'" in done.err
    done = evaluate(made, "--lm-eval-tasks", "x.yaml")
    assert "pip install 'pagedweight[eval]'" in done.err


@pytest.mark.filterwarnings("default")  # of the harness and of what it imports
def test_a_task_of_the_harness_runs_on_every_policy(
    made: Made, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    file = tmp_path / "own.yaml"
    file.write_text(
        f"task: theirs\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{task}'}}}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{prompt}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
        "metric_list: [{metric: acc}]\n"
    )
    both = ("--policies", "static:2,static:4", "--tasks", str(task))
    done = evaluate(made, *both, "--lm-eval-tasks", str(file), "--json", "-q", chunks=2)
    assert done.code == 0, done.err
    assert done.err == ""
    for row in json.loads(done.out)["rows"]:
        [ours], [theirs] = row["tasks"], row["harness"]
        assert (theirs["task"], theirs["items"]) == ("theirs", 4)
        assert theirs["metrics"]["acc,none"] == ours["metrics"]["acc"]["mean"]
    refused = evaluate(made, "--lm-eval-tasks", str(tmp_path / "none.yaml"))
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("error: cannot read the task ")
