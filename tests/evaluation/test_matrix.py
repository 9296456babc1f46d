"""The comparison of policies: equal bytes, counted floors, contexts that nobody computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.config import EngineConfig, PlannerConfig, PrecisionPolicy
from pw.engine import Engine
from pw.errors import ConfigError, PwError
from pw.evaluation.bench.filling import Ballast, fill
from pw.evaluation.bench.floor import StepBytes, copy_bandwidth, step_bytes
from pw.evaluation.bench.longest import longest_contexts
from pw.evaluation.bench.matrix import Matrix, run_matrix
from pw.evaluation.bench.matrix_limits import Limits
from pw.evaluation.bench.matrix_policies import parse_policy
from pw.evaluation.bench.peers import transformers_generate
from pw.evaluation.bench.profile import Run, by_class, class_floors
from pw.evaluation.bench.tables import at_equal_bytes, report, speedups
from support.small_matrix import CONFIG, HIDDEN, INNER, LAYERS, SMALL, TOP_K, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("matrix"))


def opened(folder: Path, policy: str, **settings: Any) -> Engine:
    parsed = PrecisionPolicy.parse(policy)
    config = replace(CONFIG, policy=parsed, enable_prefix_caching=False, **settings)
    return Engine.from_artifact(folder, config)


def test_contexts_that_nobody_computes_decode_like_others(folder: Path) -> None:
    engine = opened(folder, "static:3")
    names = fill(engine, [[1] * 40, [2] * 100, [3] * 7], 6)
    running = engine._parts.scheduler.running
    assert [sequence.length for sequence in running] == [41, 101, 8]
    assert len({sequence.output[0] for sequence in running}) == 3
    assert engine.status().step == 1
    made = dict.fromkeys(names, 1)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            made[output.request_id] += len(output.token_ids)
    assert set(made.values()) == {6}
    engine.check_integrity()
    real = engine.generate([[1] * 40], _greedy(3))[0]
    assert (
        real.token_ids == opened(folder, "static:3").generate([[1] * 40], _greedy(3))[0].token_ids
    )


def _greedy(tokens: int) -> Any:
    from pw.engine.request import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def test_contexts_that_do_not_fit_at_a_time_are_told(folder: Path) -> None:
    engine = opened(folder, "static:3", max_num_seqs=2)
    with pytest.raises(PwError, match="1 of 3 contexts do not fit at a time"):
        fill(engine, [[1] * 8] * 3, 6)


@pytest.mark.parametrize("policy", ["static:3", "dense"])
def test_a_step_reads_what_can_be_counted_by_hand(folder: Path, policy: str) -> None:
    engine = opened(folder, policy)
    fill(engine, [[1] * 40, [2] * 100], 9)
    read = step_bytes(engine)
    lengths = 42 + 102  # with the token that this step has made
    assert read.kv == LAYERS * 2 * HIDDEN * 4 * lengths
    weights = 3 * HIDDEN * INNER
    each = 4 * weights if policy == "dense" else weights * 3 // 8 + 2 * 8 * (2 * INNER + HIDDEN)
    assert read.experts == round(read.experts_read * LAYERS) * each
    assert TOP_K <= read.experts_read <= 2 * TOP_K
    assert read.dense == engine.status().bytes.dense - 600 * HIDDEN * 4
    assert read.total == read.kv + read.experts + read.dense


def test_ballast_leaves_exactly_the_bytes_asked_for(folder: Path) -> None:
    dials = PlannerConfig(low_watermark=0.0, high_watermark=1e-9)
    engine = opened(folder, "adaptive", planner=dials)
    parts = engine._parts
    assert parts.table is not None
    cost = parts.table.cost_bytes().sum(axis=0) // parts.arena.page_bytes
    ballast = Ballast(engine)
    for bits in (6, 4, 3):
        ballast.leave(int(cost[bits - 2]))
        held = parts.table.resident_pages() + parts.pool.free_count
        assert held == cost[bits - 2]
    ballast.leave(parts.pool.num_pages)
    assert parts.table.resident_pages() + parts.pool.free_count == parts.pool.num_pages
    engine.check_integrity()
    with pytest.raises(PwError, match="weights and KV do not fit into 1 pages"):
        ballast.leave(1)
    with pytest.raises(PwError, match="the arena has"):
        ballast.leave(parts.pool.num_pages + 1)


def test_all_cells_in_one_run(folder: Path) -> None:
    told: list[str] = []
    found = run_matrix(folder, CONFIG, SMALL, told.append)
    cells = found["cells"]
    assert [(c["policy"], c["batch"]) for c in cells] == [
        (policy, batch)
        for policy in ("dense", "static:3", "adaptive:3", "held:3")
        for batch in (1, 4)
    ]
    bits = {c["policy"]: c["blocks_by_bits"] for c in cells if c["batch"] == 1}
    assert bits["held:3"] == bits["adaptive:3"] != bits["static:3"]
    for cell in cells:
        assert cell["ttft_ms"] <= cell["ttft_last_ms"]
        assert 0 < cell["itl_p50_ms"] <= cell["itl_p99_ms"]
        assert cell["over_floor"] == pytest.approx(cell["itl_p50_ms"] / cell["floor_ms"])
        assert cell["moves_in_flight"] == 0
        assert cell["bytes"]["kv"] > 0
        assert cell["tokens_per_second"] > cell["batch"] * 1e2 / cell["itl_p99_ms"]
    for row in found["adaptive_over_uniform"]:
        assert row["weight_bytes_ratio"] == pytest.approx(1, abs=0.03)
        assert row["total_bytes_ratio"] == pytest.approx(1, abs=0.01)
    assert len(found["speedups_over_dense"]) == 6
    assert sum("ready" in text for text in told) == 4
    assert [text.startswith("| policy | batch | context |") for text in told[:3]] == [0, 1, 0]
    text = report(found)
    assert "| static:3 | 4 | 48 |" in text
    steps = next(part for part in text.split("\n\n") if part.startswith("| step p50, ms (over"))
    first = found["cells"][0]
    heads, _, dense, *others = steps.splitlines()
    assert heads == "| step p50, ms (over its floor) | 1 x 48 | 4 x 48 |"
    assert dense.startswith(f"| dense | {first['itl_p50_ms']:.2f} ({first['over_floor']:.2f}) | ")
    assert len(others) == 3
    assert "| step over uniform widths | 1 x 48 | 4 x 48 |" in text
    assert "Prompts in steps of up to 512 tokens." in text
    assert [row["policy"] for row in found["starts"]] == [
        "dense",
        "static:3",
        "adaptive:3",
        "held:3",
    ]
    assert "computed, after: dense " in text


def test_what_does_not_fit_is_said_and_the_rest_is_measured(folder: Path) -> None:
    matrix = replace(SMALL, policies=("static:3",), contexts=(48, 300), prompt_tokens=1)
    longest = 300 + matrix.tokens
    roomy = opened(folder, "static:3", max_model_len=longest)
    sizes, page = roomy.status().bytes, roomy.status().page_bytes
    room = page * roomy.pages_for_tokens(longest) * 3 // 2
    tight = replace(CONFIG, memory_budget=sizes.total - sizes.free + room)
    found = run_matrix(folder, tight, matrix)
    left_out = {(c["batch"], c["context"]): c.get("left_out") for c in found["cells"]}
    assert left_out[1, 48] is None
    assert "contexts do not fit at a time" in str(left_out[4, 300])
    assert all(cell.get("ttft_ms") is None for cell in found["cells"])
    assert "at a time (raise --memory-budget, or lower --batch-size or --con" in report(found)
    nothing = run_matrix(folder, replace(CONFIG, memory_budget=1 << 20), matrix)
    (cell,) = nothing["cells"]
    assert "is too small" in cell["left_out"]
    lower = "lower --max-num-batched-tokens and --batch-size"  # which sets the sequences here
    assert cell["hint"] == f"raise --memory-budget, or {lower}"


def test_cells_that_come_too_late_are_named(folder: Path) -> None:
    found = run_matrix(folder, CONFIG, replace(SMALL, seconds=0.0))
    assert {cell["policy"] for cell in found["cells"]} == set(SMALL.policies)
    assert {cell["left_out"] for cell in found["cells"]} == {"no time left"}


def test_adaptive_policies_share_an_engine_widest_first(folder: Path) -> None:
    policies = ("adaptive:2", "dense", "adaptive:4")
    told: list[str] = []
    matrix = replace(SMALL, policies=policies, batches=(1,), steps=1, prompt_tokens=1)
    found = run_matrix(folder, CONFIG, matrix, told.append)
    assert [cell["policy"] for cell in found["cells"]] == ["adaptive:4", "adaptive:2", "dense"]
    assert sum("ready" in text for text in told) == 2
    bits = [cell["mean_bits"] for cell in found["cells"]]
    assert bits[0] > bits[1] >= 2


def test_widths_can_be_held_only_where_they_are_found() -> None:
    with pytest.raises(ConfigError, match="holds the widths of `adaptive:3`"):
        Matrix(policies=("static:3", "held:3"))


def test_a_step_is_taken_apart_by_kind_of_kernel() -> None:
    runs = [
        Run(10.0, 14.0, "experts"),
        Run(0.0, 4.0, "product(Arguments)"),
        Run(3.0, 9.0, "nvjet_tst_64x8"),  # begins beside the one before
        Run(15.0, 16.0, "rms_norm_kernel"),
        Run(16.0, 18.0, "attention"),
        Run(16.0, 17.0, "merge_kernel"),  # beside it to the end
        Run(19.0, 20.0, "Memcpy DtoH (Device -> Pinned)"),
    ]
    found = by_class(runs, 2)
    wanted = {"experts": 4, "attention": 2, "products": 9, "small": 2, "gaps": 3}
    assert found == pytest.approx({name: us / 2e3 for name, us in wanted.items()})
    read = StepBytes(dense=400, experts=100, kv=200, experts_read=1.0)
    floors = class_floors(read, 1e3)
    assert floors == {"experts": 100, "attention": 200, "products": 400, "small": 0, "gaps": 0}
    cell = {
        "policy": "static:3", "batch": 1, "context": 8, "left_out": "of the other tables",
        "kernels_ms": found, "kernels_floor_ms": floors,
    }  # fmt: skip
    text = report({"cells": [cell], "speedups_over_dense": [], "adaptive_over_uniform": []})
    assert "| static:3, 1 x 8 | 0.002 (100.000) |" in text


def test_kernels_of_two_streams_share_the_time_in_which_both_run() -> None:
    runs = [
        Run(0.0, 4.0, "attend(Arguments)", 1),
        Run(2.0, 8.0, "product(Arguments)", 1),  # waits for the one ahead of it in its stream
        Run(4.0, 12.0, "experts(Arguments)", 2),
        Run(13.0, 14.0, "sum_kernel", 1),
    ]
    found = by_class(runs, 1)
    wanted = {"attention": 4, "products": 2, "experts": 2 + 4, "gaps": 1, "small": 1}
    assert found == pytest.approx({name: us / 1e3 for name, us in wanted.items()})


def test_cells_of_more_tokens_are_not_asked_for() -> None:
    matrix = Matrix(batches=(1, 8, 64), contexts=(8192, 1024), most_tokens=65536)
    assert matrix.shapes == [(1, 1024), (8, 1024), (64, 1024), (1, 8192), (8, 8192)]


def test_ratios_of_cells() -> None:
    def cell(policy: str, speed: float, planes: int) -> dict[str, Any]:
        names = ("luts", "experts_dense", "dense", "kv", "tables", "workspace")
        sizes = dict.fromkeys(names, 10) | {"planes": planes}
        return {
            "policy": policy, "batch": 1, "context": 8, "tokens_per_second": speed,
            "itl_p50_ms": 1000 / speed, "bytes": sizes, "read_bytes": {"total": planes},
        }  # fmt: skip

    cells = [cell("dense", 10, 0), cell("static:3", 20, 40), cell("adaptive:3", 16, 30)]
    assert [row["speedup"] for row in speedups(cells)] == [2.0, 1.6]
    (row,) = at_equal_bytes([*cells, {"policy": "static:4", "left_out": "no room"}])
    assert row["step_ratio"] == pytest.approx(1.25)
    assert row["weight_bytes_ratio"] == pytest.approx(0.8)
    assert row["total_bytes_ratio"] == pytest.approx(0.9)
    assert row["read_bytes_ratio"] == pytest.approx(0.75)


def test_longest_contexts_are_served_and_what_does_not_fit_is_named(folder: Path) -> None:
    tight = replace(CONFIG, memory_budget=7 << 19, max_num_batched_tokens=32)
    found = longest_contexts(folder, tight, ("adaptive", "static:8", "dense"))
    rows = {row["policy"]: row for row in found}
    assert rows["adaptive"]["served"] is True
    assert rows["adaptive"]["bytes_over_budget"] == 0
    assert rows["adaptive"]["context"] > rows["static:8"]["context"]
    assert all("left_out" in row or row["served"] for row in found)


@pytest.mark.parametrize("text", ["adaptive", "static:x", "replay:a", "adaptive:9", "static:1"])
def test_what_is_no_policy_of_the_comparison_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_policy(text)


def test_a_width_is_refused_by_the_name_that_was_given() -> None:
    with pytest.raises(ConfigError, match=r"^adaptive width must be 2 to 8: `adaptive:1`$"):
        parse_policy("adaptive:1")


@pytest.mark.parametrize("policies", [("static:3", "static:7", "dense"), ("static:7", "static:3")])
def test_widths_that_the_artifact_does_not_have_are_left_out(
    tiny: Path, policies: tuple[str, ...]
) -> None:
    matrix = replace(SMALL, policies=(*policies, "adaptive:7", "held:7"), batches=(1,))
    config = replace(CONFIG, load_format="auto")
    found = run_matrix(tiny, config, replace(matrix, contexts=(8,), prompt_tokens=1))
    assert "failed" not in found
    cells = {cell["policy"]: cell.get("left_out") for cell in found["cells"]}
    wanted = {policy: None for policy in policies if policy != "static:7"}
    for policy in ("static:7", "adaptive:7", "held:7"):
        wanted[policy] = f"policy `{policy}` is not to be had: the artifact has 2 to 4 bits"
    assert cells == wanted


def test_engines_have_room_for_the_contexts_that_are_measured_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, asked = Engine.from_artifact, list[int | None]()

    def opening(path: Path, config: EngineConfig) -> Engine:
        asked.append(config.max_model_len)
        return opens(path, config)

    monkeypatch.setattr(Engine, "from_artifact", opening)
    small = replace(SMALL, policies=("static:3",), batches=(1,), contexts=(64, 5000))
    run_matrix(folder, CONFIG, small)
    assert asked == [64 + small.tokens]
    assert small.possible(Limits.of(folder, "dummy")) == (64,)


def test_longest_contexts_of_policies_that_cannot_be_cost_no_other_row(tiny: Path) -> None:
    config = replace(CONFIG, load_format="auto", max_num_batched_tokens=32, max_model_len=64)
    missing, served = longest_contexts(tiny, config, ("static:7", "static:3"))
    assert (missing["context"], missing["left_out"]) == (
        0,
        "bits 7 to 7 are asked for, the artifact has 2 to 4",
    )
    assert served["served"]


def test_a_comparison_of_no_width_that_the_artifact_has_is_refused(tiny: Path) -> None:
    config, told = replace(CONFIG, load_format="auto"), list[str]()
    with pytest.raises(ConfigError, match="`static:7` is not to be had") as refused:
        run_matrix(tiny, config, replace(SMALL, policies=("static:7",)), told.append)
    assert "--max-bits 7" in refused.value.hint
    assert told == []  # once is enough


def test_an_engine_that_a_setting_forbids_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unquantized experts need a checkpoint, which others do not."""
    opens = Engine.from_artifact

    def opening(path: Path, config: EngineConfig) -> Engine:
        if config.policy.kind == "dense":
            raise ConfigError("no checkpoint", "name it")
        return opens(path, config)

    monkeypatch.setattr(Engine, "from_artifact", opening)
    small = replace(SMALL, policies=("dense", "static:3"), batches=(1,))
    found = run_matrix(folder, CONFIG, small)
    assert [cell.get("left_out") for cell in found["cells"]] == ["no checkpoint", None]
    with pytest.raises(ConfigError, match="no checkpoint"):
        run_matrix(folder, CONFIG, replace(small, policies=("dense",)))


