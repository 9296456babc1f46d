"""What it costs to answer from a prefix whose KV was computed at narrower widths than now.

Every window is scored from its middle on, with all experts at their widest: once with the first
half computed so too, and for every narrower width once with the first half left in the prefix cache
by an engine at that width. Beside it, the same tokens with everything computed at that width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pw.config import EngineConfig, PlannerConfig, PrecisionPolicy
from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.errors import PwError
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import Row, interval, markdown, show
from pw.evaluation.lab.texts import read_documents, spread_windows

TOKENS, PREFIX, WINDOWS = 512, 256, 64
_TURNS = 10_000  # of an idle engine, far more than planes need to come back
_BYTES = 1 << 30

Losses = NDArray[np.float64]  # [windows] nats per scored token


def run(room: Room) -> dict[str, Any]:
    """Measure every width."""
    documents = read_documents(room.texts.heldout, without=room.texts.without)
    windows = spread_windows(documents, room.tokenizer, TOKENS, WINDOWS)
    prompts = [window.tolist() for window in windows]
    engine = _open(room)
    widest = room.model.widths[-1]
    _hold(engine, widest)
    base = _losses(engine, prompts)
    rows: list[Row] = []
    for bits in room.model.widths[:-1]:
        reused = np.concatenate([_reuse(engine, prompt, bits, widest) for prompt in prompts])
        _hold(engine, bits)
        everything = _losses(engine, prompts)
        _hold(engine, widest)
        rows.append(
            {
                "bits": bits,
                "reused": interval(reused, base),
                "everything": interval(everything, base),
            }
        )
    return {
        "tokens": TOKENS,
        "prefix": PREFIX,
        "windows": len(prompts),
        "widest": widest,
        "perplexity": float(np.exp(base.mean())),
        "rows": rows,
    }


def tables(result: dict[str, Any]) -> str:
    """Loss over computing everything at the widest widths."""
    head = ("width of the prefix", "prefix reused at the widest", "everything at that width")
    rows = [(row["bits"], show(row["reused"]), show(row["everything"])) for row in result["rows"]]
    return (
        f"Nats a token over {result['widest']} bits throughout (perplexity "
        f"{result['perplexity']:.3f}), {result['windows']} windows, tokens {result['prefix']} to "
        f"{result['tokens']}.\n\n{markdown(head, rows)}"
    )


def _open(room: Room) -> Engine:
    """An engine that reuses whatever it has, with room for everything."""
    return Engine.from_artifact(
        room.model.artifact.path,
        EngineConfig(
            memory_budget=_BYTES,
            policy=PrecisionPolicy.parse("adaptive"),
            device=room.model.device.type,
            max_num_batched_tokens=TOKENS,
            max_num_seqs=1,
            max_model_len=TOKENS + 1,
            prefix_cache_precision="any",
            planner=PlannerConfig(residual="off", idle_grace_seconds=0.0, dwell_steps=1),
        ),
    )


def _hold(engine: Engine, bits: int) -> None:
    """Bring all blocks to a width."""
    engine.set_policy(f"static:{bits}")
    for _ in range(_TURNS):
        if engine.status().mean_bits == bits:
            return
        engine.idle_turn()
    raise PwError(f"the engine does not come to {bits} bits: {engine.status().mean_bits}")


def _reuse(engine: Engine, prompt: list[int], bits: int, widest: int) -> Losses:
    """Loss of the second half when the first was left behind at a width."""
    engine.reset_prefix_cache()
    _hold(engine, bits)
    last = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.generate([prompt[: PREFIX + 1]], last)
    _hold(engine, widest)
    return _losses(engine, [prompt], reused=PREFIX)


def _losses(engine: Engine, prompts: list[list[int]], reused: int = 0) -> Losses:
    """Loss of the second half of each prompt.

    Raises:
        PwError: Not as many tokens came from the prefix cache as should have.
    """
    if not reused:
        engine.reset_prefix_cache()
    scoring = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        prompt_logprobs=0,
        prompt_logprobs_start=PREFIX + 1,
    )
    losses = []
    for prompt in prompts:
        before = engine.status().prefix_cache_hits
        (answer,) = engine.generate([prompt], scoring)
        if engine.status().prefix_cache_hits - before != reused:
            raise PwError(f"not {reused} tokens came from the prefix cache")
        found = [entry.logprob for entry in answer.prompt_logprobs[PREFIX + 1 :] if entry]
        losses.append(-float(np.mean(found)))
    return np.array(losses)
