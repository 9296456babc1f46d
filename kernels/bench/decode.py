"""Decode steps by calls and from CUDA graphs in one engine: checked, timed, waits counted.

    python kernels/bench/decode.py                        # Qwen1.5-MoE-A2.7B, static:3 and dense
    python kernels/bench/decode.py --policies static:3 adaptive --batches 1 8 --json out.json

Weights are random, in the shape of a config. For each policy and batch size the same requests run
twice in one engine, without graphs and with them: tokens and log-probabilities are compared, then
decode steps are timed as their caller sees them (the median), with torch told to raise an error
at anything that waits for the device other than the one read of a step. The device's own time is
that of replays back to back. One table comes last.
"""

import argparse
import gc
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from records import about
from torch import Tensor

from pw.config import EngineConfig, PrecisionPolicy, parse_bytes
from pw.engine import Engine
from pw.engine.graphs.capture import Capture
from pw.engine.request import RequestOutput, SamplingParams
from pw.models.beside import opened
from pw.models.stand_in import write_folder

CONFIGS = Path(__file__).parents[2] / "pipelines" / "recipes" / "configs"
CHECKED = 16  # tokens of each answer compared
REPLAYS = 50
EAGER_STEPS = 10  # timed: they are slow


@dataclass
class Row:
    """One line of the table."""

    policy: str
    batch: int
    eager_ms: float
    plain_ms: float  # from graphs, each launched when the last has been read
    graph_ms: float  # from graphs, launched ahead
    device_ms: float
    equal_tokens: float  # share
    worst_logprob: float  # greatest difference of log-probabilities while tokens are equal
    waits: int  # steps that waited elsewhere
    grown_bytes: int  # allocated after the steps beyond before


@contextmanager
def graphs(engine: Engine, on: bool, ahead: bool = True) -> Iterator[None]:
    """Decode with or without the captured steps, and with them launched ahead or not."""
    runner, launcher = engine._parts.runner, engine._launcher
    steps = runner.steps
    runner.steps = steps if on else None
    launcher._overlaps = ahead
    try:
        yield
    finally:
        runner.steps = steps
        launcher._overlaps = True


def start(engine: Engine, batch: int, prompt: int, tokens: int, seed: int) -> list[RequestOutput]:
    """Add requests and step until all of them decode; outputs so far."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    for number, ids in enumerate(rng.integers(100, 5000, size=(batch, prompt)).tolist()):
        engine.add_request(f"bench-{number}", ids, params)
    outputs, waiting = [], {f"bench-{number}" for number in range(batch)}
    while waiting:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            outputs.append(output)
            waiting.discard(output.request_id)
    return outputs


def answers(
    engine: Engine, batch: int, prompt: int, *, on: bool
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of a batch."""
    with graphs(engine, on):
        outputs = start(engine, batch, prompt, CHECKED, seed=batch)
        while engine.has_work():
            outputs += engine.step()
    engine.reset_prefix_cache()
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in range(batch)]
    for output in outputs:
        tokens, logprobs = found[int(output.request_id.removeprefix("bench-"))]
        tokens += output.token_ids
        logprobs += [entry.logprob for entry in output.logprobs]
    return found


def differences(engine: Engine, batch: int, prompt: int) -> tuple[float, float]:
    """Share of equal tokens, and the worst difference of log-probabilities before one differs."""
    eager, captured = (answers(engine, batch, prompt, on=on) for on in (False, True))
    same, worst = 0, 0.0
    for (mine, my_logprobs), (its, its_logprobs) in zip(captured, eager, strict=True):
        for a, b, p, q in zip(mine, its, my_logprobs, its_logprobs, strict=True):
            if a != b:
                break
            same += 1
            worst = max(worst, abs(p - q))
    return same / (batch * CHECKED), worst


