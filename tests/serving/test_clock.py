"""[F9] The wall clock jumps an hour: nothing that is measured or limited in seconds notices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from pw.serving.context import ServingConfig
from pw.serving.limits import ServingLimits
from support.patience import PATIENCE
from tests.serving.fakes import FakeEngine


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_jump_of_the_clock(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    real, offset = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    config = ServingConfig(("fake",), limits=ServingLimits(request_timeout=PATIENCE))
    with start(FakeEngine(step_seconds=0.02), config=config) as served:
        stream = served.openai.completions.create(
            model="fake", prompt="1", max_tokens=8, stream=True
        )
        texts = [next(stream).choices[0].text]
        offset[0] = jump
        texts += [chunk.choices[0].text for chunk in stream]
        assert len(texts) >= 8
        assert served.http.get("/health/ready").status_code == 200
        answer = served.openai.completions.create(model="fake", prompt="1", max_tokens=2)
        assert abs(answer.created - (real() + jump)) < PATIENCE  # what is told is the clock's
        metrics = served.metrics()
        seconds = [v for k, v in metrics.items() if "_seconds_sum{" in k]
        assert len(seconds) > 3
        assert all(0 <= value < PATIENCE for value in seconds)
        assert all(value >= 0 for key, value in metrics.items() if "_total{" in key)
        timeline = served.http.get("/v1/pw/timeline").json()
        assert timeline
