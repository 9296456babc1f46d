"""What enters the queue, and the numbers in every refusal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pw.config import EngineConfig
from pw.engine.admission import Admission
from pw.engine.request import SamplingParams
from pw.errors import ModelError, RequestError
from tests.engine.test_detokenizer import BYTE_LEVEL

LIMIT, VOCABULARY, EOS = 100, 259, 256


def admission(limit: int = LIMIT, stated: int = LIMIT, tokenizer: Any = BYTE_LEVEL) -> Admission:
    inner = SimpleNamespace(backend_tokenizer=tokenizer)
    parts: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(inner=inner, eos_token_ids=(EOS,), vocab_size=VOCABULARY),
        table=None,
        memory=SimpleNamespace(max_model_len=limit),
        stated_model_len=stated,
        skeleton=SimpleNamespace(vocab_size=VOCABULARY + 5, device=torch.device("cpu")),
    )
    return Admission(parts, EngineConfig(memory_budget=1, max_num_queued_reqs=4))


def admit(prompt: int | list[int], waiting: int = 0, **params: Any) -> Any:
    tokens = [5] * prompt if isinstance(prompt, int) else prompt
    return admission().admit("r", tokens, SamplingParams(**params), waiting)


@pytest.mark.parametrize(
    ("prompt", "asked", "given"),
    [(10, 20, 20), (10, None, 90), (99, 1, 1), (99, None, 1), (100, 0, 0), (1, 0, 0), (1, 99, 99)],
)
def test_prompt_and_answer_within_the_limit(prompt: int, asked: int | None, given: int) -> None:
    sequence = admit(prompt, max_tokens=asked)
    assert sequence.max_tokens == given
    assert sequence.longest <= LIMIT
    assert sequence.remaining == given


@pytest.mark.parametrize(
    ("prompt", "asked", "total", "param"),
    [
        (10, 91, 101, "max_tokens"),
        (99, 2, 101, "max_tokens"),
        (100, None, 101, "prompt"),
        (100, 1, 101, "prompt"),
        (101, 0, 102, "prompt"),
        (500, 7, 507, "prompt"),
    ],
)
def test_what_can_never_fit_is_refused_with_both_numbers(
    prompt: int, asked: int | None, total: int, param: str
) -> None:
    with pytest.raises(RequestError, match=f"is {LIMIT} tokens, but {total} are asked") as refused:
        admit(prompt, max_tokens=asked)
    assert refused.value.code == "context_length_exceeded"
    assert (refused.value.param, refused.value.status) == (param, 400)


def test_a_limit_set_by_the_budget_says_so() -> None:
    with pytest.raises(RequestError, match=r"within the memory budget \(the model states 4096\)"):
        admission(stated=4096).admit("r", [5] * 101, SamplingParams(), 0)


@pytest.mark.parametrize("token", [-1, VOCABULARY + 5, 2**31, 2**63])
def test_unknown_tokens_are_named(token: int) -> None:
    with pytest.raises(RequestError, match=f"outside the vocabulary of 264: {token}") as refused:
        admit([5, token, 6])
    assert refused.value.param == "prompt"
    with pytest.raises(RequestError, match=f"outside the vocabulary of 264: {token}") as refused:
        admit(1, stop_token_ids=(token,))
    assert refused.value.param == "stop_token_ids"


def test_a_request_that_may_produce_no_token_at_all_is_refused() -> None:
    every = tuple(token for token in range(VOCABULARY) if token != EOS)
    with pytest.raises(RequestError, match="min_tokens is 1 but every token ends the text"):
        admit(1, stop_token_ids=every, min_tokens=1)
    admit(1, stop_token_ids=every)
    admit(1, stop_token_ids=every[1:], min_tokens=1)


def test_empty_prompts_and_full_queues_are_refused() -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        admit(0)
    assert admit(1, waiting=3)
    with pytest.raises(RequestError, match="the queue is full: 4 requests wait") as refused:
        admit(1, waiting=4)
    assert (refused.value.code, refused.value.status) == ("server_overloaded", 503)


def test_a_tokenizer_without_its_fast_form_is_refused_at_the_start() -> None:
    with pytest.raises(ModelError, match="no fast form"):
        admission(tokenizer=None)