def count_waits(engine: Engine, steps: int = 8) -> int:
    """Times that torch waited for the device in so many steps, the read of the tokens left out."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(steps):
                engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message).splitlines()[0] for warning in caught]
    for message in sorted(set(waits)):
        print(f"  waited {waits.count(message)} times: {message}")
    return len(waits)


def device_milliseconds(engine: Engine, batch: int) -> float:
    """Of one captured step, replayed back to back on what its last step left."""
    steps = engine._parts.runner.steps
    assert steps is not None
    with torch.inference_mode():
        return replay_milliseconds(steps.bucket(batch).run)


def replay_milliseconds(run: Callable[[], Tensor]) -> float:
    """Of one of many runs back to back."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    for _ in range(REPLAYS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


class NoAttention:
    """Stands in for a batch's attention: queries go on as they are, nothing is stored."""

    def attend(self, _layer: int, q: Tensor, _k: Tensor, _v: Tensor, **_: Any) -> Tensor:
        return q

    def attend_rotated(
        self, layer: int, qkv: Tensor, *_: Any, head_size: int, shared_values: bool, **__: Any
    ) -> Tensor:
        heads = qkv.unflatten(-1, (-1, head_size))
        return heads[:, : heads.shape[1] - (1 if shared_values else 2) * self.kv_heads[layer]]

    def __init__(self, engine: Engine) -> None:
        layers = engine._parts.skeleton.kv.layers
        self.kv_heads = {layer.layer: layer.kv_heads for layer in layers}


class Parts(NamedTuple):
    """Milliseconds of a captured step, and of parts of it by themselves."""

    step: float
    no_experts: float  # routed ones that hand on what they are given
    no_attention: float  # nor attention
    experts: float  # the routed ones of all layers, one call after the other


def device_parts(engine: Engine, batch: int) -> Parts:
    """A step in parts, on what its last run left."""
    steps, skeleton = engine._parts.runner.steps, engine._parts.skeleton
    assert steps is not None
    bucket, experts = steps.bucket(batch), engine._parts.runner._experts
    inputs, calls = bucket.inputs.on_device, []

    def handed_on(*call: Any) -> Tensor:
        calls.append(call)
        return call[2]  # type: ignore[no-any-return]

    def step(context: Any) -> Tensor:
        bucket.batch.begin()
        with opened(skeleton.device):
            return skeleton.logits(skeleton.hidden(inputs.ids, inputs.positions, context))

    def milliseconds(run: Callable[[], Any]) -> float:
        return replay_milliseconds(Capture(skeleton.device)(run))

    experts.batch = bucket.batch
    skeleton.bind_experts(handed_on)
    try:
        with torch.inference_mode():
            step(bucket.batch)
            given = list(calls)
            found = [
                milliseconds(lambda: step(bucket.batch)),
                milliseconds(lambda: step(NoAttention(engine))),
                milliseconds(lambda: [experts(*call) for call in given][-1]),
            ]
            skeleton.bind_experts(experts)
            return Parts(milliseconds(lambda: step(bucket.batch)), *found)
    finally:
        skeleton.bind_experts(experts)
        experts.batch = None


def print_kernels(engine: Engine, batch: int, lines: int = 16) -> None:
    """Where the device's time of one captured step goes: kernels by name."""
    steps = engine._parts.runner.steps
    assert steps is not None
    bucket = steps.bucket(batch)
    with (
        torch.inference_mode(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
    ):
        for _ in range(10):
            bucket.run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:lines]:
        milliseconds = event.self_device_time_total / 1e4
        print(f"  {milliseconds:7.3f} ms {event.count // 10:5} calls  {event.key[:100]}")


