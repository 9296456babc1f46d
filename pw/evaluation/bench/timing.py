"""How benchmarks use an engine: prompts, steps by the caller's clock, steps of the device alone."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

import numpy as np
import torch

from pw.engine import Engine
from pw.engine.graphs.capture import Step
from pw.engine.request import RequestOutput, SamplingParams
from pw.errors import PwError

_REPLAYS = 20


def random_prompts(engine: Engine, batch: int, context: int, seed: int) -> list[list[int]]:
    """Tokens [batch][context]."""
    random = np.random.default_rng([seed + 1, batch, context])
    vocabulary = engine.tokenizer.vocab_size
    return random.integers(vocabulary, size=(batch, context)).tolist()  # type: ignore[no-any-return]


def first_tokens(engine: Engine, batch: int, context: int, seed: int) -> tuple[float, float]:
    """Milliseconds to the first tokens of requests that arrive together: mean, and the last."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompts = random_prompts(engine, batch, context, seed)
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(f"prompt-{number}", prompt, params)
    times = list[float]()
    while engine.has_work():
        count = served(engine.step())
        times += [(time.perf_counter() - started) * 1e3] * count
    return float(np.mean(times)), times[-1]


def timed(engine: Engine, steps: int, sequences: int) -> list[float]:
    """Milliseconds of decode steps of so many sequences, as their caller sees them.

    Raises:
        PwError: A sequence got no token in a step, as it has failed or was preempted.
    """
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        outputs = engine.step()
        times.append((time.perf_counter() - started) * 1e3)
        if (got := served(outputs)) != sequences:
            raise PwError(
                f"{got} of {sequences} sequences got a token in a step",
                "raise --memory-budget, or lower --batch-size: others waited or were preempted",
            )
    return times


def served(outputs: Iterable[RequestOutput]) -> int:
    """Sequences that got a token in a step.

    Raises:
        PwError: One has failed.
    """
    got = 0
    for output in outputs:
        if output.error is not None:
            raise PwError(f"a request of the benchmark failed: {output.error}")
        got += bool(output.token_ids)
    return got


def in_turn(engine: Engine, steps: int, sequences: int) -> list[float] | None:
    """The same where each step is launched when the last has been read; None where all are."""
    launcher = engine._launcher
    if not launcher._overlaps:
        return None
    launcher._overlaps = False
    try:
        engine.step()  # reads the one on its way
        return timed(engine, steps, sequences)
    finally:
        launcher._overlaps = True


def step_tokens(engine: Engine) -> int:
    """Tokens of one step at most: as asked for, or what device, model and budget allow."""
    return engine._parts.scheduler._max_tokens


def captured(engine: Engine, batch: int) -> Step | None:
    """What repeats the last step on what it left; None where steps are made by calls."""
    steps = engine._parts.runner.steps
    if steps is None or not torch.cuda.is_available():
        return None
    return steps.bucket(batch).run


def device_milliseconds(run: Step) -> float:
    """Of a captured step replayed back to back."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        run()
        begin.record()
        for _ in range(_REPLAYS):
            run()
        end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / _REPLAYS


def end(engine: Engine) -> None:
    """Close an engine that is not the last of its process: graphs and memory are given back."""
    engine._parts.runner.release()
    engine.close()


def collect() -> None:
    """Let go of what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
