"""Decode steps launched before the last one is read: the same answers, whatever comes between.

On a CPU with steps of fixed shape by calls; the order of launches and reads is that of a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pw.engine import Engine
from pw.engine.completion import Completion
from pw.engine.computing import Flight
from pw.engine.graphs.capture import eager
from pw.engine.graphs.decode import DecodeSteps
from pw.engine.request import Grammar, RequestOutput, SamplingParams
from support.engines import open_engine, random_prompt, tight_budget
from support.overlap import launches, serve_at_changing_bits

LENGTHS = (45, 1, 17, 30, 2, 40, 9)


def opened(artifact: Path, policy: str = "static:4", **settings: Any) -> Engine:
    """An engine that decodes in fixed shapes, whose steps overlap unless told otherwise."""
    engine = open_engine(artifact, policy, **({"async_scheduling": True} | settings))
    runner = engine._parts.runner
    runner.steps = DecodeSteps(runner._skeleton, runner._experts, engine._parts.kv, 8, eager)
    return engine


def requests(count: int = 7, **settings: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, greedy and sampled, that end at different times."""
    params = []
    for seed in range(count):
        its: dict[str, Any] = {
            "temperature": 0.0 if seed % 2 else 0.8,
            "top_p": 0.9 if seed % 3 else 1.0,
            "max_tokens": 6 + 5 * (seed % 4),
            "logprobs": seed % 3 or None,
            "min_tokens": 4 * (seed % 2),
            "ignore_eos": True,
        }
        params.append(SamplingParams(seed=seed, **(its | settings)))
    return [random_prompt(LENGTHS[seed % 7], seed) for seed in range(count)], params


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for mine, its in zip(found, expected, strict=True):
        assert (mine.token_ids, mine.text) == (its.token_ids, its.text)
        assert (mine.finish_reason, mine.error) == (its.finish_reason, its.error)
        got, wanted = ([entry.logprob for entry in done.logprobs] for done in (mine, its))
        assert got == pytest.approx(wanted, abs=2e-5)


def both(
    artifact: Path, prompts: list[list[int]], params: list[SamplingParams], **settings: Any
) -> tuple[Engine, list[str]]:
    """Compare with the plain order; the engine that overlaps and its launches."""
    plain = opened(artifact, async_scheduling=False, **settings)
    engine = opened(artifact, **settings)
    log, order = launches(engine), launches(plain)
    assert_same(engine.generate(prompts, params), plain.generate(prompts, params))
    assert "ahead" not in order
    for each, its in ((engine, log), (plain, order)):
        assert each.status().step == its.count("read")
        assert each.status().pages_kv == 0 or each._parts.kv.prefix is not None
        each.check_integrity()
    return engine, log


def test_steps_are_launched_before_the_last_is_read(qwen: tuple[Any, Path]) -> None:
    prompts, params = requests(3)
    engine, log = both(qwen[1], prompts, params)
    assert log.count("ahead") > 8
    assert engine.status().step == log.count("read") == log.count("plain") + log.count("ahead")
    assert all(after == "read" for before, after in pairwise(log) if before == "ahead")


def test_tokens_and_strings_that_end_a_text(qwen: tuple[Any, Path]) -> None:
    """Ends that nobody knows beforehand: the step that is on its way then is dropped in part."""
    prompts, params = requests()
    engine = opened(qwen[1], async_scheduling=False)
    texts = engine.generate(prompts, params)
    stops: list[SamplingParams] = []
    for seed, done in enumerate(texts):
        token = done.token_ids[len(done.token_ids) // 2]
        by_text = {"stop": (done.text[3:5],)} if done.text[3:5].isascii() else {}
        more: dict[str, Any] = by_text if seed % 2 and by_text else {"stop_token_ids": (token,)}
        stops.append(requests(7, **more)[1][seed])
    engine, log = both(qwen[1], prompts, stops)
    assert "ahead" in log
    status = engine.status()
    assert log.count("plain") + log.count("ahead") > log.count("read")  # some were dropped whole
    assert (status.running, status.finished) == (0, 7)


def test_what_reads_tokens_for_its_draws_keeps_the_plain_order(qwen: tuple[Any, Path]) -> None:
    prompts, params = requests(4, frequency_penalty=0.5, logit_bias=((70, 3.0),))
    assert "ahead" not in both(qwen[1], prompts, params)[1]
    prompts, params = requests(4, logit_bias=((70, 3.0),))
    assert "ahead" in both(qwen[1], prompts, params)[1]
    grammar = SamplingParams(
        temperature=0.7, seed=1, max_tokens=20, grammar=Grammar("regex", "[a-d]{3}")
    )
    _, log = both(qwen[1], [prompts[0], prompts[1]], [grammar, params[1]])
    assert "ahead" in log  # once the grammar has ended


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_and_found_prefixes(qwen: tuple[Any, Path], caching: bool) -> None:
    prompts, params = requests(10, max_tokens=50)
    prompts = [prompts[5][:32] + prompt for prompt in prompts]
    budget = tight_budget(qwen[1], 170, "static:4", enable_prefix_caching=caching)
    settings: dict[str, Any] = {"memory_budget": budget, "enable_prefix_caching": caching}
    engine, log = both(qwen[1], prompts, params, **settings)
    assert engine.status().preemptions > 0
    assert (engine.status().prefix_cache_hits > 0) == caching
    assert log.count("ahead") > 20


def test_an_aborted_request_drops_its_part_of_what_flies(qwen: tuple[Any, Path]) -> None:
    prompts, params = requests(4, max_tokens=20)
    expected = opened(qwen[1]).generate(prompts, params)
    engine = opened(qwen[1], enable_prefix_caching=False)
    for number, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"r{number}", prompt, its)
    outputs: list[RequestOutput] = []
    while sum(output.request_id == "r2" for output in outputs) < 3:
        outputs += engine.step()
    while engine._launcher._ahead is None:
        outputs += engine.step()
    last = engine.abort("r2")
    assert last is not None
    assert last.finish_reason == "abort"
    engine.check_integrity()
    engine.add_request("late", prompts[2], params[2])  # may get the pages of r2
    while engine.has_work():
        outputs += engine.step()
        engine.check_integrity()
    for name, number in (("r0", 0), ("r1", 1), ("late", 2), ("r3", 3)):
        found = [t for out in outputs if out.request_id == name for t in out.token_ids]
        assert tuple(found) == expected[number].token_ids
    assert engine.status().pages_kv == 0
    assert engine.abort("r0") is None


