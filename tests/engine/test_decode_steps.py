"""Decode steps of fixed shape beside packed ones: same tokens, same log-probabilities.

On a CPU the steps run by calls, in the shape in which a GPU replays them: padded to a bucket, all
inputs at fixed addresses, block tables followed by copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pw.engine import Engine
from pw.engine import experts as experts_module
from pw.engine import runner as runner_module
from pw.engine.graphs import batch, start
from pw.engine.graphs.capture import Step, eager
from pw.engine.graphs.decode import DecodeSteps, bucket_sizes
from pw.engine.request import SamplingParams
from pw.engine.sequence import Chunk
from pw.engine.start import build
from pw.models import flat
from pw.models.flat_attention import FlatAttention
from support.engines import make_artifact, open_engine, random_prompt, tight_budget

LENGTHS = (45, 1, 17, 30, 2, 64, 9)


def with_steps(engine: Engine, make: Callable[[Step], Step] = eager, most: int = 8) -> list[int]:
    """Let an engine decode in fixed shapes; the batch sizes that went through them, as they do."""
    runner = engine._parts.runner
    runner.steps = DecodeSteps(runner._skeleton, runner._experts, engine._parts.kv, most, make)
    run, sizes = runner.steps.run, []

    def watched(chunks: Any, *rest: Any) -> Tensor:
        sizes.append(len(chunks))
        return run(chunks, *rest)

    runner.steps.run = watched  # type: ignore[method-assign]
    return sizes


def requests(count: int = len(LENGTHS)) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, greedy and sampled, that end at different times."""
    params = [
        SamplingParams(
            temperature=0.0 if seed % 2 else 0.8,
            top_p=0.9 if seed % 3 else 1.0,
            seed=seed,
            max_tokens=6 + 5 * (seed % 4),
            ignore_eos=True,
            logprobs=2,
            frequency_penalty=0.5 if seed == 3 else 0.0,
        )
        for seed in range(count)
    ]
    return [random_prompt(LENGTHS[seed % 7], seed) for seed in range(count)], params


def assert_same(found: Any, expected: Any, *, exact: bool) -> None:
    """The same tokens and texts; log-probabilities equal to the bit, or to rounding."""
    for mine, its in zip(found, expected, strict=True):
        assert (mine.token_ids, mine.finish_reason) == (its.token_ids, its.finish_reason)
        got, wanted = ([entry.logprob for entry in done.logprobs] for done in (mine, its))
        if exact:
            assert got == wanted
        else:
            assert got == pytest.approx(wanted, abs=2e-5)


def test_buckets_are_powers_of_two_and_the_most() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(50) == [1, 2, 4, 8, 16, 32, 50]


@pytest.mark.parametrize(
    "kind",
    ["qwen2_moe_window", "mixtral", "gemma4_shared", "gpt_oss", "deepseek_v2"],
)
def test_architectures_decode_in_fixed_shapes(kind: str, tmp_path: Path) -> None:
    _, artifact = make_artifact(kind, tmp_path)
    prompts, params = requests()
    expected = open_engine(artifact, "static:4").generate(prompts, params)
    engine = open_engine(artifact, "static:4")
    sizes = with_steps(engine)
    assert_same(engine.generate(prompts, params), expected, exact=False)
    assert {3, 5, 6, 7} & set(sizes)  # some were padded
    engine.check_integrity()


