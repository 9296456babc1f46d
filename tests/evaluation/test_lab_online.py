"""Plans of the lab: the product's own numbers, within the budget, from the past alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pw.config import PlannerConfig
from pw.errors import BudgetError
from pw.evaluation.lab import LabModel
from pw.evaluation.lab.costs import bare_costs, page_costs, total_bytes
from pw.evaluation.lab.online import online_bits
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.probe import Prompt
from pw_pipelines import trace
from support.engines import SAMPLES, make_artifact
from support.offline import QUIET


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LabModel:
    folder: Path = tmp_path_factory.mktemp("online")
    make_artifact("qwen2_moe", folder, num_attention_heads=2)
    trace.run(folder / "model.pw", SAMPLES, QUIET, model=str(folder / "checkpoint"))
    return LabModel.open(folder / "model.pw", folder / "checkpoint")


@pytest.fixture(scope="module")
def costs(model: LabModel) -> Any:
    return bare_costs(model.geometry, model.widths)


def prompts(model: LabModel, busy: list[int]) -> list[Prompt]:
    """Prompts whose whole routing goes to one expert each."""
    shape = (len(model.geometry.layers), model.geometry.experts)
    found = []
    for expert in busy:
        mass = np.zeros(shape)
        mass[:, expert] = 4000.0
        found.append(Prompt(4000, mass, mass, None, np.ones((*shape, 2))))
    return found


def stream(seen: list[Prompt]) -> Any:
    return SimpleNamespace(prompts=seen, wholes=seen)


@pytest.mark.parametrize("planner", ["hull", "greedy"])
def test_every_plan_is_within_its_budget(model: LabModel, costs: Any, planner: str) -> None:
    made = ProductPlanner(model, model.artifact, costs, PlannerConfig(planner=planner))
    least, most = costs[:, 0].sum(), costs[:, -1].sum()
    spent = []
    for share in (0.1, 0.4, 0.8):
        budget = int(least + share * (most - least))
        spent.append(total_bytes(costs, model.widths, made.bits(budget)))
        assert spent[-1] <= budget
    assert spent == sorted(spent)
    with pytest.raises(BudgetError):
        made.bits(int(least) - 1)


@pytest.mark.parametrize("rule", ["buckets", "proportional"])
def test_a_busy_expert_gets_more_bits_and_only_the_past_counts(
    model: LabModel, costs: Any, rule: str
) -> None:
    planner = ProductPlanner(model, model.artifact, costs, PlannerConfig(routing_rule=rule))
    budget = int(costs[:, 1].sum())
    seen = prompts(model, [0, 0, 1])
    first, second, third = online_bits(planner, stream(seen), budget)
    again = online_bits(planner, stream(seen[:2]), budget)
    assert (again[0] == first).all()
    assert (again[1] == second).all()
    by_expert = [
        bits.reshape(len(model.geometry.layers), -1, 2).sum((0, 2)) for bits in (second, third)
    ]
    assert by_expert[0][0] > by_expert[1][0]
    assert by_expert[0][1] < by_expert[1][1]
    off = online_bits(planner, stream(seen), budget, routing=False)
    assert (off[0] == off[2]).all()
    assert (off[0] == planner.bits(budget)).all()


def test_pages_cost_no_less_than_the_bytes_in_them(model: LabModel) -> None:
    widths = model.widths
    pages = page_costs(model.geometry, model.checkpoint.kv, (widths[0], widths[-1]))
    bare = bare_costs(model.geometry, widths)
    assert (pages >= bare).all()
    long = bare_costs(model.geometry, widths, 2048)
    planes = np.array([model.geometry.gate_up.weights * b // 8 for b in widths])
    luts = bare[0] - planes
    np.testing.assert_allclose(long[0] - planes, luts * model.geometry.gate_up.cols / 2048, atol=1)
