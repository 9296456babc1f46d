"""Documented metrics are served, and served ones documented; every query finds its metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.conftest import serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OWN = {"model_name", "engine"}  # labels of every sample but those of HTTP
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
ADDED = {"instance", "job"}  # by Prometheus


@pytest.fixture(scope="module")
def served() -> dict[str, tuple[str, set[str]]]:
    """Name -> (type, labels) of all that `/metrics` shows, after requests of each kind."""
    with serving() as running:
        body = {"prompt": "1", "max_tokens": 2}
        running.http.post("/v1/completions", json=body)
        text = running.http.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        suffix = "_total" if family.type == "counter" else ""
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[family.name + suffix] = (family.type, labels)
    return found


@pytest.fixture(scope="module")
def series(served: dict[str, tuple[str, set[str]]]) -> dict[str, set[str]]:
    """Names of time series as queries use them, and their labels."""
    return {
        name + suffix: labels | ADDED | ({"le"} if suffix == "_bucket" else set())
        for name, (kind, labels) in served.items()
        for suffix in SUFFIXES.get(kind, ("",))
    }


def documented() -> Iterator[tuple[str, str, set[str]]]:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for name, kind, labels in re.findall(r"^\| `(pw:\w+)` \| (\w+) \| ([^|]*) ?\|", text, re.M):
        yield name, kind, set(re.findall(r"`(\w+)`", labels))


def test_the_page_of_documentation_and_the_server_agree(
    served: dict[str, tuple[str, set[str]]],
) -> None:
    rows = list(documented())
    names = [name for name, _, _ in rows]
    assert len(names) == len(set(names))
    assert set(names) == set(served)
    for name, kind, labels in rows:
        own = set() if name.startswith("pw:http_") else OWN
        assert (name, kind, labels | own) == (name, *served[name])


def test_names_end_as_those_of_the_dashboards_that_people_have(series: dict[str, set[str]]) -> None:
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total"),
        *("request_success_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum"),
        *("e2e_request_latency_seconds_count", "request_queue_time_seconds_bucket"),
        *("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
        *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
        *("iteration_tokens_total_bucket", "cache_config_info"),
    ):
        assert f"pw:{name}" in series, name


def selectors(node: Any) -> Iterator[Any]:
    """All vector selectors of a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str | float):
            yield from selectors(child)
    for child in getattr(node, "args", None) or []:
        yield from selectors(child)


def check_query(query: str, series: dict[str, set[str]]) -> set[str]:
    """Series that a query reads; each must be served, with the labels that it is selected by."""
    parsed = promql_parser.parse(
        query.replace("$__rate_interval", "5m").replace("$model", ".*").replace("$instance", ".*")
    )
    names = set()
    for selector in selectors(parsed):
        names.add(selector.name)
        if selector.name != "up":
            assert selector.name in series, query
            for matcher in selector.matchers.matchers:
                assert matcher.name in series[selector.name], (query, matcher.name)
    assert names, query
    return names


def test_the_check_of_queries_finds_what_it_should(series: dict[str, set[str]]) -> None:
    check_query('sum(rate(pw:request_success_total{finished_reason="stop"}[5m]))', series)
    nested = "histogram_quantile(0.9, sum by (le) (rate(pw:nothing_bucket[5m]))) > 1"
    for wrong in (
        nested,
        "pw:plan_total / pw:none",
        'pw:plan_total{layer="1"}',
        "rate(pw:none[5m])",
    ):
        with pytest.raises(AssertionError):
            check_query(wrong, series)
    with pytest.raises(ValueError, match="paren"):
        check_query("sum(pw:plan_total", series)


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((DEPLOY / "grafana" / "pagedweight.json").read_text())
    assert dashboard["schemaVersion"] >= 39
    return list(dashboard["panels"])


def test_the_dashboard_asks_for_what_there_is(series: dict[str, set[str]]) -> None:
    asked = set()
    for panel in panels():
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            asked |= check_query(target["expr"], series)
        assert panel["type"] == "row" or panel["targets"], panel["title"]
        assert panel["type"] == "row" or panel["description"]
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    every = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series}
    dull = {
        "pw:build_info",
        "pw:cache_config_info",
        "pw:engine_up",
        "pw:prefix_cache_queries_total",
    }
    dull |= {"pw:scheduler_last_step_timestamp_seconds", "pw:precision_transitions_total"}
    dull |= {"pw:request_prefill_time_seconds", "pw:request_decode_time_seconds"}
    dull |= {"pw:kv_bytes_budget", "pw:weight_bytes_resident", "pw:weight_bytes_budget"}
    assert shown == every - dull


def test_the_dashboard_s_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def rules() -> list[dict[str, Any]]:
    text = (DEPLOY / "prometheus" / "alerts.yaml").read_text()
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def test_alerts_ask_for_what_there_is(series: dict[str, set[str]]) -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) > 8
    for rule in rules():
        check_query(rule["expr"], series)
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "action"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_takes_its_files() -> None:
    for arguments in (["rules", "alerts.yaml"], ["config", "--syntax-only", "prometheus.yaml"]):
        done = subprocess.run(
            ["promtool", "check", *arguments],
            cwd=DEPLOY / "prometheus",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
