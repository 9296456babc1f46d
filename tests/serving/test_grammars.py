"""Grammars are tried in a process of their own: verdicts, limits, and what harm does to it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import pw
from pw.engine.request import Grammar
from pw.errors import RequestError
from pw.serving.app import create_app
from pw.serving.context import ServingConfig
from pw.serving.structured import grammars
from pw.serving.structured.grammars import GrammarChecker, Verdicts
from tests.serving.fakes import FakeEngine, WordTokenizer

pytest.importorskip("xgrammar")

TINY = Path(pw.__file__).parent / "assets" / "moe-tiny"
MEGABYTE_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            f"p{i}": {"type": "string", "pattern": f"[a-z]{{1,2000}}x{i}"} for i in range(3000)
        },
    }
)
SLOW = Grammar("regex", "(.{1,2000}){1,2000}[a-z]{1,200000}")  # seconds to follow, not to compile


async def verdict(checker, grammar):
    """The refusal's message and status, or None."""
    try:
        await checker.check(grammar, "field")
    except RequestError as error:
        return error.message, error.status
    return None


@pytest.mark.slow
def test_a_worker_through_all_that_happens_to_it(monkeypatch):
    """One test, as starting the worker takes seconds."""
    monkeypatch.setattr(grammars, "CPU_SECONDS", 1.5)  # so that what is slow is so for a while

    async def run():
        checker = GrammarChecker(TINY)
        assert checker._process is None
        try:
            await good_and_bad(checker)
            await rested(checker, monkeypatch)
            await harmful(checker)
            await shared_and_abandoned(checker)
            await killed(checker)
        finally:
            await checker.close()
        assert checker._process is None

    asyncio.run(run())


