"""L2 scaled down: contexts grow until the widest experts no longer fit, then shrink."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pw.engine import Engine
from pw.errors import ConfigError
from pw.evaluation.bench.squeeze import SqueezeRun, tight_budget
from pw.evaluation.bench.squeeze_settings import Squeeze
from support.engines import make_artifact, open_engine
from support.patience import PATIENCE

SHORT = Squeeze(
    cycles=12, probes=2, steady_steps=8, ease_steps=40, max_long=6, return_seconds=PATIENCE
)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact("qwen2_moe", tmp_path_factory.mktemp("squeeze"), num_attention_heads=2)[1]


def test_no_byte_over_budget_no_page_lost_and_every_plane_back(artifact: Path) -> None:
    budget = tight_budget(open_engine(artifact), 0.05)
    engine = open_engine(artifact, memory_budget=budget)
    advanced: list[int] = []
    found = SqueezeRun(engine, SHORT).run(advanced.append)
    assert len(advanced) == found["cycles"] == 12
    assert found["bytes_over_budget"] == 0
    assert found["pages_leaked"] == 0
    assert found["cycles_without_return"] == 0
    assert found["equal_before_and_after"] is True
    assert found["lowest_bits"] < found["most_bits"] == 6
    assert found["bytes_released"] > 12 * 4096
    assert found["bytes_reloaded"] > 12 * 4096
    assert found["quiet_steps"] > 50
    assert found["moving_steps"] > 0
    assert found["moving_step_p99_ms"] > 0
    assert found["return_seconds_most"] < SHORT.return_seconds
    assert found["kv_bytes_at_most"] > 0
    assert found["preemptions"] == 0  # so the pages of each release were used in its own step
    assert found["releases"] >= 12
    assert found["released_pages"] * 4096 == found["bytes_released"]
    assert 0 < found["release_p50_ms"] <= found["release_p99_ms"]
    assert 0 < found["release_write_p50_ms"] <= found["release_write_p99_ms"]


def test_no_cycle_begins_when_the_time_is_over(artifact: Path) -> None:
    budget = tight_budget(open_engine(artifact), 0.05)
    engine = open_engine(artifact, memory_budget=budget)
    found = SqueezeRun(engine, replace(SHORT, seconds=0.0)).run()
    assert found["cycles"] == 1
    assert found["pages_leaked"] == found["cycles_without_return"] == 0


def interrupted(
    artifact: Path, meanwhile: Callable[[Engine], object]
) -> tuple[Any, dict[str, Any]]:
    """A squeeze of three cycles, the last of them broken off in its pressure; what it says.

    Args:
        meanwhile: Happens before the interrupt.
    """
    budget = tight_budget(open_engine(artifact), 0.05)
    engine = open_engine(artifact, memory_budget=budget)
    run, steps = SqueezeRun(engine, SHORT), itertools.count()
    step = run._step

    def stepping() -> set[str]:
        if len(run._ended.returns) == 2 and next(steps) == SHORT.steady_steps + 4:
            assert engine.status().transitions > run._status_then.transitions
            meanwhile(engine)
            raise KeyboardInterrupt
        return step()

    run._step = stepping  # type: ignore[method-assign]
    found = run.run()
    assert not engine.has_work()
    assert (found["interrupted"], found["cycles"]) == (True, 2)
    return run, found


def test_an_interrupted_squeeze_tells_of_the_cycles_that_ended(artifact: Path) -> None:
    run, found = interrupted(artifact, lambda _: None)
    assert found["equal_before_and_after"] is True
    assert found["pages_leaked"] == found["bytes_over_budget"] == 0
    assert found["cycles_without_return"] == 0
    assert found["broken_by_interrupt"] is None
    assert found["requests"] == 2 * (SHORT.probes + len(run._long))
    assert found["released_pages"] * 4096 == found["bytes_released"] > 0
    # The cycle that was broken off has moved planes, too.
    assert run._cycle_record.released_pages > 0
    assert run._engine.status().bytes_released > found["bytes_released"]


def test_a_page_that_an_interrupt_loses_is_told(artifact: Path) -> None:
    _, found = interrupted(artifact, lambda engine: engine._parts.pool.take(1, 0))
    assert "weight pages in the pool" in found["broken_by_interrupt"]
    assert found["equal_before_and_after"] is None
    assert found["released_pages"] * 4096 == found["bytes_released"] > 0


def test_keys_and_values_that_an_interrupt_leaves_behind_are_told(artifact: Path) -> None:
    def forget(engine: Engine) -> None:
        engine._parts.kv.close = lambda *_, **__: None  # type: ignore[method-assign]

    _, found = interrupted(artifact, forget)
    assert found["pages_leaked"] > 0


def test_planes_that_do_not_come_back_after_an_interrupt_are_told(artifact: Path) -> None:
    _, found = interrupted(artifact, lambda engine: engine._parts.precision.hold(2))
    assert found["cycles_without_return"] == 1
    assert found["equal_before_and_after"] is False


def test_an_interrupt_before_the_first_cycle_has_ended_is_one(artifact: Path) -> None:
    budget = tight_budget(open_engine(artifact), 0.05)
    run = SqueezeRun(open_engine(artifact, memory_budget=budget), SHORT)

    def stepping() -> set[str]:
        raise KeyboardInterrupt

    run._step = stepping  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.run()


@pytest.mark.figures
def test_a_thousand_cycles(artifact: Path) -> None:
    """[L2] 0 bytes over budget, 0 pages lost, bits back within two seconds each time."""
    budget = tight_budget(open_engine(artifact), 0.05)
    engine = open_engine(artifact, memory_budget=budget)
    found = SqueezeRun(engine, replace(SHORT, cycles=1000, ease_steps=8)).run()
    assert found["cycles"] == 1000
    assert found["bytes_over_budget"] == found["pages_leaked"] == 0
    assert found["cycles_without_return"] == 0
    assert found["equal_before_and_after"] is True
    assert found["return_seconds_most"] < 2


def test_room_for_everything_is_no_squeeze(artifact: Path) -> None:
    engine = open_engine(artifact)
    with pytest.raises(ConfigError, match="fit beside the widest experts"):
        SqueezeRun(engine, SHORT)


def test_experts_that_never_fit_are_no_squeeze_either(artifact: Path) -> None:
    budget = tight_budget(open_engine(artifact), 0.05)
    engine = open_engine(artifact, memory_budget=budget - (1 << 18))
    with pytest.raises(ConfigError, match=r"widest experts do not fit: mean [0-9.]+ bits at rest"):
        SqueezeRun(engine, SHORT)


def refusal_of(engine: Engine, squeeze: Squeeze) -> ConfigError:
    with pytest.raises(ConfigError, match=r"fit beside the widest|no long prompt may") as refused:
        SqueezeRun(engine, squeeze)
    return refused.value


def test_so_many_probes_that_others_find_no_room_are_refused_with_a_number_that_works(
    artifact: Path,
) -> None:
    engine = open_engine(artifact, memory_budget=tight_budget(open_engine(artifact), 0.05))
    error = refusal_of(engine, replace(SHORT, probes=40))
    assert "40 probes of 24 tokens" in str(error)
    found = re.match(r"lower --probes to (\d+)", error.hint or "")
    assert found is not None
    most = int(found[1])
    refusal_of(engine, replace(SHORT, probes=most + 1, max_long=6 + 40 - most - 1))
    run = SqueezeRun(engine, replace(SHORT, probes=most, max_long=6 + 40 - most))
    assert engine.status().mean_bits == 6
    run._cycle()
    assert run._ended.lowest_bits < 6
    assert run._wrong.leaked == run._wrong.over_budget == 0


def test_probes_may_take_what_long_prompts_leave_when_they_end(artifact: Path) -> None:
    """As many steps of ease as there may be ask for no page while the long prompts run."""
    engine = open_engine(artifact, memory_budget=tight_budget(open_engine(artifact), 0.05))
    few, many = (SqueezeRun(engine, replace(SHORT, ease_steps=steps)) for steps in (1, 1000))
    assert few._long == many._long


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"load": 0.01}, "raise --load above 1: 0.01 times"),
        ({"max_long": 0, "probes": 1}, "raise --max-num-seqs and --max-model-len"),
    ],
)
def test_the_hint_of_a_refusal_names_what_was_too_little(
    artifact: Path, changes: dict[str, Any], hint: str
) -> None:
    engine = open_engine(artifact, memory_budget=tight_budget(open_engine(artifact), 0.05))
    assert hint in (refusal_of(engine, replace(SHORT, **changes)).hint or "")


def test_experts_that_cannot_narrow_are_refused_with_min_bits(artifact: Path) -> None:
    settings: dict[str, Any] = {"min_bits": 6}
    budget = tight_budget(open_engine(artifact, **settings), 0.05)
    engine = open_engine(artifact, memory_budget=budget, **settings)
    assert "--min-bits" in (refusal_of(engine, SHORT).hint or "")
