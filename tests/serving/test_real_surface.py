"""The OpenAI surface before the real engine: streams, bytes, stops, seeds, ends.

The model is small and random and its tokens are bytes, so that texts are full of broken characters.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pw.engine import AsyncEngine
from pw.serving.context import ServingConfig
from support.engines import make_artifact, open_engine
from tests.serving.conftest import Served, serving

STOPS = [[], ["a"], ["\ufffd"], ["e", " t", "th"], ["\n", "é", "🦊"], ["\ufffd\ufffd", "x"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("surface")
    artifact = make_artifact("qwen2_moe", folder, num_attention_heads=2)[1]
    engine = open_engine(artifact, "static:4", max_num_seqs=32, max_num_batched_tokens=256)
    config = ServingConfig(("fake",), grammar_tokenizer=Path(artifact))
    with serving(AsyncEngine(engine), engine.tokenizer, config) as running:
        yield running
    engine.check_integrity()
    assert engine.status().pages_kv == 0


def post(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text

    def forbid(constant: str) -> None:
        raise AssertionError(constant)

    parsed: dict[str, Any] = json.loads(answer.text, parse_constant=forbid)
    return parsed


def streamed(served: Served, **body: Any) -> list[tuple[list[str], str | None]]:
    """Pieces and finish reason of each choice."""
    answer = served.http.post("/v1/completions", json=body | {"stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    choices: dict[int, tuple[list[str], str | None]] = {}
    for event in events:
        (choice,) = event["choices"]
        pieces, _ = choices.get(choice["index"], ([], None))
        choices[choice["index"]] = ([*pieces, choice["text"]], choice["finish_reason"])
    return [choices[index] for index in sorted(choices)]


def compare(served: Served, rounds: int) -> int:
    """Stream each prompt and ask for it whole; the number of prompts compared."""
    compared = 0
    chance = random.Random(5)
    for number in range(rounds):
        prompts = [
            "".join(chance.choices("abc é🦊日\n", k=chance.randint(1, 20))) for _ in range(24)
        ]
        body = {
            "prompt": prompts,
            "max_tokens": 24,
            "seed": number,
            "temperature": 1.5,
            "stop": STOPS[number % len(STOPS)],
            "ignore_eos": number % 2 == 0,
            "include_stop_str_in_output": number % 5 == 0,
        }
        whole = post(served, **body)["choices"]
        for choice, (pieces, reason) in zip(whole, streamed(served, **body), strict=True):
            assert "".join(pieces) == choice["text"]
            assert reason == choice["finish_reason"]
            if not body["include_stop_str_in_output"]:
                assert not any(stop in choice["text"] for stop in body["stop"])
            compared += 1
    return compared


def test_streams_add_up_to_whole_answers(served: Served) -> None:
    assert compare(served, rounds=6) == 144


@pytest.mark.figures
def test_streams_add_up_to_whole_answers_five_thousand_times(served: Served) -> None:
    assert compare(served, rounds=210) == 5040


def forced(text: str) -> dict[str, Any]:
    """A request that can only say one text: a grammar of one choice."""
    return {"prompt": "a", "max_tokens": 200, "guided_choice": [text]}


@pytest.mark.parametrize(
    "text",
    ["🦊", "👩‍👩‍👧‍👦 family", "नमस्ते दुनिया", "日本語とEnglish", "عربى ‏", "e\u0301\u200d", "a\x00b"],
)
def test_characters_of_many_tokens(served: Served, text: str) -> None:
    pytest.importorskip("xgrammar")
    whole = post(served, **forced(text))["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text, "stop")
    ((pieces, _),) = streamed(served, **forced(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("k", [0, 1, 5])
def test_logprobs_stay_numbers_when_all_but_one_token_are_banned(served: Served, k: int) -> None:
    only = {str(token): -100 for token in range(3, 259)} | {"70": 100}
    body = {"prompt": "abc", "max_tokens": 3, "logprobs": k, "echo": True, "top_k": 1}
    (choice,) = post(served, **body, logit_bias=only, temperature=1)["choices"]
    assert choice["text"][3:] == choice["text"][3] * 3
    ((pieces, _),) = streamed(served, **body, logit_bias=only, temperature=1)
    assert "".join(pieces) == choice["text"]


def test_the_one_token_has_its_entry_even_when_it_ends_the_text(served: Served) -> None:
    body = {"prompt": [[70, 71, 72]] * 3, "max_tokens": 1, "logprobs": 1, "echo": True}
    (end, *_) = served.http.get("/tokenizer_info").json()["eos_token_ids"]
    for choice in post(served, **body, logit_bias={str(end): 100}, temperature=0)["choices"]:
        assert choice["finish_reason"] == "stop"
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {4}
        assert choice["text"] == "".join(logprobs["tokens"][:3])
    for choice in post(served, **body, stop_token_ids=list(range(120, 140)))["choices"]:
        assert len(choice["logprobs"]["tokens"]) == 4


def test_greedy_is_told_by_equal_floats(served: Served) -> None:
    """Score what the model itself says: each token is the first of its alternatives, exactly."""
    body = {"prompt": [[70, 71, 72, 73]], "temperature": 0, "logprobs": 1, "echo": True}
    said = post(served, **body, max_tokens=10, return_tokens_as_token_ids=True)["choices"][0]
    ids = [int(token.removeprefix("token_id:")) for token in said["logprobs"]["tokens"]]
    scored = post(served, **body | {"prompt": [ids]}, max_tokens=1)["choices"][0]["logprobs"]
    values, tops = scored["token_logprobs"], scored["top_logprobs"]
    greedy = [value == max(top.values()) for value, top in zip(values[1:], tops[1:], strict=True)]
    assert all(greedy[3:])
    assert not all(greedy[:3])
    assert values[1:14] == pytest.approx(said["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_seeds(served: Served) -> None:
    body = {"prompt": "abc", "max_tokens": 12, "temperature": 1, "ignore_eos": True}
    same = [post(served, **body, seed=7)["choices"][0]["text"] for _ in range(2)]
    assert same[0] == same[1]
    unseeded = post(served, **body | {"prompt": ["abc"] * 20})["choices"]
    assert len({choice["text"] for choice in unseeded}) >= 19
    eight = [[c["text"] for c in post(served, **body, seed=7, n=8)["choices"]] for _ in range(2)]
    assert eight[0] == eight[1]
    assert len(set(eight[0])) == 8
    assert eight[0][0] == same[0]


@pytest.mark.parametrize(
    ("bias", "word"),
    [({"260": 1}, "260"), ({"99999999": -5}, "99999999"), ({str(2**62): 1}, str(2**62))],
)
def test_ids_outside_the_vocabulary_are_named(
    served: Served, bias: dict[str, int], word: str
) -> None:
    body = {"prompt": "a", "max_tokens": 1, "logit_bias": bias}
    answer = served.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "logit_bias"


def test_a_floor_that_cannot_be_held_is_refused(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1, "precision": {"min_bits": 5}}
    answer = served.http.post("/v1/completions", json=body)  # the policy is static:4
    assert answer.status_code == 400, answer.text
    assert post(served, **body | {"precision": {"min_bits": 4}})["usage"]["pw"]["min_bits"] == 4


def test_penalties_change_the_text(served: Served) -> None:
    body = {"prompt": "abcabc", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    plain = post(served, **body)["choices"][0]["text"]
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        assert post(served, **body, **{name: 2})["choices"][0]["text"] != plain
