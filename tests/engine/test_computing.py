"""Forward passes that break: who goes on, who fails, and that the books are right afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.engine import Engine
from pw.engine.computing import LOST_AFTER
from pw.engine.request import RequestOutput, SamplingParams
from pw.engine.sequence import Chunk
from pw.errors import EngineLostError
from pw.memory.prefix_cache import PrecisionTag
from support.engines import open_engine, random_prompt

PROMPTS = [random_prompt(7 + 8 * seed, seed) for seed in range(5)]
PARAMS = [
    SamplingParams(
        temperature=0.8 if seed % 2 else 0,
        seed=seed,
        max_tokens=12,
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=1,
    )
    for seed in range(5)
]


def inject(engine: Engine, fault: Callable[[list[Chunk]], Exception | None]) -> list[int]:
    """Let passes for which `fault` gives an error run and raise; sizes of the passes."""
    runner = engine._parts.runner
    run, sizes = runner.run, []

    def broken(chunks: list[Chunk]) -> Any:
        sizes.append(len(chunks))
        result = run(chunks)  # what it wrote to the cache is there
        error = fault(chunks)
        if error is not None:
            raise error
        return result

    runner.run = broken  # type: ignore[method-assign]
    return sizes


def serve(engine: Engine) -> dict[str, list[RequestOutput]]:
    """Run all prompts, checking the invariants after every step."""
    for seed, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(f"r{seed}", prompt, params)
    outputs: dict[str, list[RequestOutput]] = {f"r{seed}": [] for seed in range(5)}
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    assert engine.status().pages_kv == 0
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture(scope="module")
def expected(qwen: tuple[Any, Path]) -> dict[str, list[int]]:
    return {name: tokens(all_) for name, all_ in serve(open_engine(qwen[1], "static:4")).items()}


@pytest.mark.parametrize("policy", ["static:4", "adaptive"])
def test_a_pass_that_breaks_now_and_then_changes_no_output(
    qwen: tuple[Any, Path], expected: dict[str, list[int]], policy: str
) -> None:
    engine = open_engine(qwen[1], policy, min_bits=4, max_bits=4, planner_residual="exact")
    calls = 0

    def fault(chunks: list[Chunk]) -> Exception | None:
        nonlocal calls
        calls += 1
        return RuntimeError("a fault made by the test") if calls % 4 == 1 else None

    inject(engine, fault)
    outputs = serve(engine)
    assert {name: tokens(its) for name, its in outputs.items()} == expected
    for seed, its in enumerate(outputs.values()):
        assert len([p for output in its for p in output.prompt_logprobs]) == len(PROMPTS[seed])
        assert its[-1].finish_reason == "length"
    assert engine.status().failed == 0
    assert engine.status().prompt_tokens == sum(map(len, PROMPTS))


def test_a_lack_of_memory_is_met_by_smaller_passes(
    qwen: tuple[Any, Path], expected: dict[str, list[int]]
) -> None:
    engine = open_engine(qwen[1], "static:4")

    def fault(chunks: list[Chunk]) -> Exception | None:
        scarce = sum(chunk.count for chunk in chunks) > 8
        return torch.OutOfMemoryError("a fault made by the test") if scarce else None

    sizes = inject(engine, fault)
    outputs = serve(engine)
    assert {name: tokens(its) for name, its in outputs.items()} == expected
    assert max(sizes) > 2


def test_only_the_sequence_that_breaks_passes_fails(
    qwen: tuple[Any, Path], expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(qwen[1], "static:4")

    def fault(chunks: list[Chunk]) -> Exception | None:
        culprit = any(
            chunk.sequence.request_id == "r2" and len(chunk.sequence.output) == 3
            for chunk in chunks
        )
        return ValueError("a fault made by the test") if culprit else None

    inject(engine, fault)
    with caplog.at_level(logging.CRITICAL):
        outputs = serve(engine)
    last = outputs["r2"][-1]
    assert (last.finish_reason, last.error_code) == ("error", "engine_failed")
    assert last.error == "the forward pass failed: ValueError"
    assert tokens(outputs["r2"]) == expected["r2"][:3]
    assert {n: tokens(its) for n, its in outputs.items() if n != "r2"} == {
        name: its for name, its in expected.items() if name != "r2"
    }
    assert engine.status().failed == 1


def test_an_engine_whose_every_pass_breaks_is_lost(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:4")
    inject(engine, lambda chunks: RuntimeError("a fault made by the test"))
    for step in range(LOST_AFTER - 1):
        engine.add_request(f"r{step}", [5, 6], PARAMS[0])
        (output,) = engine.step()
        assert output.error_code == "engine_failed"
    engine.add_request("last", [5, 6], PARAMS[0])
    with pytest.raises(EngineLostError, match="3 steps in a row"):
        engine.step()
    (output,) = engine.fail_running("the engine failed", "engine_failed")
    assert output.request_id == "last"
    engine.check_integrity()
    assert not engine.has_work()


def test_a_lost_device_is_told_at_once(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:4")
    inject(engine, lambda chunks: torch.AcceleratorError("a fault made by the test"))
    engine.add_request("r", [5, 6], PARAMS[0])
    with pytest.raises(EngineLostError, match="the device is lost"):
        engine.step()


def test_a_token_that_cannot_be_taken_in_fails_its_sequence_only(
    qwen: tuple[Any, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(qwen[1], "static:4")
    add = engine.add_request

    def sabotaged(request_id: str, prompt: list[int], params: SamplingParams) -> None:
        add(request_id, prompt, params)
        if request_id == "r1":
            detokenizer = engine._sequences["r1"].detokenizer
            monkeypatch.setattr(detokenizer, "append", lambda *_: 1 / 0)

    monkeypatch.setattr(engine, "add_request", sabotaged)
    outputs = serve(engine)
    assert outputs["r1"][-1].error_code == "engine_failed"
    assert {n: tokens(its) for n, its in outputs.items() if n != "r1"} == {
        name: its for name, its in expected.items() if name != "r1"
    }


def test_a_fault_loses_no_output(qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(qwen[1], "static:4")
    left = ["ends here"]
    scheduler = engine._parts.scheduler
    book = scheduler.book

    def once(chunk: Chunk, tag: PrecisionTag) -> None:
        book(chunk, tag)
        if chunk.sequence.request_id == "b" and left:
            raise RuntimeError(left.pop())

    monkeypatch.setattr(scheduler, "book", once)
    engine._outputs.append(RequestOutput("a", finish_reason="error"))
    engine.add_request("b", [5, 6], PARAMS[0])
    with pytest.raises(RuntimeError, match="ends here"):
        engine.step()
    engine.fail_running("the engine failed", "engine_failed")
    assert engine.has_work()
    assert [output.request_id for output in engine.step()] == ["a"]
    assert not engine.has_work()
    engine.check_integrity()


class Poison:
    """Experts of which one gives NaN, to the tokens of one request at one of its steps.

    The expert is whichever the request's token is routed to first in the second layer.
    """

    batch: Any = None

    def __init__(self, engine: Engine, request_id: str, output: int) -> None:
        runner = engine._parts.runner
        self.experts, self.expert = runner._experts, -1
        self.rows: list[int] = []
        run = runner.run

        def watched(chunks: list[Chunk]) -> Any:
            ends = [sum(c.count for c in chunks[: place + 1]) for place in range(len(chunks))]
            self.rows = [
                end - 1
                for end, chunk in zip(ends, chunks, strict=True)
                if chunk.sequence.request_id == request_id and len(chunk.sequence.output) == output
            ]
            result = run(chunks)
            self.rows = [0] if self.rows else []  # computed again, alone
            return result

        runner.run = watched  # type: ignore[method-assign]
        runner._experts = self
        engine._parts.skeleton.bind_experts(self)

    def __call__(self, slot: int, module: Any, x: Any, ids: Any, weights: Any) -> Any:
        self.experts.batch = self.batch
        out = self.experts(slot, module, x, ids, weights)
        if slot == 1:
            for row in self.rows:
                if self.expert < 0:
                    self.expert = int(ids[row, 0])
                if bool(((ids[row] == self.expert) & (weights[row] != 0)).any()):
                    out[row] = torch.nan
        return out


def test_the_expert_behind_numbers_that_are_not_finite_is_named(
    qwen: tuple[Any, Path], expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(qwen[1], "static:4")
    poison = Poison(engine, "r2", output=3)
    with caplog.at_level(logging.ERROR):
        outputs = serve(engine)
    assert outputs["r2"][-1].error_code == "nonfinite"
    assert outputs["r2"][-1].error == "the model gave logits that are not finite"
    assert tokens(outputs["r2"]) == expected["r2"][:3]
    assert {n: tokens(its) for n, its in outputs.items() if n != "r2"} == {
        name: its for name, its in expected.items() if name != "r2"
    }
    assert (engine.status().nonfinite, engine.status().failed) == (1, 1)
    layer = engine._parts.skeleton.geometry.layers[1]
    (message,) = caplog.messages
    assert message.endswith(f"layer {layer}, experts {poison.expert}")