def test_a_new_request_is_let_in_at_the_next_turn(qwen: tuple[Any, Path]) -> None:
    engine = opened(qwen[1])
    prompts, params = requests(3, max_tokens=30)
    engine.add_request("first", prompts[2], params[1])
    while engine._launcher._ahead is None:
        engine.step()
    engine.add_request("second", prompts[1], params[1])
    assert {output.request_id for output in engine.step()} == {"first"}  # what was on its way
    assert {output.request_id for output in engine.step()} == {"first", "second"}


def test_bits_that_change_at_safe_points(qwen: tuple[Any, Path]) -> None:
    """By the number of the step, every step: bits of a step are those it was launched with."""
    prompts, params = requests(5)

    settings: dict[str, Any] = {"policy": "adaptive", "enable_prefix_caching": False}
    engine = opened(qwen[1], **settings)
    log = launches(engine)
    found = serve_at_changing_bits(engine, prompts, params)
    plain = opened(qwen[1], async_scheduling=False, **settings)
    assert found == serve_at_changing_bits(plain, prompts, params)
    assert set(found[1]) == {2.0, 3.0, 4.0, 6.0}
    assert log.count("ahead") > 8


def test_adaptive_precision_sees_the_same_routing(qwen: tuple[Any, Path]) -> None:
    prompts, params = requests()
    masses = []
    for overlap in (True, False):
        engine = opened(qwen[1], "adaptive", min_bits=4, max_bits=4, async_scheduling=overlap)
        engine.generate(prompts, params)
        quality = engine._parts.quality
        assert quality is not None
        masses.append(torch.from_numpy(quality.mass()))
    torch.testing.assert_close(masses[0], masses[1], rtol=1e-5, atol=0)


def breaks(engine: Engine, method: str, every: int) -> None:
    """Let a method of the engine's runner or decode steps raise now and then, its work done."""
    owner: Any = engine._parts.runner
    inner: Callable[..., Any] = getattr(owner, method)
    calls = 0

    def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = inner(*arguments)
        if calls % every == 0:
            raise RuntimeError("a fault made by the test")
        return result

    setattr(owner, method, broken)


@pytest.mark.parametrize("method", ["run", "run_ahead"])
def test_a_step_that_breaks_beside_one_that_flies(
    qwen: tuple[Any, Path], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, params = requests()
    expected = opened(qwen[1], async_scheduling=False).generate(prompts, params)
    engine = opened(qwen[1])
    log = launches(engine)
    breaks(engine, method, 5)
    with caplog.at_level(logging.CRITICAL):
        assert_same(engine.generate(prompts, params), expected)
    assert log.count("ahead") > 5
    assert engine.status().failed == 0
    engine.check_integrity()


def test_a_step_that_breaks_at_its_read_is_computed_again(
    qwen: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    prompts, params = requests()
    expected = opened(qwen[1], async_scheduling=False).generate(prompts, params)
    engine = opened(qwen[1])
    computer, left = engine._computer, [RuntimeError("a fault made by the test")] * 3
    launch = computer.launch

    def lost() -> None:
        if left:
            raise left.pop()

    def launched(chunks: Any, tag: Any, after: Flight | None = None) -> Flight:
        flight = launch(chunks, tag, after)
        if after is not None:
            assert flight.results is not None
            flight.results.arrived = lost
        return flight

    computer.launch = launched  # type: ignore[method-assign]
    with caplog.at_level(logging.CRITICAL):
        assert_same(engine.generate(prompts, params), expected)
    assert not left
    engine.check_integrity()


def test_logits_that_are_not_finite_end_their_request_alone(
    qwen: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The step behind has its token -1 by then, and must not look it up."""
    prompts, params = requests(4, max_tokens=16)
    expected = opened(qwen[1]).generate(prompts, params)
    engine = opened(qwen[1])
    steps = engine._parts.runner.steps
    assert steps is not None
    run = steps.run

    def poisoned(chunks: Any, experts: Any, drawn: Tensor | None = None) -> Tensor:
        logits = run(chunks, experts, drawn).clone()
        for row, chunk in enumerate(chunks):
            if chunk.sequence.prompt == prompts[1] and chunk.start == len(prompts[1]) + 6:
                logits[row, 5] = torch.nan
        return logits

    steps.run = poisoned  # type: ignore[method-assign]
    with caplog.at_level(logging.CRITICAL):
        found = engine.generate(prompts, params)
    assert found[1].error == "the model gave logits that are not finite"
    assert found[1].token_ids == expected[1].token_ids[:7]
    assert_same([found[0], *found[2:]], [expected[0], *expected[2:]])
    engine.check_integrity()
