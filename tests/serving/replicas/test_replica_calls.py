"""A request that an app answers elsewhere: what it sees, how it ends; arguments of replicas."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from pw.errors import ConfigError
from pw.serving.app import create_app
from pw.serving.context import ServingConfig
from pw.serving.replicas.calls import MESSAGES_BEHIND, Answer, Call, answer, respond
from pw.serving.replicas.settings import ReplicaArgs
from serving.fakes import FakeEngine, WordTokenizer

ROOT = Path(__file__).parents[3]
HEAD = {"type": "http.response.start", "status": 200, "headers": []}


def test_a_call_is_what_can_travel() -> None:
    scope: Scope = {
        "type": "http", "method": "POST", "path": "/prefix/v1/completions", "root_path": "/prefix",
        "query_string": b"a=1", "headers": [(b"x-request-id", b"bad\n"), (b"a", b"b")],
        "client": ("10.0.0.1", 99), "pw.request_id": "good", "app": object(),
    }  # fmt: skip
    call = Call.of(scope, b"body")
    assert call.headers == ((b"a", b"b"), (b"x-request-id", b"good"))
    made = call.scope()
    assert (made["path"], made["root_path"], made["query_string"]) == (
        "/v1/completions",
        "",
        b"a=1",
    )
    assert Call.of(made, b"body") == call


def test_the_app_of_a_server_answers_a_call() -> None:
    engine = FakeEngine()
    app = create_app(engine, WordTokenizer(), ServingConfig(("fake",)))
    headers = ((b"content-type", b"application/json"),)
    body = b'{"prompt": "1", "max_tokens": 3}'

    async def ask() -> Answer:
        async with app.router.lifespan_context(app):
            return await answer(app, Call("POST", "/v1/completions", headers=headers, body=body))

    whole = asyncio.run(ask())
    assert whole.status == 200
    assert b'"completion_tokens":3' in whole.body
    assert engine.stopped


def test_closing_tells_the_app_that_its_client_has_gone() -> None:
    seen: list[str] = []

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((await receive())["type"])
        await send(HEAD)
        for _ in range(3 * MESSAGES_BEHIND):  # more than anybody has read
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        seen.append((await receive())["type"])

    async def leave() -> None:
        messages: Any = respond(app, Call("GET", "/"))
        async with aclosing(messages):
            await anext(messages)

    asyncio.run(asyncio.wait_for(leave(), 10))
    assert seen == ["http.request", "http.disconnect"]


def test_an_app_that_fails_says_so_after_what_it_sent() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send(HEAD)
        raise ZeroDivisionError

    async def read() -> list[str]:
        messages: Any = respond(app, Call("GET", "/"))
        types = [(await anext(messages))["type"]]
        with pytest.raises(ZeroDivisionError):
            await anext(messages)
        return types

    assert asyncio.run(read()) == ["http.response.start"]


def test_the_example_is_valid_and_small_changes_are_told() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "ray-serve.yaml").read_text())
    (application,) = config["applications"]
    assert application["import_path"] == "pw.serving.replicas.app:build"
    args = ReplicaArgs.model_validate(application["args"])
    assert (args.target, args.ongoing, args.gpus) == (64, 72, 1)
    for wrong in (
        {"max_num_seq": 4},
        {"memory_budget": "much"},
        {"max_replicas": 0},
        {"min_replicas": 9},
        {"precision_policy": "best"},
        {"log_format": "xml"},
    ):
        with pytest.raises((ValidationError, ConfigError)):
            ReplicaArgs.model_validate(application["args"] | wrong)


def test_arguments_become_settings(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n two \n")
    args = ReplicaArgs.model_validate({
        "model": "m.pw", "memory_budget": "24MiB", "precision_policy": "static:4", "device": "cpu",
        "max_num_seqs": "4", "api_key_file": str(tmp_path / "keys"), "attempts": 2,
    })  # fmt: skip
    engine = args.engine_config()
    assert (engine.memory_budget, engine.policy.bits, engine.max_num_seqs) == (24 << 20, 4, 4)
    assert (args.gpus, args.target, args.ongoing) == (0, 4, 12)
    assert args.ingress_settings().api_keys == ("one", "two")
    shared = args.model_copy(update={"device": "cuda", "tensor_parallel_size": 2})
    assert (shared.gpus, shared.engine_config().tensor_parallel_size) == (2, 2)
    assert "one" not in repr(args.ingress_settings())
    assert Path(args.absolute().model) == Path.cwd() / "m.pw"
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ConfigError, match="no key"):
        args.ingress_settings()
