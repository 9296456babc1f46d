"""Reads of planes that fail: the old width serves on, pages come back, service goes on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pw.engine.request import SamplingParams
from pw.errors import StoreError
from support.engines import open_engine, random_prompt, tight_budget

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class BadDisk:
    """A source of planes some of whose reads fail."""

    def __init__(self, source: Any, rate: float, error: Exception) -> None:
        self.geometry = source.geometry
        self.failed = 0
        self.rate, self._error, self._source = rate, error, source
        self._rng = random.Random(0)

    def read_planes(self, *arguments: Any) -> None:
        self._maybe_fail()
        self._source.read_planes(*arguments)

    def read_lut(self, *arguments: Any) -> None:
        self._maybe_fail()
        self._source.read_lut(*arguments)

    def _maybe_fail(self) -> None:
        if self._rng.random() < self.rate:
            self.failed += 1
            raise self._error


@pytest.mark.parametrize(
    ("rate", "error"),
    [(1.0, OSError(5, "Input/output error")), (0.3, StoreError("plane 3 is damaged"))],
    ids=["dead disk", "bad blocks"],
)
def test_service_goes_on_at_the_old_widths(
    qwen: tuple[Any, Path], tmp_path: Path, rate: float, error: Exception
) -> None:
    trace = tmp_path / "trace.jsonl"
    engine = open_engine(
        qwen[1],
        memory_budget=tight_budget(qwen[1], kv_tokens=80),
        planner_low_watermark=0.01,
        offload_cpu_memory=0,
        trace=trace,
    )
    store = engine._parts.store
    assert store is not None
    assert engine.status().bytes.host == 0
    disk = BadDisk(store._source, rate, error)
    store._source = disk  # type: ignore[assignment]
    for seed in range(6):
        engine.add_request(f"r{seed}", random_prompt(120, seed), GREEDY)
    while engine.has_work():
        assert all(output.error is None for output in engine.step())
        engine.check_integrity()
    status = engine.status()
    assert status.finished == 6
    assert disk.failed == status.transfer_failures > 0
    # Whatever happened, blocks hold the weights of the width they claim.
    probe = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    failed = [event for event in events if event["event"] == "failed"]
    assert len(failed) == disk.failed
    assert {event["reason"] for event in failed} == {str(error)}

    disk.rate = 0.0
    for _ in range(4000):
        if engine.status().mean_bits == 6:
            break
        engine.idle_turn()
        engine.check_integrity()
    assert engine.status().mean_bits == 6  # blocks that failed are tried again after a rest
    assert engine.status().transfer_failures == disk.failed
    whole = open_engine(qwen[1], "static:6").generate([random_prompt(30, 9)], probe)
    assert engine.generate([random_prompt(30, 9)], probe) == whole
