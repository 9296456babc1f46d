import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.config import PrecisionPolicy
from pw.errors import BudgetError
from pw.evaluation.perplexity import cut_chunks
from pw.evaluation.policies import parse_budgets, parse_policies
from pw.evaluation.report.document import BYTE_CLASSES, INSIDE, document
from pw.evaluation.report.markdown import markdown
from pw.evaluation.report.tables import findings, tables, widths
from pw.evaluation.report.write import write_report, write_samples
from pw.evaluation.sweep import Job, Sweep, Sweeper
from pw.evaluation.task_runs import HarnessResult, TaskSettings, prepare
from pw.evaluation.tasks import load_task
from pw.store.manifest import plain
from support.scoring import CharTokenizer, UnigramEngine

STATIC = ("static:3", "static:4", "static:5")
ORIGIN = {
    "command": "pw eval own.pw --policies 'a|b' <x>",
    "date": "2026-11-29T20:00:00+00:00",
    "hardware": {
        "processor": "a processor",
        "cores": 2,
        "threads": 2,
        "memory_bytes": 2**34,
        "platform": "Linux",
        "gpus": [],
    },
    "versions": {"pagedweight": "0.1.0"},
    "seeds": {"bootstrap": 0},
    "artifact": {
        "name": "own.pw",
        "hash": "ab" * 32,
        "model": "own",
        "architecture": "Own",
        "bits": [2, 6],
    },
}


@contextmanager
def silent(name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    yield lambda _: None


def make_engine(policy: PrecisionPolicy, budget: int | None) -> UnigramEngine:
    """Quality rises with the bits; the adaptive one moves through its widths."""
    if policy.kind == "adaptive" and budget is not None and budget < 2000:
        raise BudgetError("too small")
    bits = {"dense": None, "adaptive": (6, 5, 4, 3, 4)}.get(policy.kind, (policy.bits or 0,))
    noise = 0.0 if bits is None else 0.5 ** bits[-1]
    logits = torch.linspace(0, 4, 128) + noise * torch.sin(torch.arange(128.0))
    return UnigramEngine(logits, policy=str(policy), bits=bits)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    path = tmp_path_factory.mktemp("task") / "own.jsonl"
    items = [{"prompt": "q|<b>:", "choices": ["z", "a", "!!"], "answer": n % 3} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, items)))
    asked = prepare(load_task(str(path)), CharTokenizer(), TaskSettings())
    return Job(cut_chunks([(7 * place) % 128 for place in range(64)], 8), [], [asked])


@pytest.fixture(scope="module")
def sweep(job: Job) -> Sweep:
    found = HarnessResult("theirs", 4, "1", {"acc,none": 0.25}, 4.0, 0.1)
    return Sweeper(make_engine, job, silent, lambda _: [found]).run(
        parse_policies("dense,static:3..5,adaptive"),
        parse_budgets("1kB,static:5"),
        PrecisionPolicy("dense"),
    )


@pytest.fixture(scope="module")
def described(sweep: Sweep, job: Job) -> dict[str, Any]:
    return document(sweep, job, {"name": "own text", "sha256": "cd" * 32}, ORIGIN)


def test_the_document_is_json_and_its_bytes_add_up(described: dict[str, Any]) -> None:
    again = json.loads(json.dumps(plain(described)))
    policies = [row["policy"] for row in again["rows"]]
    assert policies == ["dense", *STATIC, "adaptive", "adaptive"]
    for row in again["rows"]:
        if row["error"] is None:
            assert row["bytes"]["total"] == sum(row["bytes"][name] for name in INSIDE)
            assert len(row["chunk_nll"]) == 8
    assert set(again["byte_classes"]) == set(BYTE_CLASSES)
    assert again["provenance"] == plain(ORIGIN)


