"""`pw bench` as a user meets it, on random weights in the shape of a small config."""

from __future__ import annotations

import csv
import io
import itertools
import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pw.cli.bench_options import Client
from pw.evaluation.bench.filling import fill
from pw.evaluation.bench.tables import report
from support.cli import Outcome, run

SETTINGS = {
    "model_type": "qwen2_moe", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 600, "intermediate_size": 64, "num_experts": 6,
    "moe_intermediate_size": 48, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 512, "norm_topk_prob": False,
}  # fmt: skip
DUMMY = ("--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 2}', "--device", "cpu")
SMALL = ("--memory-budget", "48MiB", "--max-num-batched-tokens", "64", "--max-num-seqs", "8")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PW_HOME", str(tmp_path / "home"))
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SETTINGS))
    return str(path)


def figures(done: Outcome) -> dict[str, object]:
    assert done.code == 0, done.err
    found: dict[str, object] = json.loads(done.out)
    return found


def test_throughput_of_dummy_weights(config: str, tmp_path: Path) -> None:
    load = ("--num-prompts", "6", "--input-len", "20", "--output-len", "5", "--ignore-eos")
    saved = ("--save-result", "--result-dir", str(tmp_path / "results"))
    done = run("bench", "throughput", config, *DUMMY, *SMALL, *load, *saved)
    assert "throughput: 6 requests in " in done.err
    found = figures(run("bench", "throughput", config, *DUMMY, *SMALL, *load, "--json"))
    assert (found["completed"], found["failed"]) == (6, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (120, 30)
    assert found["mean_bits"] == 8
    assert found["total_cached_tokens"] == 0
    (kept,) = (tmp_path / "results").iterdir()
    assert json.loads(kept.read_text())["total_output_tokens"] == 30


@pytest.mark.parametrize("policy", ["static:3", "dense"])
def test_latency_of_dummy_weights_under_every_policy(config: str, policy: str) -> None:
    load = ("-p", "16", "-n", "4", "-r", "3", "--batch-size", "2", "--precision-policy", policy)
    done = run("bench", "latency", config, *DUMMY, *SMALL, *load, "-o", "csv", "-q")
    assert done.code == 0, done.err
    (row,) = csv.DictReader(io.StringIO(done.out))
    assert row["policy"] == policy
    assert float(row["mean_bits"]) == (3 if policy == "static:3" else 16)
    assert 0 < float(row["mean_ttft_ms"]) < float(row["p50_latency_ms"]) * 2
    assert float(row["p50_tpot_ms"]) > 0


def test_a_matrix_of_policies_beside_transformers(config: str, tmp_path: Path) -> None:
    cells = ("--policy", "dense", "--policy", "static:3", "--batch-size", "2", "--context", "24")
    cells += ("--policy", "static:3", "--batch-size", "2")  # said twice, measured once
    others = ("--transformers", "--longest-within", "8MiB", "--steps", "3", "-q")
    saved = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "matrix.json")
    done = run("bench", "matrix", config, *DUMMY, *SMALL[:4], *cells, *others, *saved)
    assert done.code == 0, done.err
    assert "| static:3 | 2 | 24 |" in done.out
    assert "| sdpa, grouped_mm | 24 |" in done.out
    kept = json.loads((tmp_path / "matrix.json").read_text())
    assert [cell["policy"] for cell in kept["cells"]] == ["dense", "static:3"]
    assert {row["policy"] for row in kept["longest_contexts"]} == {"adaptive", "dense", "static:3"}
    assert kept["machine"]["torch"]


def test_a_matrix_for_a_spreadsheet_has_a_row_for_each_cell(config: str, tmp_path: Path) -> None:
    cells = ("--policy", "dense", "--policy", "static:3", "--batch-size", "2", "--context", "24")
    more = ("--context", "9000", "--transformers", "--longest-within", "8MiB", "--steps", "3")
    table, file = tmp_path / "made" / "matrix.csv", ("--output", str(tmp_path / "made/matrix.csv"))
    done = run("bench", "matrix", config, *DUMMY, *SMALL[:4], *cells, *more, *file, "-q")
    assert (done.code, done.out) == (0, ""), done.err
    rows = list(csv.DictReader(io.StringIO(table.read_text("utf-8"))))
    measured = [(row["policy"], row["batch"], row["context"]) for row in rows if row["itl_p50_ms"]]
    assert measured == [
        ("dense", "2", "24"),
        ("static:3", "2", "24"),
        ("transformers, sdpa", "1", "24"),
        ("transformers, eager", "1", "24"),
    ]
    assert {row["model"] for row in rows} == {config}
    assert [row["max_num_batched_tokens"] for row in rows if row["mean_bits"]] == ["64", "64"]
    assert [row["hint"] for row in rows if row["context"] == "9000"] == [
        "ask for --context 457 at most"
    ] * 2
    assert sum(bool(row["longest_context"]) for row in rows) == 3
    assert not any("{" in value for row in rows for value in row.values())


