"""Structured output: what a random model writes is in the language of its grammar."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pw.engine import Completion, Engine
from pw.engine.request import Grammar, RequestOutput, SamplingParams
from pw.engine.sampling import grammar_queue as queue_module
from pw.engine.sampling.grammar import tokenizer_info
from pw.engine.sampling.grammar_queue import GrammarQueue
from pw.errors import RequestError
from pw.models.tokenizer import load_tokenizer
from support.engines import open_engine, random_prompt, tight_budget
from support.offline import write_tokenizer
from support.patience import PATIENCE

pytest.importorskip("xgrammar")

SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 5},
                "age": {"type": "integer", "minimum": 0, "maximum": 99},
                "kind": {"enum": ["bit", "plane"]},
            },
            "required": ["name", "age", "kind"],
            "additionalProperties": False,
        }
    ),
)
REGEX = Grammar("regex", "[a-c]{2,4}-[0-9]{3}")
CHOICES = ['a "quoted" one', "back\\slash", "naïve 🦊\n", "a"]
CHOICE = Grammar("choice", json.dumps(CHOICES))
EBNF = Grammar("ebnf", 'root ::= "<" [x-z]+ ">"')


def params(grammar: Grammar, seed: int = 0, **settings: Any) -> SamplingParams:
    settings = {"max_tokens": 150, "temperature": 1.0, "seed": seed} | settings
    return SamplingParams(grammar=grammar, **settings)


def check_schema(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age", "kind"}
    assert text == json.dumps(value, ensure_ascii=False)  # no blank that nobody needs
    name = re.sub("\ufffd{1,4}", "?", value["name"])  # bytes of no character are one to a grammar
    assert len(name) <= 5
    assert 0 <= value["age"] <= 99
    assert value["kind"] in ("bit", "plane")


def check(grammar: Grammar, done: Completion) -> None:
    assert done.finish_reason == "stop", (grammar, done)
    if grammar is SCHEMA:
        check_schema(done.text)
    elif grammar is CHOICE:
        assert done.text in CHOICES
    else:
        assert re.fullmatch(REGEX.text if grammar is REGEX else "<[x-z]+>", done.text)


def test_every_kind_is_kept_in_mixed_batches(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:3")
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    grammars = [SCHEMA, REGEX, CHOICE, EBNF] * 3
    prompts = [random_prompt(9, seed) for seed in range(len(grammars) + 1)]
    expected = engine.generate(prompts[-1:], free)[0]
    each = [params(grammar, seed) for seed, grammar in enumerate(grammars)]
    each[1] = params(REGEX, 1, min_tokens=140)  # a grammar at its end goes before
    each[2] = params(CHOICE, 2, ignore_eos=True)
    each[3] = params(EBNF, 3, logprobs=5, top_k=1)
    *constrained, unbound = engine.generate(prompts, [*each, free])
    for grammar, done in zip(grammars, constrained, strict=True):
        check(grammar, done)
    assert unbound.token_ids == expected.token_ids  # neighbours are as they were
    scored = constrained[3].logprobs  # of the model, not of what the grammar leaves of it
    assert len(scored) == len(constrained[3].token_ids)
    values = [value for entry in scored for value in (entry.logprob, *dict(entry.top).values())]
    assert all(map(math.isfinite, values))
    engine.close()


def test_json_object_is_an_object(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:3")
    close = (*((ord(mark) - 30, 4.0) for mark in '"}'), (2, 4.0))  # a random model ends nothing
    its = [
        params(Grammar("json_object"), seed, max_tokens=200, logit_bias=close) for seed in (1, 2)
    ]
    for done in engine.generate([[5], [6]], its):
        assert done.finish_reason == "stop"
        assert isinstance(json.loads(done.text), dict)


def test_preempted_grammars_go_on_where_they_were(qwen: tuple[Any, Path]) -> None:
    prompts = [random_prompt(40, seed) for seed in range(4)]
    grammar = Grammar("regex", "[a-z]{60}")
    each = [params(grammar, seed, max_tokens=61) for seed in range(4)]
    expected = open_engine(qwen[1], "static:4").generate(prompts, each)
    budget = tight_budget(qwen[1], 100, "static:4")
    engine = open_engine(qwen[1], "static:4", memory_budget=budget)
    found = engine.generate(prompts, each)
    assert engine.status().preemptions > 0
    for mine, its in zip(found, expected, strict=True):
        assert re.fullmatch(grammar.text, mine.text)
        assert mine.text == its.text


def drain(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "(a"), "The parenthesis is not closed"),
        (Grammar("json_schema", '{"type": "nope"}'), "Unsupported type"),
        (Grammar("json_schema", "not JSON"), "Failed to parse JSON"),
        (Grammar("choice", '["a", ""]'), "strings that are not empty"),
        (Grammar("choice", '"a"'), "a JSON list of strings"),
        (Grammar("ebnf", 'other ::= "a"'), "root"),
    ],
)
def test_what_cannot_be_compiled_fails_alone(
    qwen: tuple[Any, Path], grammar: Grammar, reason: str
) -> None:
    engine = open_engine(qwen[1], "static:3")
    engine.add_request("bad", [5], params(grammar))
    engine.add_request("good", [5], params(REGEX))
    assert engine.status().waiting == 2
    outputs = drain(engine)
    (bad,) = outputs["bad"]
    assert (bad.finish_reason, bad.error_code) == ("error", "invalid_grammar")
    assert bad.error is not None
    assert reason in bad.error
    assert "\n" not in bad.error
    assert outputs["good"][-1].finish_reason == "stop"
    assert engine.status().failed == 1


def test_a_grammar_that_takes_too_long_holds_nobody_up(
    qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_grammar = queue_module.compile_grammar
    overrun = threading.Event()

    def slow(compiler: Any, grammar: Grammar) -> Any:
        begin = time.thread_time()  # it uses CPU time, as a real one does
        while grammar is EBNF and not overrun.is_set() and time.thread_time() - begin < PATIENCE:
            sum(range(1000))
        return compile_grammar(compiler, grammar)

    monkeypatch.setattr(queue_module, "compile_grammar", slow)
    engine = open_engine(qwen[1], "static:3")
    engine._grammars = GrammarQueue(engine.tokenizer, engine.tokenizer.vocab_size, limit=0.2)
    engine.add_request("slow", [5], params(EBNF))
    engine.add_request("behind", [5], params(REGEX))
    engine.add_request("free", [5], SamplingParams(max_tokens=3, temperature=0))
    outputs: dict[str, list[RequestOutput]] = {}
    while "free" not in outputs or outputs["free"][-1].finish_reason is None:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    for request_id, more in drain(engine).items():
        outputs.setdefault(request_id, []).extend(more)
    assert outputs["slow"][-1].error is not None
    assert "took more than 0.2 s" in outputs["slow"][-1].error
    assert outputs["behind"][-1].finish_reason == "stop"
    overrun.set()
    engine.close()


def test_a_request_may_leave_while_its_grammar_is_compiled(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:3")
    engine.add_request("r", [5], params(SCHEMA))
    assert engine.waits("r")
    output = engine.abort("r")
    assert output is not None
    assert output.finish_reason == "abort"
    assert not engine.has_work()
    assert engine.status().waiting == 0
    assert engine.step() == []


def test_special_tokens_are_never_part_of_a_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    info = tokenizer_info(tokenizer.inner, tokenizer.vocab_size, tokenizer.eos_token_ids)
    assert sorted(info.special_token_ids) == [0, 1]
    assert info.stop_token_ids == [2]


def test_without_xgrammar_the_request_says_what_to_install(
    qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(qwen[1], "static:3")
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    monkeypatch.setattr(queue_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="not installed") as refused:
        engine.add_request("r", [5], params(REGEX))
    assert "pagedweight[structured]" in refused.value.hint
    assert not engine.has_work()
