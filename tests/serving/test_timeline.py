"""The timeline, the stats line, the request line and the memory plan: exact figures."""

from __future__ import annotations

import gc
import json
import logging
import time
import tracemalloc
from dataclasses import replace

import pytest

from pw.config import format_bytes
from pw.engine.request import BytesByClass, EngineStatus, RequestOutput
from pw.logs import JsonFormatter
from pw.serving.operations.health import Progress
from pw.serving.operations.log_lines import (
    RequestRecord,
    StatsLine,
    log_request,
    memory_plan,
    memory_plan_fields,
)
from pw.serving.operations.metrics import SequenceTimer, ServingMetrics
from pw.serving.operations.timeline import Planned, Timeline
from tests.serving.fakes import FakeEngine

QUIET = EngineStatus(pages_weights=60, pages_kv=10, pages_free=30, mean_bits=5.5)
RECORD = RequestRecord("cmpl-1", 2, 30, 16, 8, "length,stop", 0.25, None, 1.5, 5.5, 4.25, 2)


def test_timeline_tells_differences():
    timeline = Timeline()
    history = tuple(
        {"reason": reason, "moves": 2, "pages": 8}
        for reason in ("old", "kv allocation", "rebalance", "kv allocation")
    )
    timeline.record(replace(QUIET, plans=7, generation_tokens=5), 1000.0, 50.0)
    busy = replace(
        QUIET,
        plans=10,
        plan_history=history,
        generation_tokens=25,
        prompt_tokens=100,
        preemptions=1,
        running=3,
    )
    sample = timeline.record(busy, 900.0, 52.0)  # the wall clock has jumped back
    assert sample.plans == {"kv allocation": Planned(2, 4, 16), "rebalance": Planned(1, 2, 8)}
    assert sample.generation_tokens_per_second == 10
    assert sample.prompt_tokens_per_second == 50
    assert (sample.preemptions, sample.running, sample.pages_kv) == (1, 3, 10)
    again = timeline.record(QUIET, 901.0, 53.0)  # an engine that began anew
    assert (again.generation_tokens_per_second, again.preemptions, again.plans) == (0, 0, {})


def test_timeline_forgets_the_oldest():
    timeline = Timeline(kept=3)
    for second in range(5):
        timeline.record(QUIET, 1000.0 + second, float(second))
    assert [sample.number for sample in timeline.since(0)] == [2, 3, 4]
    assert [sample.number for sample in timeline.since(4)] == [4]
    assert timeline.since(5) == []
    assert timeline.since(0)[0].generation_tokens_per_second == 0


def test_timeline_gives_back_what_was_recorded():
    timeline = Timeline(kept=3)
    history = ({"reason": "rebalance", "moves": 2, "pages": 8},)
    recorded = []
    for second in range(8):
        plans = second // 2  # every second sample has one
        status = replace(QUIET, plans=plans, plan_history=history, running=second, mean_bits=2.1)
        recorded.append(timeline.record(status, 1e9 + second / 7, float(second)))
    assert timeline.since(0) == recorded[-3:]
    assert timeline.since(6) == recorded[6:]
    assert [len(sample.plans) for sample in timeline.since(0)] == [0, 1, 0]
    assert all(type(sample.running) is int for sample in timeline.since(0))


def test_timeline_has_its_memory_from_the_start():
    def fill(timeline: Timeline, samples: range) -> None:
        for second in samples:
            reason = ("kv allocation", "rebalance")[second % 2]
            history = ({"reason": reason + "", "moves": second, "pages": 1000 + second},)
            status = replace(QUIET, plans=second, plan_history=history, pages_kv=1000 + second)
            timeline.record(status, 1e9 + second, float(second))
        gc.collect()

    timeline = Timeline()
    fill(timeline, range(10))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        fill(timeline, range(10, 1000))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(timeline.since(0)) == 900
    assert grown < 10_000