def broken_matrix(config: str, tmp_path: Path) -> tuple[Outcome, dict[str, Any]]:
    """A matrix of two cells in which something breaks: what a user gets, and the record."""
    cells = ("--policy", "static:3", "--batch-size", "1", "--batch-size", "2", "--context", "24")
    more = ("--steps", "3", "--longest-within", "8MiB", "-q")
    saved = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "kept.json")
    done = run("bench", "matrix", config, *DUMMY, *SMALL[:4], *cells, *more, *saved)
    return done, json.loads((tmp_path / "kept.json").read_text())


def broken_from(number: int, error: BaseException) -> Callable[..., Any]:
    """The filling of contexts, which breaks in a cell."""
    calls = itertools.count(1)

    def filling(*arguments: Any) -> Any:
        if next(calls) == number:
            raise error
        return fill(*arguments)

    return filling


@pytest.mark.parametrize(
    ("error", "code", "interrupted"),
    [(KeyboardInterrupt(), 130, True), (RuntimeError("CUDA error: gone"), 1, False)],
)
def test_a_matrix_that_is_cut_short_shows_and_saves_what_it_has(
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    interrupted: bool,
) -> None:
    monkeypatch.setattr("pw.evaluation.bench.matrix.fill", broken_from(2, error))
    done, kept = broken_matrix(config, tmp_path)
    assert done.code == code
    assert "| static:3 | 1 | 24 |" in done.out
    assert kept["interrupted"] is interrupted
    assert [cell["batch"] for cell in kept["cells"] if "left_out" not in cell] == [1]
    assert "longest_contexts" not in kept
    word = "Interrupted" if interrupted else "Failed"
    assert f"\n\n{word}: 1 cell measured, the rest is missing" in done.out


def test_a_matrix_without_a_measured_cell_fails(config: str) -> None:
    cells = ("--policy", "static:3", "--batch-size", "1", "--context", "24", "--seconds", "0")
    done = run("bench", "matrix", config, *DUMMY, *SMALL[:4], *cells, "-q")
    assert done.code == 1
    assert "no time left (raise --seconds)" in done.out
    assert done.err.splitlines() == ["no cell was measured"]


def test_a_context_that_the_model_does_not_have_is_refused_before_transformers(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*_: Any) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr("pw.evaluation.bench.peers.transformers_generate", generate)
    done = run("bench", "matrix", config, *DUMMY, "--transformers", "--context", "512")
    assert (done.code, done.out) == (2, "")
    assert "--context 512 and the 177 tokens that --steps 100 makes" in done.err.splitlines()[0]
    assert "--context 335 at most" in done.err