async def good_and_bad(checker):
    for grammar in (
        Grammar("regex", "(a+)+$"),
        Grammar("json_object"),
        Grammar("choice", '["yes", "no \\"\\\\"]'),
        Grammar("ebnf", 'root ::= root "a" | "b"'),
        Grammar("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}'),
        Grammar("json_schema", '{"type": "object", "properties": {"next": {"$ref": "#"}}}'),
    ):
        assert await verdict(checker, grammar) is None, grammar
    for grammar, sentence in (
        (Grammar("regex", "(a"), "parenthesis is not closed"),
        (Grammar("regex", "(" * 5000 + "a" + ")" * 5000), "Nest layer"),
        (Grammar("ebnf", "root ::= nowhere"), '"nowhere" is not defined'),
        (Grammar("ebnf", "root ::= root"), "no text matches"),
        (Grammar("json_schema", '{"$ref": "#"}'), "Circular"),
        (Grammar("json_schema", '{"type": "thing"}'), "Unsupported type"),
    ):
        message, status = await verdict(checker, grammar)
        assert (status, sentence in message) == (400, True), message
        assert "/project/" not in message  # the compiler's source lines


async def harmful(checker):
    """Two that take too long run beside others, which do not wait for them."""
    slow = asyncio.create_task(verdict(checker, SLOW))
    while not checker._answers:
        await asyncio.sleep(0.001)
    assert await verdict(checker, Grammar("regex", "b+")) is None
    assert not slow.done()
    message, status = await slow
    assert (status, "takes too long" in message) == (400, True)
    checker._ask = None  # it is remembered: nobody is asked
    assert await verdict(checker, SLOW) == (message, status)
    del checker._ask


async def shared_and_abandoned(checker):
    """Who asks for the same waits for one trial; who leaves does not end it for others."""
    grammar = Grammar("regex", "shared+")
    first = asyncio.create_task(verdict(checker, grammar))
    second = asyncio.create_task(verdict(checker, grammar))
    await asyncio.sleep(0)
    assert len(checker._trials) == 1
    first.cancel()
    assert await second is None


async def killed(checker):
    waiting = asyncio.create_task(verdict(checker, Grammar("json_schema", MEGABYTE_SCHEMA)))
    while not checker._answers:
        await asyncio.sleep(0.001)
    os.kill(checker._process.pid, signal.SIGKILL)
    assert (await waiting)[1] == 503
    assert await verdict(checker, Grammar("regex", "again")) is None  # it starts anew


async def rested(checker, monkeypatch):
    """Nobody needs it for a while: it ends, and the next grammar starts another."""
    monkeypatch.setattr(grammars, "IDLE_SECONDS", 0.01)
    first = checker._process
    assert await verdict(checker, Grammar("regex", "one more")) is None
    monkeypatch.setattr(grammars, "IDLE_SECONDS", 600.0)
    while checker._process is not None:
        await asyncio.sleep(0.01)
    assert await first.wait() == 0
    assert await verdict(checker, Grammar("regex", "one more")) is None  # known
    assert checker._process is None
    assert await verdict(checker, Grammar("regex", "and another")) is None
    assert checker._process.pid != first.pid


def test_a_worker_that_cannot_start_is_a_503_and_one_line(tmp_path, capfd):
    async def run():
        checker = GrammarChecker(tmp_path)  # no tokenizer there
        refused = await verdict(checker, Grammar("regex", "a"))
        await checker.close()
        return refused

    message, status = asyncio.run(run())
    assert (message, status) == ("the grammar compiler does not start", 503)
    told = capfd.readouterr().err
    assert told.startswith("the grammar compiler does not start: ")
    assert "Traceback" not in told


def test_a_server_starts_none_until_a_grammar_comes(monkeypatch):
    started = []

    async def start(checker):
        started.append(checker)
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(GrammarChecker, "_start", start)
    app = create_app(
        FakeEngine(), WordTokenizer(), ServingConfig(("fake",), grammar_tokenizer=TINY)
    )
    with TestClient(app) as client:
        body = {"model": "fake", "prompt": "1", "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert started == []
        body["guided_regex"] = "a"
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 503
        told = refused.json()["error"]["message"]
        assert told == "the grammar compiler does not start: no memory"
        assert started == [app.state.context.grammars]


def test_a_worker_that_never_gets_ready_does_not_block_the_next_one(monkeypatch, tmp_path):
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(grammars, "START_SECONDS", 0.2)
    monkeypatch.setattr(grammars, "ANSWER_SECONDS", 0.0)

    async def run():
        checker = GrammarChecker(TINY)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(silent))
            assert (await verdict(checker, Grammar("regex", "a")))[1] == 503
        assert checker._process is None
        monkeypatch.setattr(grammars, "START_SECONDS", 120.0)
        monkeypatch.setattr(grammars, "ANSWER_SECONDS", 60.0)
        assert await verdict(checker, Grammar("regex", "a")) is None
        await checker.close()

    asyncio.run(run())


def test_the_worker_starts_with_the_first_grammar_and_ends_with_the_server():
    """Closing in the middle of its start leaves no process."""

    async def run():
        checker = GrammarChecker(TINY)
        waiting = asyncio.create_task(verdict(checker, Grammar("regex", "a")))
        while checker._process is None:
            await asyncio.sleep(0.01)
        process = checker._process
        assert process.returncode is None
        await checker.close()
        assert process.returncode == -signal.SIGKILL
        assert (await waiting)[1] == 503
        assert checker._process is None or checker._process.returncode is not None
        await GrammarChecker(None).close()  # that has nothing to end

    asyncio.run(run())


def test_waiting_room_is_bounded(monkeypatch):
    async def run():
        checker = GrammarChecker(TINY)
        never = asyncio.get_running_loop().create_future()

        async def ask(_grammar):
            return await never

        monkeypatch.setattr(checker, "_ask", ask)
        waiting = [
            asyncio.create_task(verdict(checker, Grammar("regex", f"a{i}")))
            for i in range(grammars.MAX_WAITING)
        ]
        await asyncio.sleep(0)
        refused = await verdict(checker, Grammar("regex", "one more"))
        never.set_result("")
        assert await asyncio.gather(*waiting) == [None] * grammars.MAX_WAITING
        await checker.close()
        return refused

    assert asyncio.run(run())[1] == 503


def test_not_offered_without_a_tokenizer():
    message, status = asyncio.run(verdict(GrammarChecker(None), Grammar("regex", "a")))
    assert (message, status) == ("structured output is not available here", 400)


def test_verdicts_are_bounded_and_the_oldest_goes():
    verdicts = Verdicts(max_bytes=3 * 256 + 10)
    for name in ("a", "b", "c"):
        verdicts.add(name.encode(), "")
    assert verdicts.get(b"a") == ""
    verdicts.add(b"d", "x" * 10)  # b was used longest ago
    assert [verdicts.get(name) for name in (b"a", b"b", b"c", b"d")] == ["", None, "", "x" * 10]
    assert verdicts.bytes == 3 * 256 + 10
    verdicts.add(b"d", "again")
    assert verdicts.bytes == 3 * 256 + 10