def test_a_stalled_engine_is_told_from_a_busy_one(caplog):
    progress = Progress(stall_seconds=60)
    begin = progress._since
    full = replace(QUIET, running=64, waiting=256)
    for second in range(300):  # a full batch, the queue behind it, a step each 59 seconds
        progress.observe(replace(full, step=second // 59), begin + second)
        assert not progress.stalled
    assert not caplog.records
    progress.observe(replace(full, step=5), begin + 354)
    assert not progress.stalled
    progress.observe(replace(full, step=5), begin + 356)
    assert progress.stalled
    progress.observe(replace(full, step=5), begin + 400)
    (line,) = caplog.records
    assert "no step for 61 s with 64 running, 256 waiting; step 5" in line.getMessage()
    progress.observe(replace(full, step=6), begin + 401)
    assert not progress.stalled
    progress.observe(replace(full, step=6), begin + 500)
    assert progress.stalled
    progress.observe(replace(QUIET, step=6), begin + 501)  # idle engines make no steps
    assert not progress.stalled
    progress.observe(replace(full, step=6), begin + 560)
    assert not progress.stalled


def test_stats_line_comes_only_after_work(caplog):
    caplog.set_level(logging.INFO, "pw.serving.stats")
    line = StatsLine(interval=10)
    held = BytesByClass(planes=3 << 20, luts=1 << 20)
    status = replace(QUIET, bytes=held)
    for now in (0.0, 9.0, 10.0, 20.0):
        line.observe(status, now)
    assert not caplog.records
    status = replace(status, step=5, generation_tokens=100, prompt_tokens=50, running=2, plans=1)
    line.observe(status, 25.0)
    assert not caplog.records
    line.observe(status, 30.0)
    line.observe(replace(status, running=0), 40.0)
    (record,) = caplog.records
    assert record.getMessage() == (
        "Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 10.0 tokens/s, "
        "Running: 2 reqs, Waiting: 0 reqs, KV cache usage: 25.0%, weights: 4.00 MiB, "
        "mean bits: 5.50, plans: 1, preemptions: 0"
    )
    fields = json.loads(JsonFormatter().format(record))
    assert fields["event"] == "stats"
    assert fields["generation_tokens_per_second"] == 10
    assert fields["weight_bytes"] == 4 << 20


def test_request_line_for_people_and_for_machines(caplog):
    caplog.set_level(logging.INFO, "pw.serving")
    log_request(RECORD)
    (record,) = caplog.records
    assert record.getMessage() == (
        "cmpl-1: sequences 2, tokens in 30, out 8, finish length,stop, queue 0.250 s, ttft -, "
        "e2e 1.500 s, bits 5.50 to 4.25"
    )
    line = json.loads(JsonFormatter().format(record))
    assert list(line)[4:] == [
        *("event", "request_id", "sequences", "prompt_tokens", "cached_tokens"),
        *("generated_tokens", "finish_reason", "queue_seconds", "ttft_seconds", "e2e_seconds"),
        *("bits_start", "bits_end", "bits_min"),
    ]
    assert line["ttft_seconds"] is None


def test_request_line_of_one_that_got_no_token(caplog):
    caplog.set_level(logging.INFO, "pw.serving")
    log_request(replace(RECORD, bits_start=None, bits_end=None, bits_min=None))
    (record,) = caplog.records
    assert record.getMessage().endswith("e2e 1.500 s, bits -")
    assert json.loads(JsonFormatter().format(record))["bits_min"] is None


def test_timer_takes_the_engines_own_times():
    metrics = ServingMetrics(FakeEngine(), "fake", {})
    timer = SequenceTimer(metrics, prompt_tokens=4)
    first = RequestOutput(
        "r", token_ids=(1,), mean_bits=5, min_bits=3, queue_seconds=0.25, prefill_seconds=0.5
    )
    timer.record(replace(first, cached_tokens=2, completion_tokens=1))
    timer.record(RequestOutput("r", token_ids=(2,), mean_bits=4, min_bits=2, completion_tokens=2))
    timer.record(RequestOutput("r", finish_reason="stop", mean_bits=6, completion_tokens=2))
    assert (timer.first_bits, timer.last_bits, timer.least_bits) == (5, 6, 2)
    assert (timer.cached_tokens, timer.queue_seconds) == (2, 0.25)
    text = metrics.render().decode()
    assert 'pw:request_queue_time_seconds_sum{engine="0",model_name="fake"} 0.25' in text
    assert 'pw:request_prefill_time_seconds_sum{engine="0",model_name="fake"} 0.5' in text


def test_times_count_from_the_arrival_of_the_request():
    timer = SequenceTimer(ServingMetrics(FakeEngine(), "fake", {}), 4, time.monotonic() - 7)
    timer.record(RequestOutput("r", token_ids=(1,), finish_reason="stop", completion_tokens=1))
    assert 7 <= timer.first_token_seconds <= timer.seconds < 17


def test_memory_plan_is_a_table_that_adds_up():
    held = BytesByClass(
        dense=2 << 20, planes=3 << 20, luts=1 << 20, free=1 << 20, workspace=1 << 20, budget=8 << 20
    )
    status = EngineStatus(
        policy="adaptive",
        pages_total=2560,
        page_bytes=2048,
        max_model_len=4096,
        mean_bits=6,
        bytes=held,
    )
    lines = memory_plan(status, {"6 bits": 1.125, "2 bits": 3.5}).splitlines()
    assert lines[0] == "memory plan: 8.00 MiB of a budget of 8.00 MiB"
    assert [line.split()[0] for line in lines[1:-2]] == [
        *("dense", "planes", "luts", "free", "workspace")
    ]
    assert sum(float(line.split()[3].rstrip("%")) for line in lines[1:-2]) == pytest.approx(100)
    assert "2,560 pages of 2.00 KiB, contexts up to 4,096 tokens" in lines[-2]
    assert lines[-1].endswith("for 4,096 tokens per request: 1.12x at 6 bits, 3.50x at 2 bits")
    fields = memory_plan_fields(status, {"6 bits": 1.125})
    assert fields["planes_bytes"] == 3 << 20
    assert "padding_bytes" not in fields
    assert fields["concurrency"] == {"6 bits": 1.12}
    json.dumps(fields)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (24 << 20, "24.00 MiB"),
        (3 << 40, "3.00 TiB"),
    ],
)
def test_sizes(number, text):
    assert format_bytes(number) == text
