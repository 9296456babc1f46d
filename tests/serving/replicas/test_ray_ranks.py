"""A replica whose model two ranks share: the tokens of one; a lost rank is replaced with it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pw.cli.locate import artifact_path
from pw.config import EngineConfig, PrecisionPolicy
from pw.engine import Engine
from pw.engine.request import SamplingParams
from serving.replicas.cluster import Cluster, cluster, command, descendants
from serving.replicas.users import load

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
POLICY, PROMPT, TOKENS = "static:4", "The sky is", 24


def followers(running: Cluster) -> list[int]:
    """Processes of ranks beside the first."""
    return [p for p in descendants(running.raylet) if "engine.parallel.follower" in command(p)]


def text_of(running: Cluster) -> str:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    with running.http as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def text_of_one_rank() -> str:
    engine = Engine.from_artifact(
        artifact_path("tiny", quiet=True),
        EngineConfig(memory_budget=64 << 20, policy=PrecisionPolicy.parse(POLICY), device="cpu"),
    )
    prompt = engine.tokenizer.encode(PROMPT)
    done = engine.generate([prompt], SamplingParams(max_tokens=TOKENS, temperature=0))
    engine.close()
    return done[0].text


def test_two_ranks_serve_as_one_and_are_replaced_together(tmp_path: Path) -> None:
    with cluster(tmp_path, tensor_parallel_size=2, precision_policy=POLICY) as running:
        (before,) = running.replicas()
        assert text_of(running) == text_of_one_rank()
        with running.http as http:
            ranks = http.get(f"/replicas/{before}/v1/pw/status").json()["ranks"]
        assert len(ranks) == 2
        assert ranks[0]["planes"] == ranks[1]["planes"] > 0
        (follower,) = followers(running)
        os.kill(follower, signal.SIGKILL)
        running.wait(
            lambda: bool(running.replicas()) and before not in running.replicas(),
            120, "replacement",
        )  # fmt: skip
        again = asyncio.run(load(running.url, 2, lambda tally: tally.asked >= 6))
        assert again.answered == again.asked
        (other,) = followers(running)
        assert other != follower
        assert text_of(running) == text_of_one_rank()
