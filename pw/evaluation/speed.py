"""How fast: tokens per second of our engine and of transformers' `generate`, time of the planner.

Both sides get the same prompts and make the same number of tokens, prefill included, after one
run to warm up. Wall-clock times on a shared machine: the median of a few runs is reported.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pw.engine.request import RequestOutput, SamplingParams
from pw.errors import PwError
from pw.planning.planner import PlannerState, plan


class GeneratingEngine(Protocol):
    """What a speed run needs of the engine."""

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        """Queue one prompt."""

    def step(self) -> list[RequestOutput]:
        """Run one forward step."""

    def has_work(self) -> bool:
        """Whether any request is not finished."""


@dataclass(frozen=True)
class Load:
    """A batch of equal requests that all start at once."""

    batch_size: int
    input_len: int  # tokens of each prompt
    output_len: int  # tokens made for each prompt

    def prompts(self, vocabulary: int, seed: int = 0) -> list[list[int]]:
        """Random prompts; the same for the same seed."""
        rng = np.random.default_rng(seed)
        return rng.integers(vocabulary, size=(self.batch_size, self.input_len)).tolist()  # type: ignore[no-any-return]

    @property
    def generated(self) -> int:
        """Tokens made by the whole batch."""
        return self.batch_size * self.output_len


def engine_speed(engine: GeneratingEngine, load: Load, vocabulary: int, *, repeats: int) -> float:
    """Tokens per second of our engine, over the whole batch.

    Every run has prompts of its own: the prefix cache, which the other side lacks, does not answer.
    """
    params = SamplingParams(max_tokens=load.output_len, temperature=0.0, ignore_eos=True)
    seeds = itertools.count()

    def run() -> None:
        for number, prompt in enumerate(load.prompts(vocabulary, next(seeds))):
            engine.add_request(f"bench-{number}", prompt, params)
        made = 0
        while engine.has_work():
            for output in engine.step():
                if output.error is not None:
                    raise PwError(f"a request of the benchmark failed: {output.error}")
                made += len(output.token_ids)
        if made != load.generated:
            raise PwError(f"the benchmark made {made} tokens, expected {load.generated}")

    return load.generated / _median_seconds(run, repeats)


def transformers_speed(
    checkpoint: Path, loads: list[Load], vocabulary: int, *, repeats: int
) -> list[float]:
    """Tokens per second of transformers' own `generate` on the unquantized checkpoint.

    It runs in its own dtype on a GPU and in float32 on a CPU, as our engine does. On a CPU each
    load is timed on one thread and on all of torch's, and the faster counts: small steps are often
    faster on one, and our engine chooses too.

    Args:
        checkpoint: Folder of the checkpoint.
        loads: One result per load.
        vocabulary: Prompts are drawn below this id.
        repeats: Timed runs of each load.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if device == "cuda" else torch.float32
    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    model = loaded.to(device).eval()
    thread_counts = {1, torch.get_num_threads()} if device == "cpu" else {torch.get_num_threads()}
    speeds = []
    for load in loads:
        ids = torch.tensor(load.prompts(vocabulary), device=device)
        settings: Any = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=load.output_len,
            min_new_tokens=load.output_len,
            do_sample=False,
            pad_token_id=0,
        )

        def run(ids: torch.Tensor = ids, settings: Any = settings) -> None:
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings
            )
            if made.shape[1] != ids.shape[1] + settings.max_new_tokens:
                raise PwError(f"transformers made {made.shape[1] - ids.shape[1]} tokens a prompt")

        with torch.inference_mode():
            seconds = [_on_threads(count, run, repeats) for count in thread_counts]
        speeds.append(load.generated / min(seconds))
    return speeds


def _on_threads(count: int, run: Callable[[], None], repeats: int) -> float:
    """Median seconds of a run with torch on so many CPU threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return _median_seconds(run, repeats)
    finally:
        torch.set_num_threads(before)


def planner_seconds(*, blocks: int = 2880, widths: int = 6, repeats: int = 20) -> float:
    """Median seconds of one plan that gives up half of what can be given up.

    The default is a table of 17,280 (block, width) entries: 24 layers of 60 experts, 2 to 7 bits.
    """
    rng = np.random.default_rng(0)
    bits = np.arange(2, 2 + widths)
    plane = 1 << 17
    cost = np.broadcast_to(bits * plane + (1 << bits) * 2048, (blocks, widths)).astype(np.int64)
    scale = rng.lognormal(sigma=2.0, size=(blocks, 1))
    damage = scale * 4.0 ** -(bits - 2) * rng.uniform(0.8, 1.2, size=(blocks, widths))
    state = PlannerState(
        widths=bits,
        bits=np.full(blocks, bits[-1]),
        floors=np.full(blocks, bits[0]),
        ceil=np.full(blocks, bits[-1]),
        cost_bytes=cost,
        damage=damage,
    )
    target = int((cost[:, -1] - cost[:, 0]).sum()) // 2

    def run() -> None:
        if not plan(state, target).satisfied:
            raise PwError("the benchmark's plan misses its target")

    return _median_seconds(run, repeats)


def _median_seconds(run: Callable[[], None], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def describe(result: Mapping[str, Any]) -> str:
    """A comparison with transformers, a line for each figure."""
    lines = [
        f"calibrate `{result['model']}`  {result['calibrate_seconds']:.1f} s",
        f"planner, {result['planner_entries']:,} entries  {result['planner_seconds'] * 1e3:.2f} ms",
    ]
    lines += [
        f"batch {row['batch_size']}, {row['input_len']} + {row['output_len']} tokens  "
        f"{row['pw']:.0f} tokens/s at {result['mean_bits']:.2f} bits, "
        f"transformers {row['transformers']:.0f}, ratio {row['pw'] / row['transformers']:.2f}"
        for row in result["tokens_per_second"]
    ]
    return "\n".join(lines)
