import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pw.evaluation.demo.checks import Check, quality_checks, run_checks
from pw.evaluation.demo.report import print_checks, print_quality, print_run, write_results
from pw.evaluation.demo.scoring import at_equal_bytes
from support.demo import answer, comparison, run_of, sample, score, squeezed, timeline_of

QUIET = squeezed().samples


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def test_a_good_run_passes_every_check() -> None:
    assert failed(run_checks(run_of(squeezed()))) == []
    assert failed(quality_checks(comparison([1.3, 2.2], [1.4, 2.2]))) == []


@pytest.mark.parametrize(
    ("changes", "name", "found"),
    [
        ({"answers": [answer()]}, "every request finished", "1 of 2"),
        (
            {"answers": [answer(), answer(error="HTTP 503", finish_reason=None)]},
            "every request finished",
            "HTTP 503",
        ),
        ({"answers": [answer(), answer(tokens_made=2)]}, "every request finished", "is short"),
        ({"after": answer("other")}, "one greedy request", "different"),
        ({"after": answer(logprobs=(-1.0, -0.5, -0.26))}, "one greedy request", "different"),
        (
            {"before": answer(error="x"), "after": answer(error="x")},
            "one greedy request",
            "3 tokens",
        ),
        (
            {"timeline": timeline_of(QUIET[0], sample(1, mean_bits=5.0, pages_kv=9), QUIET[4])},
            "the budget was tight",
            "60 + 9 pages, there are 100",
        ),
        (
            {"timeline": timeline_of(*QUIET[:3], sample(7, bytes_over_budget=4), QUIET[4])},
            "bytes stayed within",
            "4 bytes over",
        ),
        (
            {"timeline": timeline_of(*QUIET, *(sample(t, pages_free=39) for t in (9, 10)))},
            "no page was lost",
            "1 pages",
        ),
        (
            {"timeline": timeline_of(QUIET[0], sample(1, running=1, pages_kv=50), QUIET[4])},
            "bits fell",
            "from 6.00 to 6.00",
        ),
        ({"timeline": timeline_of(*QUIET[:3])}, "bits came back", "3.00 of 6.00, 50 KV pages"),
        ({"timeline": timeline_of(*QUIET, sample(9, pages_kv=1))}, "bits came back", "1 KV pages"),
        ({"timeline": timeline_of(*QUIET, sample(9, failed=1))}, "every request", "1 failed in"),
    ],
)
def test_each_fault_fails_its_own_check(changes: dict[str, Any], name: str, found: str) -> None:
    checks = run_checks(run_of(**({"timeline": squeezed()} | changes)))
    (wrong,) = [check for check in checks if not check.passed]
    assert wrong.name.startswith(name)
    assert found in wrong.found


def test_quality_checks_compare_with_the_narrowest_and_with_equal_bytes() -> None:
    worse_than_two_bits = comparison([1.5, 2.4], [1.6, 2.5])
    assert failed(quality_checks(worse_than_two_bits)) == [
        "adaptive is better than the narrowest uniform width"
    ]
    worse_than_uniform = comparison([1.3, 2.3], [1.2, 2.2])
    assert failed(quality_checks(worse_than_uniform)) == [
        "adaptive is not worse than uniform widths of the same bytes"
    ]


def test_uniform_at_equal_bytes_is_geometric_between_two_widths() -> None:
    dense = score("dense", [1.0, 2.0], [800.0, 800.0])
    uniform = [
        score("static:2", [1.5, 2.3], [100.0, 100.0]),  # adds 0.4 on average
        score("static:3", [1.05, 2.15], [200.0, 200.0]),  # adds 0.1
        score("static:4", [1.02, 2.03], [400.0, 400.0]),  # adds 0.025
    ]
    between = at_equal_bytes(dense, uniform, np.array([150.0, 300.0]))
    low, high = (0.2 - 0.1) / 0.3, (0.05 - 0.025) / 0.075  # weight of the narrower width
    expected = [low * 1.5 + (1 - low) * 1.05, high * 2.15 + (1 - high) * 2.03]
    assert between == pytest.approx(expected)
    assert at_equal_bytes(dense, uniform, np.array([100.0, 400.0])) == pytest.approx([1.5, 2.03])
    assert at_equal_bytes(dense, uniform, np.array([200.0, 200.0])) == pytest.approx([1.05, 2.15])
    assert at_equal_bytes(dense, uniform, np.array([50.0, 999.0])) == pytest.approx([1.5, 2.03])


def test_a_width_that_adds_nothing_makes_the_line_straight() -> None:
    dense = score("dense", [1.0], [800.0])
    uniform = [score("static:2", [1.4], [100.0]), score("static:3", [0.9], [200.0])]
    assert at_equal_bytes(dense, uniform, np.array([125.0])) == pytest.approx([1.275])


def test_the_report_shows_the_run_the_quality_and_the_checks() -> None:
    run, compared = run_of(squeezed()), comparison([1.3, 2.2], [1.4, 2.2])
    checks = [Check("one", True, "fine"), Check("two", False, "broken")]
    console = Console(width=120, record=True, file=io.StringIO())
    print_run(console, run, 4096)
    print_quality(console, compared, 512)
    print_checks(console, checks)
    text = " ".join(console.export_text().split())
    for part in (
        "2 finished, 0 failed, 0 preempted",
        "6.00 at the start, 3.00 at the least, 6.00 at the end",
        "50% at 6, 50% at 3",
        "1 releases, 1 reloads, 0 trades",
        "bytes over budget 0 of 4,096",
        f"{math.exp(1.75):.3f}",  # adaptive
        f"{math.exp(1.8):.3f}",  # uniform at the same bytes
        "adaptive minus that: -0.0500",
        "ok one: fine",
        "FAILED two: broken",
    ):
        assert part in text, part


def test_results_hold_every_sample_and_every_chunk(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    checks = [Check("one", True, "fine")]
    write_results(path, run_of(squeezed()), 4096, comparison([1.3, 2.2], [1.4, 2.2]), checks)
    results = json.loads(path.read_text())
    assert results["checks"] == [{"name": "one", "passed": True, "found": "fine"}]
    assert [s["policy"] for s in results["scores"]] == ["dense", "static:2", "static:4", "adaptive"]
    assert results["scores"][-1]["nll"] == [1.3, 2.2]
    assert [s["mean_bits"] for s in results["samples"]] == [6.0, 6.0, 3.0, 6.0, 6.0]
    assert results["adaptive_minus_equal_bytes"]["mean"] == pytest.approx(-0.05)