def test_a_second_interrupt_does_not_lose_the_record(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reporting(result: dict[str, Any]) -> str:
        signal.raise_signal(signal.SIGINT)
        return report(result)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("pw.evaluation.bench.tables.report", reporting)
    monkeypatch.setattr("pw.evaluation.bench.matrix.fill", broken_from(2, KeyboardInterrupt()))
    done, kept = broken_matrix(config, tmp_path)
    assert (done.code, len(kept["cells"])) == (130, 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_in_the_longest_contexts_keeps_the_cells(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def longest(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pw.evaluation.bench.longest.longest_contexts", longest)
    done, kept = broken_matrix(config, tmp_path)
    assert (done.code, kept["interrupted"], len(kept["cells"])) == (130, True, 2)


def test_squeeze_of_dummy_weights_finds_its_own_budget(config: str) -> None:
    flags = ("--cycles", "2", "--probes", "2", "--steady-steps", "4", "--max-model-len", "256")
    limits = ("--max-num-batched-tokens", "64", "--max-num-seqs", "6")
    found = figures(run("bench", "squeeze", config, *DUMMY, *limits, *flags, "--json", "-q"))
    assert found["bytes_over_budget"] == found["pages_leaked"] == 0
    assert found["cycles_without_return"] == 0
    assert found["equal_before_and_after"] is True
    assert float(str(found["lowest_bits"])) < float(str(found["most_bits"])) == 8


def test_generate_speaks_numbers_and_a_changed_config_is_another_folder(
    config: str, tmp_path: Path
) -> None:
    flags = (*SMALL, "--max-tokens", "4", "--ignore-eos", "--json", "-q")
    first = figures(run("generate", config, "hello", *DUMMY, *flags))
    assert first["completion_tokens"] == 4
    assert first == figures(run("generate", config, "hello", *DUMMY, *flags))
    assert run("generate", config, "hello", "--load-format", "dummy", *flags).code == 0
    assert len(list((tmp_path / "home" / "dummy").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("throughput", "CONFIG", *DUMMY, "--dataset-name", "web"), "unknown dataset: `web`"),
        (("throughput", "nothing.json", *DUMMY), "no model config: `nothing.json`"),
        (("latency", "CONFIG", *DUMMY, "-o", "xml"), "unknown output form: `xml`"),
        (("latency", "CONFIG", *DUMMY, "--metric-percentiles", "50,x"), "not a list of percen"),
        (("latency", "CONFIG", *DUMMY, "--batch-size", "0"), "must be at least 1"),
        (("matrix", "CONFIG", *DUMMY, "--policy", "replay:x"), "not a policy of the comparison"),
        (("matrix", "CONFIG", *DUMMY, "-tp", "2"), "filled on one device: --tensor-parallel-s"),
        (("matrix", "CONFIG", *DUMMY, "--steps", "0"), "--steps must be at least 1: 0"),
        (("matrix", "CONFIG", *DUMMY, "--batch-size", "4", "--batch-size", "0"),
         "--batch-size must be at least 1: 0"),
        (("matrix", "CONFIG", *DUMMY, "--context", "-5"), "--context must be at least 1: -5"),
        (("matrix", "CONFIG", *DUMMY, "--prompt-tokens", "0"), "--prompt-tokens must be at le"),
        (("matrix", "CONFIG", *DUMMY, "--most-tokens", "0"), "--most-tokens must be at least"),
        (("matrix", "CONFIG", *DUMMY, "--max-model-len", "4096"),
         "--max-model-len changes no cell of the comparison: 4096"),
        *(
            (("matrix", "CONFIG", *DUMMY, flag, value), f"{flag} changes no cell of the comparison")
            for flag, value in (
                ("--precision-policy", "static:3"), ("--max-num-seqs", "8"), ("--seed", "1"),
                ("--forecast-steps", "4"), ("--high-watermark", "0.2"),
                ("--metric-percentiles", "50"),
            )
        ),
        (("latency", "CONFIG", *DUMMY, "--batch-size", "100"), "more than the 64 sequences that r"),
        (("latency", "CONFIG", *DUMMY, "-o", "figures.xml"), "unknown output form: `figures.xml`"),
        (("matrix", "tiny", "--transformers"), "--transformers needs --load-format dummy"),
        (("squeeze", "CONFIG", *DUMMY, "--precision-policy", "static:3"), "only adaptive"),
        (("squeeze", "CONFIG", *DUMMY, "--memory-budget", "48MiB"), "beside the widest experts"),
        (("latency", "CONFIG", "--hf-overrides", "{}"), "is for --load-format dummy alone"),
        (("latency", "CONFIG", "--load-format", "dummy", "--hf-overrides", "{"), "is not JSON"),
        (("latency", "CONFIG", "--load-format", "dummy", "--hf-overrides", '{"a": 1}'),
         "the config has no `a`"),
        (("latency", "CONFIG", "--load-format", "gguf"), "load_format must be auto or dummy"),
        (("latency", "CONFIG", *DUMMY, "-o", "md", "--output-json", "figures.json"),
         "two outputs: `md` and `figures.json`"),
        (("serve", "--goodput", "ttft"), "not a goodput limit: `ttft`"),
        (("serve", "--backend", "grpc"), "unknown backend: `grpc`"),
        (("serve", "--endpoint", "/generate"), "unknown endpoint: `/generate`"),
        (("serve", "--percentile-metrics", "x"), "unknown metric: `x`"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(
    config: str, arguments: tuple[str, ...], message: str
) -> None:
    done = run("bench", *(config if part == "CONFIG" else part for part in arguments))
    assert done.code != 0
    assert done.out == ""
    assert message in done.err.splitlines()[0]


def test_a_server_that_is_not_there_is_told_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    done = run("bench", "serve", "--port", str(port), "--num-prompts", "1")
    assert done.code == 1
    assert f"no model at http://127.0.0.1:{port}" in done.err
    assert "pw serve MODEL" in done.err


def test_bench_without_a_command_compares() -> None:
    done = run("bench", "--help")
    assert all(name in done.out for name in ("throughput", "latency", "serve", "squeeze", "matrix"))
    alone = run("bench", "nowhere/at-all.pw")
    assert alone.code != 0
    assert "nowhere/at-all.pw" in alone.err


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, "/v1/completions"),
        ({"backend": "vllm"}, "/v1/completions"),
        ({"backend": "openai-chat"}, "/v1/chat/completions"),
        ({"backend": "vllm", "endpoint": "/v1/chat/completions"}, "/v1/chat/completions"),
    ],
)
def test_a_server_is_asked_where_users_of_other_benchmarks_say(
    given: dict[str, str], asked: str
) -> None:
    assert Client(**given).asked() == asked  # type: ignore[arg-type]
