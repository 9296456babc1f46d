"""`--config FILE`: below flags and environment variables, above defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pytest
import typer

from pw.cli import app as whole
from pw.cli.command import add_command
from pw.cli.openai_options import OpenAI
from pw.cli.options import Common, Planner, Runtime
from pw.cli.server_options import Server
from support.cli import run


class Seen:
    """A command with the options of `serve`, which only looks at them."""

    def __init__(self) -> None:
        self.server, self.api, self.runtime = Server(), OpenAI(), Runtime()
        self.model = ""
        self.app = typer.Typer()
        add_command(self.app, self.look, panel="x", name="look")
        self.app.callback()(lambda: None)

    def look(
        self,
        model: Annotated[str, typer.Argument()],
        server: Server,
        api: OpenAI,
        runtime: Runtime,
        planner: Planner,
        common: Common,
    ) -> None:
        self.model, self.server, self.api, self.runtime = model, server, api, runtime

    def __call__(self, *arguments: str) -> None:
        self.app(["look", *arguments], standalone_mode=False)


def write(folder: Path, text: str) -> str:
    file = folder / "server.yaml"
    file.write_text(text)
    return str(file)


def test_flags_come_before_variables_before_the_file_before_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(
        tmp_path,
        "port: 1\nmax-num-seqs: 2\nmax_model_len: 16k\nhost: 0.0.0.0\nstrict: true\n"
        "api-key: [a, b]\nserved_model_name: [one, two]\ngpu-memory-limit: 3GiB\n"
        "default-chat-template-kwargs: {enable_thinking: false}\nseed: null\n",
    )
    monkeypatch.setenv("PW_PORT", "11")
    monkeypatch.setenv("PW_MAX_NUM_SEQS", "12")
    seen = Seen()
    seen("x.pw", "--config", file, "--port", "21")
    assert (seen.server.port, seen.runtime.max_num_seqs) == (21, 12)
    assert (seen.server.host, seen.api.strict) == ("0.0.0.0", True)
    assert list(seen.server.api_key or ()) == ["a", "b"]
    assert list(seen.server.served_model_name or ()) == ["one", "two"]
    assert str(seen.runtime.max_model_len) == "16k"
    assert seen.runtime.memory_budget == "3GiB"  # under the flag's other name
    assert json.loads(seen.api.default_chat_template_kwargs or "") == {"enable_thinking": False}
    assert seen.runtime.seed == Runtime().seed
    assert seen.server.shutdown_timeout == Server().shutdown_timeout


def test_the_file_may_name_the_model_and_be_empty(tmp_path: Path) -> None:
    seen = Seen()
    seen("--config", write(tmp_path, "model: y.pw\nport: 5\n"))
    assert (seen.model, seen.server.port) == ("y.pw", 5)
    seen("x.pw", "--config", write(tmp_path, ""))
    assert (seen.model, seen.server.port) == ("x.pw", Server().port)


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ("prot: 1", "no such setting in", "did you mean `port`?"),
        ("xyzzy: 1", "no such setting in", "see `pw serve --help`"),
        ("config: other.yaml", "no such setting in", "see `pw serve --help`"),
        ("[1, 2]", "must map flags to values", "see `pw serve --help`"),
        ("a: [", "cannot read", "see `pw serve --help`"),
        ("memory-budget: 1GiB\nmemory_budget: 2GiB", "says twice: memory-budget, memory_bud", ""),
        ("port: many", "server.yaml:port`: Input should be", "see `pw serve --help`"),
        ("max-num-queued-tokens: -1", "server.yaml:max-num-queued-tokens must be positive", ""),
    ],
)
def test_a_wrong_file_is_one_line_and_a_hint(
    tmp_path: Path, text: str, error: str, hint: str
) -> None:
    done = run("serve", "x", "--config", write(tmp_path, text))
    first, *rest = done.err.splitlines()
    assert done.code == 2
    assert error in first
    assert hint in "".join(rest)
    assert len(rest) <= 1


def test_only_serve_has_it() -> None:
    assert whole.registered_commands
    assert "no such option: --config" in run("inspect", "x", "--config", "y").err