def test_every_row_says_its_widths_and_where_it_fits(described: dict[str, Any]) -> None:
    quality, held, task, theirs = tables(described)
    assert all(len(row) == len(quality.columns) for row in quality.rows)
    by_policy = {row[:2]: row for row in quality.rows}
    assert by_policy["dense", ""][3] == "unquantized"
    assert by_policy["static:3", "fits static:5"][3] == "all 3"
    assert by_policy["adaptive", "1kB"][2] == "does not fit"
    moved = by_policy["adaptive", "static:5 (0.01 MiB)"][3]
    assert moved.startswith("3: 12%, 4: 62%, 5: 12%, 6: 12%; mean 3.00 to 6.00")
    assert [name for name, _ in held.legend] == ["planes", "experts_dense", "kv", "free"]
    assert all(len(row) == len(held.columns) for row in held.rows)
    assert task.title == "Task own, 3 items"
    assert [row[2] for row in task.rows] == ["16.00", "3.00", "4.00", "5.00", "4.00"]
    assert task.rows[0][3].startswith("~ 0.333 [")  # at chance, and says so
    assert theirs.rows[0][3:] == ("4.00", "acc,none 0.2500")


def test_findings_hold_adaptive_rows_against_what_else_fits(described: dict[str, Any]) -> None:
    failed, found = findings(described)
    assert failed.verdict == "failed"
    assert failed.sentence == "adaptive in 1kB could not run: too small."
    assert found.sentence.startswith("adaptive in static:5 (0.01 MiB) is ")
    assert "the best fixed policy that fits, static:" in found.sentence
    row = described["rows"][-1]
    interval = row["against_best_fixed"]["nll"]
    expected = "better" if interval["high"] < 0 else "worse" if interval["low"] > 0 else "even"
    assert found.verdict == expected
    divergence = row["against_best_fixed"]["kl"]
    assert divergence["low"] <= divergence["mean"] <= divergence["high"]
    assert f"; KL from dense {divergence['mean']:+.4f} [" in found.sentence
    described["rows"][-1]["against_best_fixed"]["kl"] = None  # of a run without dense
    assert "KL" not in findings(described)[1].sentence
    row["against_best_fixed"]["kl"] = divergence


def test_markdown_has_every_cell_and_escapes_bars(described: dict[str, Any]) -> None:
    text = markdown(described, [("a picture", "a.png")])
    for table in tables(described):
        assert f"## {table.title}" in text
        for row in table.rows:
            assert "| " + " | ".join(row) + " |" in text
    assert "![a picture](a.png)" in text
    for piece in (ORIGIN["command"], "hash " + "ab" * 32, "a processor, 2 cores", "bootstrap 0"):
        assert str(piece) in text


class Loads(HTMLParser):
    """Collects whatever a page would load, and the tags that were never closed."""

    void = ("meta", "br", "link", "img", "input", "use", "path", "image")

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(
                ("data:", "#")
            ):
                self.loaded.append(f"{tag} {value}")
            if name == "id":
                self.ids.append(value or "")
        if tag in ("script", "link", "iframe"):
            self.loaded.append(tag)
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag


def test_the_page_loads_nothing_and_escapes_text(
    described: dict[str, Any], sweep: Sweep, tmp_path: Path
) -> None:
    written = write_report(tmp_path / "report", described, None, tmp_path)
    names = {path.name for path in written}
    assert names == {
        *("report.json", "report.md", "report.html"),
        *("frontier-kl.png", "frontier-nll.png", "timeline-1.png"),
        *(f"bits-{place}.png" for place in range(1, 5)),
    }
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report" / "report.json").read_text())["format"] == "pw-eval-1"
    text = (tmp_path / "report" / "report.html").read_text()
    page = Loads()
    page.feed(text)
    assert page.loaded == []
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert "&lt;x&gt;" in text  # of the command
    assert text.count("<svg") == len(names) - 3
    assert "url(http" not in text

    [samples] = write_samples(tmp_path / "report", sweep)[:1]
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == 5 * 3  # rows that ran, items
    assert {line["policy"] for line in lines} == {
        "dense",
        *("static:3", "static:4"),
        "static:5",
        "adaptive",
    }


def test_widths_in_words() -> None:
    def held(share: dict[int, float], least: float, most: float) -> str:
        return widths({"widths": {"share": share, "least": least, "most": most}})

    assert held({}, 16, 16) == "unquantized"
    assert held({4: 1.0}, 4, 4) == "all 4"
    assert held({2: 0.25, 3: 0.75}, 2.75, 2.75) == "2: 25%, 3: 75%"
    assert held({2: 0.25, 3: 0.746, 4: 0.004}, 2.0, 3.0) == "2: 25%, 3: 75%; mean 2.00 to 3.00"
