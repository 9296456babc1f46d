"""The comparison of policies: equal bytes, counted floors, contexts that nobody computes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.config import EngineConfig, PlannerConfig, PrecisionPolicy
from pw.engine import Engine
from pw.errors import ConfigError, EngineLostError, PwError
from pw.evaluation.bench.filling import Ballast, fill
from pw.evaluation.bench.floor import StepBytes, copy_bandwidth, step_bytes
from pw.evaluation.bench.longest import longest_contexts
from pw.evaluation.bench.matrix import Matrix, parse_policy, run_matrix
from pw.evaluation.bench.peers import transformers_generate
from pw.evaluation.bench.profile import Run, by_class, class_floors
from pw.evaluation.bench.tables import at_equal_bytes, report, speedups
from pw.models.stand_in import write_folder

LAYERS, HIDDEN, INNER, EXPERTS, TOP_K, HEADS = 2, 64, 48, 6, 2, 2
CONFIG = EngineConfig(memory_budget=48 << 20, device="cpu", load_format="dummy", max_num_seqs=4)
SMALL = Matrix(
    policies=("dense", "held:3", "static:3", "adaptive:3"),
    batches=(1, 4),
    contexts=(48,),
    steps=3,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("matrix")
    settings = {
        "model_type": "qwen2_moe", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": 600,
        "intermediate_size": 64, "num_experts": EXPERTS, "moe_intermediate_size": INNER,
        "num_experts_per_tok": TOP_K, "shared_expert_intermediate_size": 64,
        "max_position_embeddings": 512, "norm_topk_prob": False,
    }  # fmt: skip
    (root / "small.json").write_text(json.dumps(settings))
    write_folder(root / "small.json", root / "model", {})
    return root / "model"


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
    text = report(found)
    assert "| static:3 | 4 | 48 |" in text
    assert "adaptive over uniform" in text


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
    assert "do not fit at a time" in report(found)
    nothing = run_matrix(folder, replace(CONFIG, memory_budget=1 << 20), matrix)
    assert "is too small" in nothing["cells"][0]["left_out"]


def test_cells_that_come_too_late_are_named(folder: Path) -> None:
    found = run_matrix(folder, CONFIG, replace(SMALL, seconds=0.0))
    assert {cell["policy"] for cell in found["cells"]} == set(SMALL.policies)
    assert {cell["left_out"] for cell in found["cells"]} == {"no time left"}


TWO = replace(SMALL, policies=("static:3", "dense"))
FAULT = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each engine that was closed was lost."""
    found: list[bool] = []
    close = Engine.close

    def closing(engine: Engine, *, lost: bool = False) -> None:
        found.append(lost)
        close(engine, lost=lost)

    monkeypatch.setattr(Engine, "close", closing)
    return found


