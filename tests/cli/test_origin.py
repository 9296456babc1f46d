"""A value that came from a variable or a file is blamed on that, not on a flag nobody gave."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pw.cli import app
from support.cli import run

GENERATE = ("generate", "x.pw", "hi")
SERVE = ("serve", "x.pw")


@pytest.mark.parametrize(
    ("variables", "arguments", "error"),
    [
        # named by its flag, by its field, by its field's one word, by its value alone
        ({"PW_MAX_MODEL_LEN": "far"}, SERVE, "PW_MAX_MODEL_LEN must be tokens like"),
        ({"PW_GPU_MEMORY_UTILIZATION": "2"}, SERVE, "PW_GPU_MEMORY_UTILIZATION must be in (0, 1]"),
        ({"PW_TEMPERATURE": "3"}, GENERATE, "PW_TEMPERATURE must be between 0 and 2: 3.0"),
        ({"PW_MEMORY_BUDGET": "3x"}, SERVE, "PW_MEMORY_BUDGET: not a size in bytes: `3x`"),
        ({"PW_PLANNER": "best"}, GENERATE, "PW_PLANNER must be hull or greedy: `best`"),
        # by the parser, which says what it has read
        ({"PW_PORT": "many"}, SERVE, "invalid value for `PW_PORT`: "),
        ({"PW_QUIET": "perhaps"}, ("env",), "unable to interpret input: `perhaps`"),
        ({"PW_BENCH_PORT": "no"}, ("bench", "serve"), "invalid value for `PW_BENCH_PORT`: "),
        # one of two came from elsewhere
        (
            {"PW_MEMORY_BUDGET": "3MB"},
            (*SERVE, "--gpu-memory-utilization", "0.5"),
            "PW_MEMORY_BUDGET and --gpu-memory-utilization exclude each other: 3MB, 0.5",
        ),
    ],
)
def test_a_variable_is_named(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    arguments: tuple[str, ...],
    error: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = run(*arguments)
    assert done.code == 2
    assert error in done.err.splitlines()[0]


def test_a_flag_before_the_variable_is_named_as_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PW_MAX_MODEL_LEN", "4k")
    assert "error: --max-model-len must" in run(*SERVE, "--max-model-len", "far").err
    monkeypatch.setenv("PW_MEMORY_BUDGET", "3x")
    assert "error: not a size in bytes: `4x`" in run(*SERVE, "--memory-budget", "4x").err


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("max-model-len: far", ":max-model-len must be tokens like"),
        ("max_model_len: far", ":max_model_len must be tokens like"),
        ("gpu-memory-limit: 3x", ":gpu-memory-limit: not a size in bytes: `3x`"),  # an alias
        ("port: many", ":port`: Input should be a valid integer, unable to parse"),
        ("model: nowhere.pw", ":model: no such artifact: `nowhere.pw`"),
    ],
)
def test_a_key_of_the_file_is_named(tmp_path: Path, line: str, error: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(line + "\n")
    model = () if line.startswith("model") else ("x.pw",)
    first = run("serve", "--config", str(file), *model).err.splitlines()[0]
    assert f"{file}{error}" in first
    assert first.count(str(file)) == 1


def test_the_remedy_is_where_the_value_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("PW_PORT", str(taken.getsockname()[1]))
        done = run("serve", "tiny", "--load-format", "dummy", "--max-num-seqs", "1")
    assert "cannot listen on" in done.err
    assert "hint: choose another one with `PW_PORT`" in done.err


def test_a_variable_means_one_thing() -> None:
    """Flags of one name in several commands share a variable only where they mean the same."""
    seen: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))

    def walk(command: Any, path: str) -> None:
        for name, below in getattr(command, "commands", {}).items():
            walk(below, f"{path} {name}".strip())
        for option in [] if hasattr(command, "commands") else command.params:
            names = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
            if getattr(option, "allow_from_autoenv", False):
                names = [*names, f"PW_{option.name.upper()}"]
            for name in names:
                seen[name][option.rich_help_panel or option.help].append(path)

    walk(get_command(app), "")
    assert len(seen) > 80
    alike = {  # the same in other words
        "PW_API_KEY", "PW_DEVICE", "PW_DRY_RUN", "PW_IGNORE_EOS",
        "PW_BATCH_SIZE", "PW_INPUT_LEN", "PW_OUTPUT_LEN", "PW_SECONDS",
    }  # fmt: skip
    several = {name: dict(uses) for name, uses in seen.items() if len(uses) > 1}
    assert {name: uses for name, uses in several.items() if name not in alike} == {}
    assert "PW_OUTPUT" not in seen
    assert {"PW_PORT", "PW_BENCH_PORT", "PW_CALIBRATION_SEED", "PW_SEED"} <= set(seen)


@pytest.mark.parametrize("flag", ["--url", "--base-url", "--base_url"])
@pytest.mark.parametrize("command", [("top", "--once"), ("bench", "serve")])
def test_a_server_is_named_by_either_flag(command: tuple[str, ...], flag: str) -> None:
    done = run(*command, flag, "http://127.0.0.1:9")
    assert "no such option" not in done.err
    assert "http://127.0.0.1:9" in done.err
