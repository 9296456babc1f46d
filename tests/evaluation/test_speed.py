from types import SimpleNamespace

import pytest

from pw.engine.request import RequestOutput, SamplingParams
from pw.errors import PwError
from pw.evaluation import speed as measured
from pw.evaluation.speed import Load, engine_speed, planner_seconds


class SlowEngine:
    """Takes 2 ms a step, of a clock of its own, and gives every request one token in it."""

    def __init__(self, lost: int = 0) -> None:
        self.seconds = 0.0
        self.left: dict[str, int] = {}
        self.lost = lost
        self.steps = 0

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        assert params.max_tokens is not None
        assert params.ignore_eos
        self.left[request_id] = params.max_tokens - self.lost

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> list[RequestOutput]:
        self.seconds += 0.002
        self.steps += 1
        self.left = {name: left - 1 for name, left in self.left.items()}
        outputs = [RequestOutput(name, token_ids=(1,)) for name in self.left]
        self.left = {name: left for name, left in self.left.items() if left}
        return outputs


def test_prompts_are_the_same_every_time_and_within_the_vocabulary() -> None:
    prompts = Load(3, 7, 1).prompts(11)
    assert prompts == Load(3, 7, 1).prompts(11)
    assert [len(prompt) for prompt in prompts] == [7, 7, 7]
    assert {token for prompt in prompts for token in prompt} <= set(range(11))


def test_speed_counts_the_tokens_of_the_whole_batch_after_one_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SlowEngine()
    monkeypatch.setattr(measured, "time", SimpleNamespace(perf_counter=lambda: engine.seconds))
    speed = engine_speed(engine, Load(4, 2, 10), 11, repeats=2)
    assert engine.steps == 30
    assert speed == pytest.approx(4 / 0.002)


def test_a_run_that_loses_tokens_is_no_measurement() -> None:
    with pytest.raises(PwError, match="made 9 tokens, expected 10"):
        engine_speed(SlowEngine(lost=1), Load(1, 2, 10), 11, repeats=1)


def test_planner_is_timed_on_the_table_it_is_promised_for() -> None:
    assert 0 < planner_seconds(repeats=3) < 0.2