def test_contexts_beyond_the_model_are_left_out(folder: Path) -> None:
    """The model states 512 tokens, 3 steps make 55: 457 are left."""
    small = replace(SMALL, policies=("static:3",), batches=(1,), prompt_tokens=1)
    found = run_matrix(folder, CONFIG, replace(small, contexts=(457, 8192, 458)))
    left_out = {cell["context"]: cell.get("left_out") for cell in found["cells"]}
    assert left_out[457] is None
    assert left_out[458] == (
        "--context 458 and the 55 tokens that --steps 3 makes behind it are more than the 512 "
        "tokens that the model states"
    )
    assert str(left_out[8192]).startswith("--context 8192 and")


@pytest.mark.parametrize(
    ("context", "steps", "hint"),
    [
        (458, 3, "ask for --context 457 at most, or --steps 2 at most"),
        (48, 9000, "ask for --steps 330 at most"),
        (512, 3, "ask for --context 457 at most"),
        (512, 9000, "lower --context and --steps"),
    ],
)
def test_a_comparison_of_no_context_that_the_model_has_is_refused(
    folder: Path, context: int, steps: int, hint: str
) -> None:
    matrix = replace(SMALL, contexts=(context, 8192), steps=steps)
    with pytest.raises(ConfigError, match=f"^--context {context} and .* --steps {steps} ") as found:
        run_matrix(folder, CONFIG, matrix)
    assert found.value.hint == hint
    limits = Limits.of(folder, "dummy")
    if "--steps" in hint and "lower" not in hint:
        most = int(hint.split("--steps ")[1].split()[0])
        replace(matrix, steps=most).check(limits, CONFIG)
        with pytest.raises(ConfigError):
            replace(matrix, steps=most + 1).check(limits, CONFIG)


def test_the_hint_names_every_kind_of_policy() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_policy("replay:a")
    for text in refused.value.hint.removeprefix("use ").split(", "):
        parse_policy(text)
    assert {"dense", "static:3", "adaptive:3", "held:3"} <= set(
        refused.value.hint.removeprefix("use ").split(", ")
    )


def test_generate_of_transformers_is_timed_token_by_token(folder: Path) -> None:
    rows = transformers_generate(folder, torch.device("cpu"), (12,), ("sdpa", "eager"), tokens=5)
    assert [row["attention"] for row in rows] == ["sdpa", "eager"]
    for row in rows:
        assert 0 < row["itl_p50_ms"] <= row["itl_p99_ms"]
        assert row["tokens_per_second"] > 1
        assert row["ttft_ms"] > 0


def test_a_copy_moves_bytes() -> None:
    assert 1e8 < copy_bandwidth(torch.device("cpu")) < 1e12