def breaking(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let the contexts of one cell break with an error once they are there."""
    calls = itertools.count(1)

    def filling(engine: Engine, prompts: list[list[int]], tokens: int) -> list[str]:
        names = fill(engine, prompts, tokens)
        if next(calls) == number:
            raise error
        return names

    monkeypatch.setattr("pw.evaluation.bench.matrix.fill", filling)


def names_of(found: dict[str, Any], *, measured: bool) -> list[tuple[str, int]]:
    cells = [cell for cell in found["cells"] if ("left_out" not in cell) is measured]
    return [(cell["policy"], cell["batch"]) for cell in cells]


def test_an_interrupted_run_keeps_what_it_has(
    folder: Path, closed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, 2, KeyboardInterrupt())
    found = run_matrix(folder, CONFIG, TWO)
    assert found["interrupted"] is True
    assert [(cell["policy"], cell["batch"]) for cell in found["cells"]] == [("static:3", 1)]
    assert closed == [False]
    assert "| static:3 | 1 | 48 |" in report(found)


def test_an_interrupt_while_an_engine_ends_keeps_the_cells(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(engine: Engine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pw.evaluation.bench.faults.end", end)
    breaking(monkeypatch, 2, KeyboardInterrupt())
    found = run_matrix(folder, CONFIG, TWO)
    assert found["interrupted"] is True
    assert names_of(found, measured=True) == [("static:3", 1)]


@pytest.mark.parametrize(
    "error", [ValueError("odd\nmore"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_cell_that_breaks_is_left_out_and_the_rest_is_measured(
    folder: Path, closed: list[bool], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    breaking(monkeypatch, 1, error)
    found = run_matrix(folder, CONFIG, TWO)
    assert names_of(found, measured=True) == [("static:3", 4), ("dense", 1), ("dense", 4)]
    text = str(error).partition("\n")[0]
    assert found["cells"][0]["left_out"] == f"{type(error).__name__}: {text}"
    assert (found["interrupted"], "failed" in found) == (False, False)
    assert closed == [False, False]


def gone(engine: Engine, name: str) -> None:
    engine.abort(name)


def spoilt(engine: Engine, name: str) -> None:
    parts = engine._parts
    pages = parts.kv.pages_of(engine._sequences[name].kv)
    parts.arena.as_dtype(parts.skeleton.dtype)[pages] = math.nan


@pytest.mark.parametrize(
    ("end", "reason"),
    [(gone, "3 of 4 sequences got a token in a step"), (spoilt, "a request of the benchmark fail")],
)
def test_a_cell_is_left_out_where_a_sequence_does_not_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Engine, str], None], reason: str
) -> None:
    """Steps of those that are left would be taken for steps of all."""

    def filling(engine: Engine, prompts: list[list[int]], tokens: int) -> list[str]:
        names = fill(engine, prompts, tokens)
        if len(names) == 4:
            end(engine, names[1])
        return names

    monkeypatch.setattr("pw.evaluation.bench.matrix.fill", filling)
    found = run_matrix(folder, CONFIG, TWO)
    assert names_of(found, measured=True) == [("static:3", 1), ("dense", 1)]
    assert {reason in cell["left_out"] for cell in found["cells"] if cell["batch"] == 4} == {True}


@pytest.mark.parametrize("error", [FAULT, torch.AcceleratorError("gone"), EngineLostError("gone")])
def test_a_lost_device_ends_the_run_and_the_cells_are_kept(
    folder: Path, closed: list[bool], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    breaking(monkeypatch, 2, error)
    found = run_matrix(folder, CONFIG, TWO)
    assert names_of(found, measured=True) == [("static:3", 1)]
    assert names_of(found, measured=False) == [("static:3", 4)]
    assert found["failed"] == found["cells"][1]["left_out"] == f"{type(error).__name__}: {error}"
    assert closed == [True]


def test_a_lost_device_is_raised_where_nothing_was_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, 1, FAULT)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_matrix(folder, CONFIG, TWO)


def test_an_engine_that_gets_no_memory_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = Engine.from_artifact

    def opening(path: Path, config: EngineConfig) -> Engine:
        if config.policy.kind == "static":
            raise torch.OutOfMemoryError("no room")
        return opens(path, config)

    monkeypatch.setattr(Engine, "from_artifact", opening)
    found = run_matrix(folder, CONFIG, TWO)
    assert found["cells"][0] == {"policy": "static:3", "left_out": "OutOfMemoryError: no room"}
    assert names_of({"cells": found["cells"][1:]}, measured=True) == [("dense", 1), ("dense", 4)]


@pytest.mark.parametrize("error", [PwError("no room"), ValueError("no room")])
def test_widths_are_held_only_of_cells_that_were_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    breaking(monkeypatch, 2, error)
    policies = ("adaptive:4", "adaptive:3", "adaptive:2", "held:3")
    found = run_matrix(folder, CONFIG, replace(SMALL, policies=policies, batches=(1,)))
    assert names_of(found, measured=True) == [("adaptive:4", 1), ("adaptive:2", 1)]
    left_out = {cell["policy"]: cell.get("left_out") for cell in found["cells"]}
    assert str(left_out["adaptive:3"]).endswith("no room")
    assert left_out["held:3"] == "no cell of adaptive:3 was measured"


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
