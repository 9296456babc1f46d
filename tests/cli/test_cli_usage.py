"""Exit codes and messages of what users get wrong, through the real runner."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pw import __version__
from pw.cli import app, locate
from pw.cli.options import Planner, Runtime
from pw.errors import ModelError
from support.cli import run
from support.patience import PATIENCE

COMMANDS = [
    *("calibrate", "quantize", "sensitivity", "trace", "tune", "fit-residuals", "run"),
    *("serve", "generate", "eval", "bench", "inspect", "export", "env"),
]


def test_version() -> None:
    assert run("--version") == (0, f"pw {__version__}\n", "")


def test_no_command_shows_the_help_in_the_order_of_the_work() -> None:
    done = run()
    assert done.code == 0
    lines = [line.strip("│ ").split(" ")[0] for line in done.out.splitlines()]
    assert [word for word in lines if word in COMMANDS] == COMMANDS
    for panel in ("Make an artifact", "Run a model", "Measure", "Look"):
        assert panel in done.out


BENCHES = [f"bench {name}" for name in ("throughput", "latency", "serve", "squeeze", "compare")]


@pytest.mark.parametrize("command", [*COMMANDS, *BENCHES])
def test_every_command_has_help_and_the_common_flags(command: str) -> None:
    done = run(*command.split(), "-h")
    if command == "bench":
        assert all(name.split()[1] in done.out for name in BENCHES)
        return
    assert done.code == 0
    for flag in ("--quiet", "--verbose", "--json"):
        assert flag in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "error", "hint"),
    [
        ("srve", 2, "no such command `srve`", "did you mean `serve`?"),
        ("inspekt x", 2, "no such command `inspekt`", "did you mean `inspect`?"),
        ("xyzzy", 2, "no such command `xyzzy`", "see `pw --help`"),
        ("serve", 2, "missing argument `MODEL`", "see `pw serve --help`"),
        (
            "serve x --max-modle-len 3",
            2,
            "no such option: --max-modle-len",
            "`--max-model-len`",
        ),
        ("quantize tiny --workers 0", 2, "--workers must be at least 1: 0", ""),
        ("serve x --xyzzy", 2, "no such option: --xyzzy", "see `pw serve --help`"),
        ("serve x --hepl", 2, "no such option: --hepl", "see `pw serve --help`"),
        ("serve x --pipeline-parallel-size 2", 2, "no such option: --pipel", "--tensor-parallel"),
        ("serve x --quantization awq", 2, "no such option: --quant", "an artifact says how"),
        ("calibrate x --tensor-parallel-size 2", 2, "no such option: --tensor", "torchrun"),
        ("serve x --data_parallel_size=2", 2, "no such option: --data", "several servers"),
        ("serve x --trust-remote-code", 2, "no such option: --trust", "never run here"),
        ("serve --model x", 2, "no such option: --model", "MODEL comes first"),
        ("serve x --max-num-queued-tokens 0", 2, "--max-num-queued-tokens must be positive: 0", ""),
        ("serve x --config none.yaml", 2, "cannot read `none.yaml`", "see `pw serve --help`"),
        (
            "bench matrix x --batch-size 1,4",
            2,
            "invalid value for `--batch-size`",
            "repeat `--batc",
        ),
        ("serve x --port many", 2, "invalid value for `--port`", "see `pw serve --help`"),
        ("serve x --port", 2, "option `--port` requires an argument", "see `pw --help`"),
        ("serve x --memory-budget 3x", 2, "not a size in bytes: `3x`", "`24MiB`"),
        (
            "serve x --memory-budget 3MB --gpu-memory-utilization 0.5",
            2,
            "--memory-budget and --gpu-memory-utilization exclude each other: 3MB, 0.5",
            "give one of them",
        ),
        ("serve x --gpu-memory-utilization 1.5", 2, "must be in (0, 1]: 1.5", ""),
        ("serve x --precision-policy static:9", 2, "static width must be 2 to 8", "`pw inspect`"),
        ("serve x --memory-budget 24", 2, "--memory-budget is in bytes", "did you mean `24GiB`?"),
        ("eval x --memory-budget 1.5", 2, "and so few hold nothing: `1.5`", "`1.5GiB`"),
        ("eval x --policies adaptive --memory-budgets static:3,9", 2, "nothing: `9`", "`9GiB`"),
        ("serve x --offload-cpu-memory 8", 2, "--offload-cpu-memory is in bytes", "`8GiB`"),
        ("serve x --transfer-budget 2", 2, "--transfer-budget is in bytes", "`2GiB`"),
        ("serve x --precision-policy magic", 2, "unknown precision policy: `magic`", "adaptive"),
        ("serve x --max-model-len 3q", 2, "--max-model-len must be tokens", ""),
        ("serve x --low-watermark 0.5 --high-watermark 0.2", 2, "low 0.5, high 0.2", ""),
        ("serve x --device tpu", 2, "device must be auto, cpu or cuda: `tpu`", ""),
        ("serve x --page-bytes 3KiB", 2, "page_bytes must be a power of two from 4096: 3072", ""),
        ("serve x --page-bytes 2KiB", 2, "page_bytes must be a power of two from 4096: 2048", ""),
        ("serve x --routing-window 0", 2, "routing_window must be at least 1 token: 0", ""),
        ("serve x --dwell-steps -5", 2, "must not be negative: -5, 8", ""),
        ("serve x --forecast-steps -5", 2, "must not be negative: 16, -5", ""),
        ("serve x --hot-expert-floor 99", 2, "hot_expert_floor must be 2 to 8 bits: 99", ""),
        ("serve x --layer-floor 9", 2, "layer_floor must be 0 to 8 bits: 9.0", ""),
        ("serve x --layer-floor nan", 2, "layer_floor must be 0 to 8 bits: nan", ""),
        ("serve x --max-num-queued-reqs -1", 2, "max_num_queued_reqs must not be negative: -1", ""),
        ("serve x --memory-budget 99999999999GiB", 2, "not a size in bytes: `99999999999GiB`", ""),
        ("serve x --memory-budget inf", 2, "not a size in bytes: `inf`", ""),
        ("serve x --planner best", 2, "planner must be hull or greedy: `best`", ""),
        ("generate x hi --temperature 3", 2, "temperature must be between 0 and 2: 3.0", ""),
        ("calibrate tiny --max-bits many", 2, "--max-bits must be a number or auto: `many`", ""),
        ("calibrate tiny --max-bits 9", 2, "max_bits must be between min_bits (2) and 8: 9", ""),
        ("calibrate tiny --nsamples 0", 2, "nsamples must be at least 1: 0", ""),
        ("quantize tiny --min-bits 5", 2, "min_bits must be 2 or 3: 5", ""),
        ("bench serve --seed -1", 2, "--seed of random prompts must not be negative: -1", ""),
        (
            "bench serve --save-result --result-dir /dev/null/x",
            2,
            "cannot write --result-dir `/dev/null/x`: Not a directory",
            "name another folder",
        ),
        ("trace x --seed -1", 2, "seed must be between 0 and 2^63 - 1: -1", ""),
        ("inspect /", 3, "not an artifact, it has no manifest.json: `/`", "pw calibrate"),
    ],
)
def test_wrong_usage_is_one_line_and_a_hint(
    arguments: str, code: int, error: str, hint: str
) -> None:
    done = run(*arguments.split())
    assert done.code == code
    first, *rest = done.err.splitlines()
    assert first.startswith("error: ")
    assert error in first
    assert hint in "".join(rest)
    assert len(rest) <= 1
    assert all(line.startswith("hint: ") for line in rest)
    assert done.out == ""


@pytest.mark.parametrize("command", ["serve", "generate", "eval", "inspect", "fit-residuals"])
def test_what_is_no_artifact_is_refused_with_the_line_to_run(command: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "Mixtral-8x7B-v0.1"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    tail = {"generate": ("hi",), "serve": ("--port", "0")}.get(command, ())

    done = run(command, str(checkpoint), *tail)
    assert done.code == 3
    assert done.err.startswith(
        f"error: not an artifact but an unquantized checkpoint: `{checkpoint}`"
    )
    assert f"`pw calibrate {checkpoint} -o Mixtral-8x7B-v0.1.pw`" in done.err

    done = run(command, "Qwen/Qwen1.5-MoE-A2.7B@main", *tail)
    assert done.code == 3
    line = "pw calibrate Qwen/Qwen1.5-MoE-A2.7B@main -o Qwen1.5-MoE-A2.7B.pw --download"
    assert f"`{line}`" in done.err

    done = run(command, str(tmp_path / "no.pw"), *tail)
    assert done.code == 3
    assert f"no such artifact: `{tmp_path / 'no.pw'}`" in done.err
    assert f"-o {tmp_path / 'no.pw'}`" in done.err

    (tmp_path / "two words.pw.partial").mkdir()
    done = run(command, str(tmp_path / "two words.pw"), *tail)
    assert f"-o '{tmp_path / 'two words.pw'}'" in done.err

    (tmp_path / "half.pw.partial").mkdir()
    done = run(command, str(tmp_path / "half.pw"), *tail)
    assert done.code == 3
    assert "artifact is not finished" in done.err
    assert "resume it" in done.err


def test_an_artifact_without_manifest_is_an_incomplete_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "bad.pw"
    (bad / "planes.zarr").mkdir(parents=True)
    (bad / "config.json").write_text("{}")
    done = run("serve", "bad.pw", "--port", "0")
    assert done.code == 3
    assert done.err.startswith(
        "error: artifact without manifest.json, an incomplete copy: `bad.pw`"
    )
    assert "-o bad-quantized.pw`" in done.err
    (bad / "planes.zarr").rmdir()
    assert "`pw calibrate bad.pw -o bad-quantized.pw`" in run("serve", "bad.pw", "--port", "0").err


def test_a_taken_port_is_found_before_the_model_is_loaded_and_after_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PW_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.pw").mkdir()
    (tmp_path / "there.pw" / "manifest.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for model in ("there.pw", "tiny"):  # tiny would take half a minute to be made
            done = run("serve", model, "--port", str(port))
            assert done.code == 2
            assert f"cannot listen on 127.0.0.1:{port}" in done.err
            assert "--port" in done.err.splitlines()[1]
        done = run("serve", "missing.pw", "--port", str(port))
        assert done.code == 3
        assert done.err.startswith("error: no such artifact: `missing.pw`")


def test_verbose_shows_the_traceback_and_the_same_last_lines() -> None:
    quiet = run("inspect", "missing.pw")
    verbose = run("inspect", "missing.pw", "-v")
    assert "Traceback" not in quiet.err
    assert "Traceback" in verbose.err
    assert verbose.err.endswith(quiet.err)
    assert verbose.code == quiet.code == 3


def test_flags_are_environment_variables_and_the_command_line_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PW_MAX_MODEL_LEN", "from-env")
    done = run("serve", "x.pw", "--port", "0")
    assert "`from-env`" in done.err
    done = run("generate", "x.pw", "hi", "--max-model-len", "4k")
    assert "no such artifact" in done.err
    monkeypatch.setenv("PW_PORT", "many")
    assert "`PW_PORT`" in run("serve", "x.pw").err


@pytest.mark.parametrize("flag", ["--max-model-len", "--max_model_len"])
def test_both_spellings_are_accepted(flag: str) -> None:
    assert "must be tokens like `4096` or `16k`, or auto: `x`" in run("serve", "m", flag, "x").err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("pw.cli.inspection.artifact_path", interrupted)
    done = run("inspect", "x.pw")
    assert done.code == 130
    assert done.err == "interrupted\n"


def test_ctrl_c_says_what_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "x.pw"

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pw_pipelines.quantize.run", interrupted)
    for command in ("calibrate", "quantize"):
        assert run(command, "tiny", "-o", str(output)).err == "interrupted\n"
    (tmp_path / "x.pw.partial").mkdir()
    for command in ("calibrate", "quantize"):
        done = run(command, "tiny", "-o", str(output))
        assert done.code == 130
        assert done.err == f"kept in {output}.partial; the same command goes on\ninterrupted\n"


def test_words_of_a_library_are_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> Path:
        raise ModelError("cannot read its config: Validation error:\n    TypeError: expected int")

    monkeypatch.setattr("pw.cli.inspection.artifact_path", refused)
    done = run("inspect", "x.pw")
    assert done.err == (
        "error: cannot read its config: Validation error: TypeError: expected int\n"
    )


def test_what_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    done = run("eval", "x.pw", "--baseline", str(tmp_path / "none.json"))
    assert done.code == 1
    assert done.err.startswith(f"error: no such file or directory: `{tmp_path / 'none.json'}`")
    (tmp_path / "bad.json").write_text("{}")
    done = run("eval", "x.pw", "--baseline", str(tmp_path / "bad.json"))
    assert done.code == 2
    assert "not a report of `pw eval`" in done.err


def test_our_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Path:
        raise ZeroDivisionError

    monkeypatch.setattr("pw.cli.inspection.artifact_path", broken)
    with pytest.raises(ZeroDivisionError):
        app(["inspect", "x.pw"], standalone_mode=False)


def test_flags_reach_the_settings() -> None:
    config = Runtime(
        memory_budget="24MiB",
        precision_policy="static:4",
        max_model_len="16k",
        page_bytes="8KiB",
        seed=7,
    ).config(Planner(sensitivity_metric="hessian", transfer_budget="1MiB"), max_num_queued_reqs=3)
    assert config.memory_budget == 24 * 2**20
    assert (config.policy.kind, config.policy.bits) == ("static", 4)
    assert config.max_model_len == 16384
    assert config.page_bytes == 8192
    assert (config.seed, config.max_num_queued_reqs) == (7, 3)
    assert config.planner.metric == "hessian"
    assert config.planner.transfer_budget_bytes == 2**20


def test_defaults_of_the_flags_are_those_of_the_settings() -> None:
    from pw.cli.options import Calibration, Widths
    from pw.config import CalibrationConfig, EngineConfig, QuantizeConfig

    assert Runtime().config(Planner()) == EngineConfig()
    assert Widths().config(Calibration()) == QuantizeConfig(calibration=CalibrationConfig())


@pytest.mark.parametrize("flag", ["--served-model-name", "--api-key"])
def test_an_empty_name_or_key_is_refused_before_the_engine_starts(flag: str) -> None:
    done = run("serve", "x.pw", flag, "")
    assert (done.code, done.err.splitlines()[0]) == (2, f"error: {flag} is empty")


def test_the_bundled_model_is_calibrated_once_whoever_asks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PW_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    begun, go_on = threading.Event(), threading.Event()
    built: list[Path] = []

    def build(_model: str, path: Path, *_: object) -> None:
        built.append(path)
        begun.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(locate, "build", build)
    monkeypatch.setattr(
        locate, "fit", lambda path, _: (path / "residuals.zarr").mkdir(parents=True)
    )
    with ThreadPoolExecutor() as pool:
        first = pool.submit(locate.artifact_path, "tiny", quiet=True)
        assert begun.wait(PATIENCE)
        second = pool.submit(locate.artifact_path, "tiny", quiet=True)
        with pytest.raises(TimeoutError):
            second.result(0.1)
        go_on.set()
        assert first.result(PATIENCE) == second.result(PATIENCE) == built[0]
    assert len(built) == 1


def test_a_cache_that_cannot_be_written_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PW_HOME", "/proc/nothing")
    monkeypatch.chdir(tmp_path)
    done = run("inspect", "tiny")
    assert done.code == 2
    assert "error: cannot write the cache `/proc/nothing/" in done.err
    assert "hint: name another folder in PW_HOME" in done.err
