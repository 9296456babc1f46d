"""lm-evaluation-harness over HTTP gives what it gives in the process of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import httpx
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from pw.cli.locate import artifact_path
from pw.config import EngineConfig, PrecisionPolicy
from pw.engine import Engine
from pw.evaluation.harness import EngineLM
from pw.models.resolve import resolve_model

PAIRS = [
    ("The sky is", " blue"),
    ("The sky is", " green and very far away."),
    ("Once upon a time there was a", " little girl named"),
    ("Two and two is", " four"),
    ("naïve 🦊 日本語", " café"),
    ("", "A text without context."),
    ("A long context. " * 30, "It ends."),
]


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def in_process() -> EngineLM:
    config = EngineConfig(
        memory_budget=64 << 20, policy=PrecisionPolicy.parse("static:4"), max_num_seqs=8
    )
    engine = Engine.from_artifact(artifact_path("tiny", quiet=True), config)
    return EngineLM(engine, engine.tokenizer)


@pytest.fixture(params=["remote", "huggingface"])
def over_http(request: pytest.FixtureRequest, url: str) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model="tiny",
        tokenizer_backend=request.param,
        tokenizer=str(resolve_model("tiny")),
        batch_size=3,
        max_length=1024,
        max_gen_toks=16,
    )


def test_scores_are_equal(in_process: EngineLM, over_http: LocalCompletionsAPI) -> None:
    ours = in_process.loglikelihood(requests("loglikelihood", PAIRS))
    theirs = over_http.loglikelihood(requests("loglikelihood", PAIRS))
    assert [greedy for _, greedy in theirs] == [greedy for _, greedy in ours]
    assert [value for value, _ in theirs] == pytest.approx([value for value, _ in ours], abs=1e-3)
    assert len({round(value, 3) for value, _ in theirs}) == len(PAIRS)


def test_whole_texts_are_equal(in_process: EngineLM, over_http: LocalCompletionsAPI) -> None:
    texts = requests("loglikelihood_rolling", [(PAIRS[6][0],), ("Short.",)])
    theirs = over_http.loglikelihood_rolling(texts)
    assert theirs == pytest.approx(in_process.loglikelihood_rolling(texts), abs=1e-2)


def test_generated_texts_are_equal(in_process: EngineLM, over_http: LocalCompletionsAPI) -> None:
    settings = {"until": ["\n", "."], "max_gen_toks": 12, "temperature": 0}
    asked = requests("generate_until", [(context, settings) for context, _ in PAIRS if context])
    assert over_http.generate_until(asked) == in_process.generate_until(asked)


def test_chat(url: str) -> None:
    chat = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", model="tiny", max_gen_toks=8)
    asked = requests(
        "generate_until", [(chat.apply_chat_template([{"role": "user", "content": "Hi"}]), {})]
    )
    (text,) = chat.generate_until(asked)
    assert isinstance(text, str)
    assert httpx.get(f"{url}/health").status_code == 200


def test_the_artifact_is_there() -> None:
    assert isinstance(artifact_path("tiny", quiet=True), Path)
