"""Memory that changes while the engine itself serves: adaptive widths, fixed widths, dense.

The load of the study `memory` with shorter contexts, of held-out prompts, served by an engine for
each policy within the same bytes: they hold the load's KV at its peak beside weights of few bits.
Quality is teacher-forced on the realised timeline: the held-out windows, in order, get the widths
of equal parts of the tokens made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from pw.blocks import MODULES
from pw.config import EngineConfig, PlannerConfig, PrecisionPolicy
from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.errors import BudgetError, PwError
from pw.evaluation.lab.changing_memory import Arena, FixedWeights, Outcome, Request
from pw.evaluation.lab.model import Bits
from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies.common import Row, markdown, show
from pw.evaluation.lab.studies.memory import load, quality
from pw.evaluation.lab.texts import read_documents, spread_windows

LONGEST = 512  # tokens of a context
PEAK_BITS = (2.4, 3.0, 3.5)  # mean bits of weights that fit beside the KV at the load's peak
RUNNING = 8  # requests at a time
ADAPTIVE, DENSE = "adaptive", "dense"
POLICIES = (ADAPTIVE, "static:3", "static:4", DENSE)
_PROBE_BYTES = 1 << 30  # more than any model of the lab needs


def run(room: Room) -> dict[str, Any]:
    """Serve the load under every policy within every number of bytes; score the timelines."""
    requests = load(LONGEST)
    documents = read_documents(room.texts.heldout, without=room.texts.without)
    texts = [
        window.tolist()
        for window in spread_windows(documents, room.tokenizer, LONGEST, len(requests))
    ]
    rows: list[Row] = []
    for peak, budget in zip(PEAK_BITS, _budgets(room, requests), strict=True):
        head = {"peak_bits": peak, "budget_bytes": budget}
        rows += [head | row for row in _rows(room, budget, requests, texts)]
    return {"rows": rows, "requests": len(requests), "longest": LONGEST, "running": RUNNING}


def _rows(
    room: Room, budget: int, requests: list[Request], texts: list[list[int]]
) -> Iterator[Row]:
    """Every policy within one number of bytes."""
    outcomes: dict[str, tuple[Outcome, Row]] = {}
    for policy in POLICIES:
        try:
            outcomes[policy] = _served(room, policy, budget, requests, texts)
        except BudgetError as error:
            yield {"policy": policy, "failed": error.message}
    lab, parts = room.heldout, len(room.heldout.lab.windows)
    adaptive = lab.score(outcomes[ADAPTIVE][0].allocations(parts))
    for policy, (outcome, work) in outcomes.items():
        timeline = outcome.allocations(parts)
        row = quality(room, timeline, lab.score(timeline), adaptive)
        yield {"policy": policy} | row | work


def _config(room: Room, policy: str, budget: int) -> EngineConfig:
    return EngineConfig(
        memory_budget=budget,
        policy=PrecisionPolicy.parse(policy),
        device=room.model.device.type,
        max_num_seqs=RUNNING,
        max_model_len=LONGEST,
        enable_prefix_caching=False,  # what was computed before a preemption is computed again
        checkpoint=room.model.checkpoint.path,
        planner=PlannerConfig(residual="off"),
    )


def _budgets(room: Room, requests: list[Request]) -> list[int]:
    """What is never quantized, the most KV that the load ever has, and weights of `PEAK_BITS`."""
    engine = Engine.from_artifact(
        room.model.artifact.path, _config(room, f"static:{room.model.widths[0]}", _PROBE_BYTES)
    )
    try:
        status = engine.status()
        page = status.page_bytes
        fixed = status.bytes.total - (status.pages_weights + status.pages_free) * page
        nothing = FixedWeights(room.model.unquantized(), 0)
        plenty = Arena(1 << 30, engine.pages_for_tokens, nothing, RUNNING, 0)
        kv = plenty.serve(requests).most_kv
    finally:
        engine.close()
    free = 1 - PlannerConfig().low_watermark
    wanted = [kv + math.ceil(room.budget(bits) / page) for bits in PEAK_BITS]
    return [fixed + math.ceil(pages / free) * page for pages in wanted]


def _served(
    room: Room, policy: str, budget: int, requests: list[Request], texts: list[list[int]]
) -> tuple[Outcome, Row]:
    """Serve every request; who had which widths when, and the work that it took.

    Raises:
        BudgetError: The policy's weights and one context do not fit.
    """
    engine = Engine.from_artifact(room.model.artifact.path, _config(room, policy, budget))
    try:
        started = time.monotonic()
        outcome = _timeline(room, engine, requests, texts)
        seconds = time.monotonic() - started
        status = engine.status()
    finally:
        engine.close()
    if status.failed or status.bytes_over_budget:
        raise PwError(f"{status.failed} failed, {status.bytes_over_budget} bytes over the budget")
    return outcome, {
        "steps": outcome.steps,
        "mean_delay_steps": round(float(np.mean(outcome.delays))),
        "preemptions": status.preemptions,
        "computed_tokens": status.step_tokens,
        "transitions": status.transitions,
        "moved_mb": round(status.bytes_reloaded / 1e6, 1),
        "seconds": round(seconds, 1),
    }


def _timeline(
    room: Room, engine: Engine, requests: list[Request], texts: list[list[int]]
) -> Outcome:
    coming = sorted(enumerate(requests), key=lambda pair: pair[1].arrives)
    outcome, since = Outcome(), {}
    bits, moved, made = _bits(room, engine), engine.status().transitions, 0
    while coming or engine.has_work():
        while coming and coming[0][1].arrives <= outcome.steps:
            number, request = coming.pop(0)
            wanted = SamplingParams(max_tokens=request.output, temperature=0.0, ignore_eos=True)
            since[str(number)] = outcome.steps
            engine.add_request(str(number), texts[number % len(texts)][: request.prompt], wanted)
        outcome.steps += 1
        if not engine.has_work():
            engine.idle_turn()
            continue
        ended = [out.request_id for out in engine.step() if out.finish_reason is not None]
        outcome.delays += [outcome.steps - since[name] for name in ended]
        status = engine.status()
        if status.generation_tokens > made:
            outcome.timeline.append((status.generation_tokens - made, bits))
            made = status.generation_tokens
        if status.transitions != moved:  # what landed counts from the next step on
            bits, moved = _bits(room, engine), status.transitions
    return outcome


def _bits(room: Room, engine: Engine) -> Bits:
    """Widths [n] of now; unquantized experts have none."""
    layers = engine.precision_map()["layers"]
    if not layers:
        return room.model.unquantized()
    blocks = np.array([[layer[module] for module in MODULES] for layer in layers])  # [L, 2, E]
    return np.asarray(blocks.transpose(0, 2, 1).ravel(), dtype=np.int64)


def tables(result: dict[str, Any]) -> str:
    """Markdown."""
    head = (
        "bits at the peak", "policy", "mean bits (least)", "NLL over BF16 [95 %]", "KL",
        "KL over adaptive [95 %]", "NLL over adaptive [95 %]", "steps a request", "preempted",
        "computed tokens", "MB copied",
    )  # fmt: skip
    rows = [
        (f"{row['peak_bits']:g}", row["policy"], "does not fit", *["-"] * (len(head) - 3))
        if "failed" in row
        else (
            f"{row['peak_bits']:g}", row["policy"],
            f"{row['mean_bits']:.2f} ({row['least_bits']:.2f})" if "mean_bits" in row else "16",
            show(row["nll"]), f"{row['kl']['mean']:.4f}", show(row["kl_over_adaptive"]),
            show(row["nll_over_adaptive"]), row["mean_delay_steps"], row["preemptions"],
            row["computed_tokens"], row["moved_mb"],
        )
        for row in result["rows"]
    ]  # fmt: skip
    return markdown(head, rows)
