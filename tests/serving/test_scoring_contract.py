"""`echo` with `logprobs` as lm-eval sums it: P + 1 entries, exact maxima, ordered choices.

lm-eval sends batches of token-id prompts with `max_tokens: 1, temperature: 0, logprobs: 1,
echo: true, seed: 1234`, sums `token_logprobs[context:-1]`, and calls an answer greedy where each
`token_logprob == max(top_logprobs)` as floats.
"""

from __future__ import annotations

import json

import pytest

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
SCORE = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 0, "echo": True}


def post(served, **body):
    answer = served.http.post("/v1/completions", json={"model": "fake"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_entries(choice, prompt_tokens):
    """The contract for one choice; its lists."""
    logprobs = choice["logprobs"]
    assert {len(logprobs[name]) for name in LISTS} == {prompt_tokens + 1}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    for token, value, top in list(zip(*(logprobs[name] for name in LISTS[:3]), strict=True))[1:]:
        assert isinstance(value, float)
        assert top[token] >= value  # the chosen one is there, and no lower value hides a higher
    assert "".join(logprobs["tokens"]) == choice["text"]
    texts = logprobs["tokens"]
    assert logprobs["text_offset"] == [len("".join(texts[:i])) for i in range(len(texts))]
    return logprobs


@pytest.mark.parametrize("prompt", [[7, 8, 9, 10, 11], [7], list(range(100, 150))])
def test_one_prompt(served, prompt):
    (choice,) = post(served, prompt=[prompt], **SCORE)["choices"]
    check_entries(choice, len(prompt))
    assert choice["finish_reason"] == "length"


def test_a_batch_is_ordered_by_index(served):
    prompts = [[20 + i] * (1 + i % 7) for i in range(40)]
    choices = post(served, prompt=prompts, **SCORE)["choices"]
    assert [choice["index"] for choice in choices] == list(range(40))
    for choice, prompt in zip(choices, prompts, strict=True):
        assert check_entries(choice, len(prompt))["tokens"][0] == f"{prompt[0]} "


def test_text_and_ids_say_the_same(served):
    text = " ".join(map(str, range(20, 40)))
    of_text = post(served, prompt=text, **SCORE)["choices"][0]["logprobs"]
    of_ids = post(served, prompt=list(range(20, 40)), **SCORE)["choices"][0]["logprobs"]
    assert of_text == of_ids
    assert len(of_text["tokens"]) == 21


def test_only_the_prompt(served):
    (choice,) = post(served, prompt=[[7, 8, 9]], **SCORE | {"max_tokens": 0})["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])


@pytest.mark.parametrize("k", [0, 1, 3])
def test_alternatives_of_prompt_tokens(served, k):
    (choice,) = post(served, prompt=[[100, 101]], **SCORE | {"logprobs": k})["choices"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == max(1, k)


def test_stream_adds_up_to_the_whole(served):
    body = {"prompt": [[50, 51, 52, 53, 54], [60]], **SCORE, "max_tokens": 3}
    whole = post(served, **body)["choices"]
    lines = served.http.post("/v1/completions", json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for choice in whole:
        pieces = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for name in LISTS:
            parts = [piece["logprobs"][name] for piece in pieces if piece["logprobs"]]
            assert [value for part in parts for value in part] == choice["logprobs"][name]


def test_prompt_logprobs_of_vllm(served):
    (choice,) = post(served, prompt=[100, 101, 102], max_tokens=1, prompt_logprobs=1)["choices"]
    own = {"logprob": -1.5, "rank": 1}
    assert choice["prompt_logprobs"] == [
        None,
        {"101": own | {"decoded_token": "101 "}},
        {"102": own | {"decoded_token": "102 "}},
    ]
    assert choice["logprobs"] is None
    both = post(served, prompt=[100, 101], max_tokens=1, prompt_logprobs=0, logprobs=2, echo=True)
    (choice,) = both["choices"]
    assert choice["prompt_logprobs"][1]["101"]["rank"] is None
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    body = {"messages": [{"role": "user", "content": "7 8"}], "prompt_logprobs": 0, "max_tokens": 1}
    answer = served.http.post("/v1/chat/completions", json=body).json()
    assert answer["prompt_logprobs"][1]["8"]["logprob"] == -1.5


@pytest.mark.parametrize("by_request", [False, True])
def test_tokens_spelled_by_id(served, start, by_request):
    from pw.serving.context import ServingConfig

    body = {"prompt": [[7, 8]], **SCORE}
    if by_request:
        logprobs = post(served, **body, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    else:
        with start(config=ServingConfig(("fake",), tokens_by_id=True)) as other:
            logprobs = post(other, **body)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:7", "token_id:8", "token_id:0"]
    assert logprobs["top_logprobs"][2] == {"token_id:0": 0.0}