def measure(engine: Engine, policy: str, batch: int, prompt: int, steps: int) -> Row:
    """One line of the table."""
    equal, worst = differences(engine, batch, prompt)
    with requests_running(engine, batch, prompt, EAGER_STEPS, on=False) as eager:
        pass
    with requests_running(engine, batch, prompt, steps, on=True, ahead=False) as plain:
        pass
    with requests_running(engine, batch, prompt, steps, on=True) as captured:
        before = torch.cuda.memory_allocated()
        waits = count_waits(engine)
        grown = torch.cuda.memory_allocated() - before
        device = device_milliseconds(engine, batch)
    return Row(
        policy,
        batch,
        statistics.median(eager),
        statistics.median(plain),
        statistics.median(captured),
        device,
        equal,
        worst,
        waits,
        grown,
    )


@contextmanager
def requests_running(
    engine: Engine, batch: int, prompt: int, steps: int, *, on: bool, ahead: bool = True
) -> Iterator[list[float]]:
    """Milliseconds of decode steps, by the caller's clock; their requests go on inside."""
    warm, rest = 5, 16
    times = []
    with graphs(engine, on, ahead):
        start(engine, batch, prompt, warm + steps + rest, seed=1000 + batch)
        for number in range(warm + steps):
            begin = time.perf_counter()
            engine.step()
            if number >= warm:
                times.append((time.perf_counter() - begin) * 1e3)
        yield times
        for number in range(batch):
            engine.abort(f"bench-{number}")
        engine.reset_prefix_cache()


def table(rows: list[Row]) -> str:
    """The rows for reading."""
    lines = [
        "| policy | T | by calls, ms | graphs, one after the other, ms | graphs, ms "
        "| device alone, ms | tokens/s | equal tokens | worst logprob difference | waits "
        "| bytes grown |",
        "|" + "---|" * 11,
    ]
    lines += [
        f"| {row.policy} | {row.batch} | {row.eager_ms:.2f} | {row.plain_ms:.3f} "
        f"| {row.graph_ms:.3f} "
        f"| {row.device_ms:.3f} | {row.batch / row.graph_ms * 1e3:.0f} "
        f"| {row.equal_tokens:.1%} | {row.worst_logprob:.1e} | {row.waits} "
        f"| {row.grown_bytes} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Check and measure, policy by policy; an engine at a time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen1.5-moe-a2.7b", help="of pipelines/recipes/configs")
    parser.add_argument("--policies", nargs="+", default=["static:3", "dense"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--memory-budget", default="60GiB")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a step")
    parser.add_argument("--parts", action="store_true", help="time parts of a step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows: list[Row] = []
    parts_of: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_folder(CONFIGS / f"{options.model}.json", folder, {})
        for policy in options.policies:
            began = time.perf_counter()
            engine = Engine.from_artifact(
                folder,
                EngineConfig(
                    memory_budget=parse_bytes(options.memory_budget),
                    policy=PrecisionPolicy.parse(policy),
                    device="cuda",
                    load_format="dummy",
                    max_num_seqs=max(options.batches),
                    max_model_len=options.max_model_len,
                    async_scheduling=True,
                ),
            )
            print(f"{policy}: started in {time.perf_counter() - began:.1f} s")
            if engine._parts.runner.steps is None:
                raise SystemExit(f"{policy}: nothing was captured, see the warning above")
            for batch in options.batches:
                rows.append(measure(engine, policy, batch, options.prompt, options.steps))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
                if options.parts:
                    parts = device_parts(engine, batch)
                    parts_of.append({"policy": policy, "batch": batch} | parts._asdict())
                    print(
                        f"  device {parts.step:.3f} ms, experts alone {parts.experts:.3f}, "
                        f"without experts {parts.no_experts:.3f}, "
                        f"nor attention {parts.no_attention:.3f}"
                    )
                if options.kernels:
                    print_kernels(engine, batch)
            engine.close()
            del engine
            gc.collect()
            torch.cuda.empty_cache()
    if options.json:
        how = {"options": {key: str(value) for key, value in vars(options).items()}}
        found = about() | how | {"rows": [asdict(row) for row in rows], "parts_ms": parts_of}
        options.json.write_text(json.dumps(found))
    print(table(rows))


if __name__ == "__main__":
    main()