@pytest.mark.parametrize("kind", ["qwen2_moe_window", "qwen3_moe"])
def test_steps_rotate_store_and_attend_in_one_call_as_on_a_gpu(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, artifact = make_artifact(kind, tmp_path)
    prompts, params = requests()
    expected = open_engine(artifact, "static:4").generate(prompts, params)
    calls = []

    class OnGpu(FlatAttention):
        def __init__(self, attention: Any, norm: Any, _: bool) -> None:
            super().__init__(attention, norm, kernels=True)

    attend = batch.joint_attention.attend

    def watched(*args: Any, **options: Any) -> Tensor:
        calls.append(len(args[0]))
        return attend(*args, **options)

    monkeypatch.setattr(flat, "FlatAttention", OnGpu)
    monkeypatch.setattr(batch.joint_attention, "attend", watched)
    engine = open_engine(artifact, "static:4")
    with_steps(engine)
    assert_same(engine.generate(prompts, params), expected, exact=False)
    assert {4, 8} <= set(calls)
    engine.check_integrity()


def steps_of(engine: Engine) -> DecodeSteps:
    steps = engine._parts.runner.steps
    assert steps is not None
    return steps


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_and_found_prefixes_change_nothing(
    qwen: tuple[Any, Path], caching: bool
) -> None:
    prompts, params = requests(12)
    prompts = [prompts[5][:32] + prompt for prompt in prompts]
    params = [replace(its, max_tokens=60) for its in params]
    settings: dict[str, Any] = {"enable_prefix_caching": caching}
    budget = tight_budget(qwen[1], 170, "static:4", **settings)
    packed, stepped = (
        open_engine(qwen[1], "static:4", memory_budget=budget, **settings) for _ in range(2)
    )
    sizes = with_steps(stepped)
    expected = packed.generate(prompts, params)
    assert_same(stepped.generate(prompts, params), expected, exact=False)
    assert stepped.status().preemptions > 0
    assert (stepped.status().prefix_cache_hits > 0) == caching
    assert len(sizes) > 40
    stepped.check_integrity()


def test_bits_may_change_between_any_two_steps(qwen: tuple[Any, Path]) -> None:
    prompts, params = requests()

    def serve(engine: Engine) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for number, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(f"r{number}", prompt, its)
        for turn in range(10_000):
            if not engine.has_work():
                break
            engine.set_policy(f"static:{(6, 2, 4, 3)[turn % 4]}")
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            engine.check_integrity()
        return tokens

    packed, stepped = (open_engine(qwen[1], enable_prefix_caching=False) for _ in range(2))
    sizes = with_steps(stepped)
    assert serve(stepped) == serve(packed)
    assert len(sizes) > 15


def test_adaptive_precision_sees_the_same_routing(qwen: tuple[Any, Path]) -> None:
    """Padding adds nothing to the routing statistics, in numbers of tokens nor in mass."""
    prompts, params = requests()
    packed, stepped = (open_engine(qwen[1], min_bits=4, max_bits=4) for _ in range(2))
    with_steps(stepped)
    masses = []
    for engine in (packed, stepped):
        engine.generate(prompts, params)
        quality = engine._parts.quality
        assert quality is not None
        masses.append(quality.mass())
    np.testing.assert_allclose(masses[1], masses[0], rtol=1e-5)
    assert masses[0].std() > 0


def test_making_the_steps_touches_no_page_and_counts_nothing(qwen: tuple[Any, Path]) -> None:
    """What a capture runs is all padding."""
    engine = open_engine(qwen[1])
    before = engine._parts.arena.pages.clone()
    calls = []

    def called(step: Step) -> Step:
        logits = step()
        calls.append(len(logits))
        assert logits.isfinite().all()
        return step

    with_steps(engine, called, most=6)
    assert calls == [6, 4, 2, 1]  # largest first
    assert torch.equal(engine._parts.arena.pages, before)
    experts: Any = engine._parts.runner._experts
    assert not experts._counter.sums.any()


def test_a_step_always_reads_the_same_addresses(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:4")
    with_steps(engine)

    def addresses() -> list[int]:
        steps = steps_of(engine)
        tensors = [bucket.inputs._buffer for bucket in steps._buckets] + steps._tables._tables
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    engine.generate(*requests())
    assert addresses() == before


class _Asked(TorchDispatchMode):
    """Notes operations that would make the host wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if any(name in str(func) for name in self.WAITS):
            self.waits.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["qwen2_moe", "gemma4_text"])
def test_no_operation_of_a_decode_step_waits_for_the_device(kind: str, tmp_path: Path) -> None:
    """From the forward pass to the draw; what the kernels do inside is not torch's."""
    sizes = {"head_dim": 16, "global_head_dim": 16} if "gemma" in kind else {"head_dim": 16}
    _, artifact = make_artifact(kind, tmp_path, **sizes)  # the fast kernels on a CPU want 16
    engine = open_engine(artifact, "static:4", async_scheduling=True)
    with_steps(engine)
    launch, decodes = engine._computer.launch, []

    def watched(chunks: list[Chunk], *rest: Any) -> Any:
        with _Asked() as asked:
            flight = launch(chunks, *rest)
        if all(chunk.start >= len(chunk.sequence.prompt) for chunk in chunks):
            decodes.append((rest[1] is not None, asked))
        return flight

    engine._computer.launch = watched  # type: ignore[method-assign]
    prompts, params = requests()
    for penalty in (0.5, 0.0):  # penalties keep steps apart
        its = [replace(p, min_tokens=2, top_k=9, frequency_penalty=penalty) for p in params]
        engine.generate(prompts, its)
    assert {ahead for ahead, _ in decodes} == {False, True}
    for _, asked in decodes:
        assert asked.operations > 50
        assert asked.waits == []


def test_what_cannot_be_captured_runs_as_before_and_is_told_once(
    qwen: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(qwen[1], "static:4")
    runner = engine._parts.runner

    def new_capture(_: torch.device) -> Callable[[Step], Step]:
        def capture(step: Step) -> Step:
            step()
            raise RuntimeError("operation not permitted when stream is capturing")

        return capture

    made = (runner._skeleton, runner._experts, engine._parts.kv, 8)
    with caplog.at_level(logging.WARNING):
        assert start.capture_steps(*made, new_capture) is None
    (message,) = caplog.messages
    assert message.startswith("decode runs without CUDA graphs, slower: RuntimeError: operation")
    prompts, params = requests()
    assert all(done.error is None for done in engine.generate(prompts, params))
    assert start.capture_steps(*made, lambda _: eager) is not None


def test_an_error_in_a_rehearsed_prompt_costs_decode_nothing(
    qwen: tuple[Any, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    engine = open_engine(qwen[1], "static:4")
    runner = engine._parts.runner
    monkeypatch.setattr(start, "rehearse_prompts", broken)
    with caplog.at_level(logging.WARNING):
        made = (runner._skeleton, runner._experts, engine._parts.kv, 8)
        steps = start.capture_steps(*made, lambda _: eager)
    assert steps is not None
    assert steps.sizes == bucket_sizes(8)
    assert caplog.messages == [
        "what prompts need is not all compiled yet: RuntimeError: out of memory"
    ]


def test_a_draw_that_does_not_compile_at_the_start_is_told_once(
    qwen: tuple[Any, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Tensor:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(build, "decodes_in_graphs", lambda *_: True)
    monkeypatch.setattr(runner_module, "capture_steps", lambda *made: DecodeSteps(*made, eager))
    monkeypatch.setattr(runner_module, "likeliest", broken)
    with caplog.at_level(logging.WARNING):
        engine = open_engine(qwen[1], "static:4")
        assert caplog.messages == ["draws are not compiled yet: RuntimeError: no compiler"]
        engine._parts.runner.capture(8)  # as ranks that never draw
    assert len(caplog.messages) == 1
    assert engine._parts.runner.steps is not None
    prompts, params = requests()
    assert all(done.error is None for done in engine.generate(prompts, params))


def test_kernels_are_compiled_before_steps_are_captured(
    qwen: tuple[Any, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(qwen[1], "static:4")
    runner, log = engine._parts.runner, []
    experts: Any = runner._experts
    called, joined = experts.__call__, experts.joined

    class Rehearsal:
        compiled, folder = 3, Path("cache")

        def __enter__(self) -> Any:
            log.append("rehearsal")
            return self

        def __exit__(self, *_: object) -> None:
            log.append("compiled")

    def noted(slot: int, module: Any, x: Tensor, *rest: Tensor) -> Tensor:
        log.append(len(x))
        return called(slot, module, x, *rest)

    def noted_joined(slot: int, module: Any, x: Tensor, *rest: Any, summed: bool) -> Any:
        log.append(len(x))
        return joined(slot, module, x, *rest, summed=summed)

    def new_capture(_: torch.device) -> Callable[[Step], Step]:
        log.append("capture")
        return eager

    monkeypatch.setattr(start, "rehearsal", lambda _: Rehearsal())
    monkeypatch.setattr(experts_module, "compiles", lambda x, *_, **__: x.dtype == torch.float32)
    monkeypatch.setattr(type(experts), "__call__", lambda _, *args: noted(*args))
    monkeypatch.setattr(type(experts), "joined", lambda _, *args, **kw: noted_joined(*args, **kw))
    with caplog.at_level(logging.INFO):
        start.capture_steps(runner._skeleton, experts, engine._parts.kv, 4, new_capture)
    layers = len(runner._skeleton.geometry.layers)
    steps = [size for size in (4, 2, 1) for _ in range(layers)]
    # no prompt of this engine has more tokens in a step; then what chunks leave
    prompts = [size for size in (32, 32, 32, 8, 4) for _ in range(layers)]
    tried = [*steps, *prompts, *start.prompt_sizes(32)]
    assert log == ["rehearsal", *tried, "compiled", "capture"]
    compiled, captured = caplog.messages
    assert compiled.startswith("compiled 3 kernels in ")
    assert compiled.endswith(" s, kept in cache")
    assert captured.startswith("captured decode graphs for batches of 1, 2, 4 in ")


def test_prompts_of_all_lengths_are_tried() -> None:
    assert start.prompt_sizes(9) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    sizes = start.prompt_sizes(2000)
    assert sizes[-1] == 2000
    assert all(b <= 1.2 * a + 1 for a, b in pairwise(sizes))
