"""Hand-made samples, timelines and scores of a demo run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from pw.engine.request import BytesByClass, EngineStatus
from pw.evaluation.demo.checks import Run
from pw.evaluation.demo.load import Answer
from pw.evaluation.demo.scoring import Comparison, Score
from pw.evaluation.demo.timeline import Sample, Timeline

PAGES = 100


def status_json(**changes: Any) -> dict[str, Any]:
    """`/v1/pw/status` of a quiet engine with 100 pages, 60 of them weights."""
    base: dict[str, Any] = {
        "pages_total": PAGES,
        "pages_weights": 60,
        "pages_kv": 0,
        "page_bytes": 4096,
        "mean_bits": 6.0,
        "layer_bits": {0: 6.0, 1: 6.0},
    }
    base |= changes
    base.setdefault("pages_free", PAGES - base["pages_weights"] - base["pages_kv"])
    return asdict(EngineStatus(**base))


def sample(seconds: float, **changes: Any) -> Sample:
    return Sample.of_status(status_json(**changes), seconds)


def plan_record(reason: str, pages: int) -> dict[str, Any]:
    return {
        "step": 7,
        "reason": reason,
        "moves": 2,
        "pages": pages,
        "damage": 0.5,
        "mean_bits": 4.0,
    }


def timeline_of(*samples: Sample) -> Timeline:
    timeline = Timeline()
    for each in samples:
        timeline.add(each)
    return timeline


def squeezed() -> Timeline:
    """Quiet at 6 bits, 50 pages of KV at 3 bits, quiet at 6 bits again."""
    busy = {"running": 2, "pages_weights": 45, "pages_kv": 50, "mean_bits": 3.0, "step": 9}
    history = (plan_record("kv_pressure", 15), plan_record("idle", 15))
    over = {"plans": 2, "plan_history": history, "finished": 2, "step": 9}
    timeline = timeline_of(
        sample(0.0),
        sample(1.0),
        sample(2.0, plans=1, plan_history=history[:1], **busy),
        sample(6.0, **over),
        sample(8.0, **over),
    )
    timeline.mark("load")
    return timeline


def answer(text: str = "ok", **changes: Any) -> Answer:
    base: dict[str, Any] = {
        "text": text,
        "tokens_asked": 3,
        "tokens_made": 3,
        "finish_reason": "length",
        "first_token_seconds": 0.1,
        "seconds": 0.5,
        "logprobs": (-1.0, -0.5, -0.25),
    }
    return Answer(**(base | changes))


def run_of(timeline: Timeline, **changes: Any) -> Run:
    base: dict[str, Any] = {
        "timeline": timeline,
        "answers": [answer(), answer()],
        "requests": 2,
        "before": answer(),
        "after": answer(),
    }
    return Run(**(base | changes))


def score(policy: str, nll: list[float], expert_bytes: list[float], **held: int) -> Score:
    size = BytesByClass(**({"planes": int(np.mean(expert_bytes))} | held))
    bits = np.full(len(nll), 4.0)
    return Score(policy, np.array(nll), bits, np.array(expert_bytes), size)


def comparison(adaptive: list[float], equal: list[float]) -> Comparison:
    """Two chunks: unquantized 1.0 and 2.0 nats, uniform widths of 100 and 300 bytes."""
    sizes = {"planes": 0, "experts_dense": 800, "dense": 2**20, "tables": 5}
    return Comparison(
        dense=score("dense", [1.0, 2.0], [800.0, 800.0], **sizes),
        uniform=(
            score("static:2", [1.4, 2.4], [100.0, 100.0]),
            score("static:4", [1.1, 2.1], [300.0, 300.0]),
        ),
        adaptive=score("adaptive", adaptive, [100.0, 200.0]),
        equal_bytes=np.array(equal),
        snapshots=2,
    )
