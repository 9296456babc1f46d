"""Requests of a benchmark and the figures made of their times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pw.errors import ConfigError
from pw.evaluation.bench.metrics import Timing, parse_goodput, summarize
from pw.evaluation.bench.report import render, save
from pw.evaluation.bench.workload import Workload, arrivals


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_random_prompts_have_their_lengths_and_share_their_prefix() -> None:
    workload = Workload(num_prompts=20, input_len=40, output_len=8, prefix_len=6, seed=3)
    requests = workload.requests(range(100, 110))
    assert requests == workload.requests(range(100, 110))
    assert requests != Workload(num_prompts=20, input_len=40, output_len=8, prefix_len=6).requests()
    assert {len(request.prompt) for request in requests} == {46}
    assert {request.output_len for request in requests} == {8}
    assert len({tuple(request.prompt[:6]) for request in requests}) == 1
    assert len({tuple(request.prompt[6:]) for request in requests}) == 20
    tokens = {token for request in requests for token in request.prompt}
    assert tokens == set(range(100, 110))


def test_lengths_vary_by_their_ratio() -> None:
    workload = Workload(num_prompts=300, input_len=100, output_len=10, range_ratio=0.5)
    requests = workload.requests()
    for low, high, sizes in (
        (50, 150, [len(request.prompt) for request in requests]),
        (5, 15, [request.output_len for request in requests]),
    ):
        assert min(sizes) == pytest.approx(low, abs=0.05 * high)
        assert max(sizes) == pytest.approx(high, abs=0.05 * high)
        assert min(sizes) >= low
        assert max(sizes) <= high


def test_conversations_give_their_first_turn_and_the_length_of_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turn = {"from": "human", "value": "hello there"}
    path.write_text(
        json.dumps(
            [
                {"conversations": [turn, {"from": "gpt", "value": "one two three"}]},
                {"conversations": [turn]},  # nobody answered
                {"conversations": [{"from": "gpt", "value": "x"}, turn]},
            ]
        )
    )
    workload = Workload(dataset="sharegpt", path=path)
    found = workload.requests(count=lambda text: len(text.split()))
    assert [(request.prompt, request.output_len) for request in found] == [("hello there", 3)]


def test_own_prompts_are_shuffled_by_seed_and_cut(tmp_path: Path) -> None:
    lines: list[object] = [{"prompt": f"p{n}"} for n in range(9)]
    lines.append({"prompt": [1, 2, 3], "output_tokens": 5})
    path = write(tmp_path / "custom.jsonl", lines)
    every = Workload(dataset="custom", path=path, output_len=7).requests()
    assert len(every) == 10
    lengths = {str(request.prompt): request.output_len for request in every}
    assert lengths["[1, 2, 3]"] == 5
    assert lengths["p0"] == 7
    few = Workload(dataset="custom", path=path, num_prompts=4, seed=1).requests()
    assert len(few) == 4
    assert [r.prompt for r in few] != [r.prompt for r in every[:4]]


def test_traces_share_blocks_by_hash_and_keep_their_moments(tmp_path: Path) -> None:
    entries: list[object] = [
        {"timestamp": 5000, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 9]},
        {"timestamp": 6500, "input_length": 1500, "output_length": 2, "hash_ids": [7, 8, 3]},
        {"timestamp": 7000, "input_length": 20, "output_length": 1},
    ]
    path = write(tmp_path / "trace.jsonl", entries)
    a, b, c = Workload(dataset="trace", path=path).requests()
    assert (a.arrival, b.arrival, c.arrival) == (0.0, 1.5, 2.0)
    assert (len(a.prompt), len(b.prompt), len(c.prompt)) == (1100, 1500, 20)
    assert a.prompt[:1024] == b.prompt[:1024]
    assert a.prompt[1024:1100] != b.prompt[1024:1100]


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"dataset": "web"}, "unknown dataset: `web`"),
        ({"dataset": "custom"}, "needs a file"),
        ({"num_prompts": 0}, "at least 1: 0"),
        ({"range_ratio": 1.0}, r"in \[0, 1\): 1.0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(workload: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**workload)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["[1]", "{}", "no json", '{"prompt": ""}', ""])
@pytest.mark.parametrize("dataset", ["sharegpt", "custom", "trace"])
def test_files_of_another_form_are_named(tmp_path: Path, dataset: str, text: str) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"(not a {dataset} dataset|no usable prompts).*data"):
        Workload(dataset=dataset, path=path).requests()
    with pytest.raises(ConfigError, match="cannot read"):
        Workload(dataset=dataset, path=tmp_path / "absent").requests()


def test_arrivals_follow_rate_and_burstiness() -> None:
    assert arrivals(3, math.inf, 1.0, 0).tolist() == [0, 0, 0]
    spread = {}
    for burstiness in (0.2, 1.0, 100.0):
        times = arrivals(4001, 50.0, burstiness, 1)
        assert times[0] == 0
        gaps = np.diff(times)
        assert (gaps >= 0).all()
        assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
        spread[burstiness] = gaps.std() / gaps.mean()
    # A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
    for burstiness, variation in spread.items():
        assert variation == pytest.approx(burstiness**-0.5, rel=0.1)
    for rate, burstiness in ((0, 1), (1, 0), (-1, 1), (math.nan, 1)):
        with pytest.raises(ConfigError, match="must be positive"):
            arrivals(2, rate, burstiness, 0)


def timing(start: float, tokens: list[float], error: str | None = None) -> Timing:
    made = Timing(start, input_tokens=10, output_tokens=len(tokens), error=error)
    for moment in tokens:
        made.token(moment)
    return made


def test_figures_are_those_of_the_definitions() -> None:
    timings = [
        timing(0.0, [0.5, 0.6, 0.9]),  # tpot 200 ms, gaps 100 and 300
        timing(1.0, [1.1]),  # one token: no tpot, no gap
        timing(2.0, [2.1, 2.2], error="broke"),
    ]
    found = summarize(timings, 4.0, percentiles=(50, 99), goodput={"ttft": 200, "tpot": 500})
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["broke"])
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 4)
    assert found["request_throughput"] == 0.5
    assert found["output_throughput"] == 1.0
    assert found["total_token_throughput"] == 6.0
    assert found["mean_ttft_ms"] == pytest.approx(300)
    assert found["mean_tpot_ms"] == found["p99_tpot_ms"] == pytest.approx(200)
    assert found["mean_itl_ms"] == pytest.approx(200)
    assert found["p50_e2el_ms"] == pytest.approx(500)
    assert found["request_goodput"] == 0.25  # the first was too late
    assert "request_goodput" not in summarize(timings, 4.0)


def test_goodput_limits_are_read_as_users_write_them() -> None:
    assert parse_goodput(["ttft:500 tpot:50", "e2el:9000"]) == {
        "ttft": 500, "tpot": 50, "e2el": 9000
    }  # fmt: skip
    for wrong in ("ttft", "ttft:", "ttft:-1", "latency:3", "itl:5"):
        with pytest.raises(ConfigError, match="not a goodput limit"):
            parse_goodput([wrong])


def test_results_are_shown_in_three_forms_and_saved_with_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"n": 1234, "x": 0.5, "bytes": {"kv": 7168}, "lengths": [3, 4], "nothing": None}
    assert json.loads(render([row], "json")) == row
    assert "| n | 1,234 |" in render([row], "md")
    assert "| bytes.kv | 7.00 KiB |" in render([row], "md")
    head, line = render([row], "csv").splitlines()
    assert head == "n,x,bytes.kv,lengths,nothing"
    assert line == "1234,0.5,7168,3 4,"
    with pytest.raises(ConfigError, match="unknown output form: `xml`"):
        render([row], "xml")
    typed = ["pw", "bench", "serve", "--api-key", "secret", "--api-key=secret", "a b"]
    monkeypatch.setattr("sys.argv", typed)
    path = save(row, "latency", tmp_path / "deep" / "er", None)
    kept = json.loads(path.read_text())
    assert kept["benchmark"] == "latency"
    assert kept["machine"]["threads"] >= 1
    assert kept["n"] == 1234
    assert kept["command"] == "pw bench serve --api-key ... --api-key=... 'a b'"
