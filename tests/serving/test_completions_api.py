"""`/v1/completions` through the openai package."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from pw.errors import ModelError
from pw.serving.context import ServingConfig
from pw.serving.openai.defaults import SamplingDefaults
from tests.serving.fakes import STORY

TEXT = "".join(word + " " for word in STORY)


def test_one_prompt(served):
    answer = served.openai.completions.create(model="fake", prompt="The lazy", max_tokens=4)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "fake"
    assert answer.system_fingerprint == "pw-0.1.0-0123456789ab-static-4"
    assert [choice.text for choice in answer.choices] == ["The 🦊 jumps over\nthe "]
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 4)
    assert answer.usage.total_tokens == 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.usage.model_extra["pw"] == {"mean_bits": 5.5, "min_bits": 4}


def test_without_limit_the_engine_decides(served):
    answer = served.openai.completions.create(model="alias", prompt="The")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert answer.model == "alias"


@pytest.mark.parametrize(
    ("prompt", "encoded"),
    [
        ("7 8 9", [[7, 8, 9]]),
        (["7 8", "9"], [[7, 8], [9]]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ],
)
def test_four_forms_of_prompt(served, prompt, encoded):
    served.engine.calls.clear()
    answer = served.openai.completions.create(model="fake", prompt=prompt, max_tokens=1)
    assert sorted(ids for ids, _ in served.engine.calls.values()) == encoded
    assert [choice.index for choice in answer.choices] == list(range(len(encoded)))
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == len(encoded)


def test_choices_are_seeded_by_index(served):
    answer = served.openai.completions.create(
        model="fake", prompt=["1", "2"], max_tokens=2, n=3, seed=1
    )
    alone = served.openai.completions.create(model="fake", prompt="2", max_tokens=2, seed=1)
    texts = [choice.text for choice in answer.choices]
    words = [f"{STORY[i]} {STORY[i + 1]} " for i in (1, 2, 3)]
    assert texts == words * 2  # neither the other prompts nor n change a choice
    assert alone.choices[0].text == words[0]
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == 12


def test_seed_of_choices_stays_in_64_bits(served):
    served.engine.calls.clear()
    served.openai.completions.create(model="fake", prompt="1", max_tokens=1, n=2, seed=2**63 - 1)
    assert {params.seed for _, params in served.engine.calls.values()} == {2**63 - 1, -(2**63)}


@pytest.mark.parametrize("n", [1, 2])
def test_stream_is_the_answer_in_pieces(served, n):
    whole = served.openai.completions.create(model="fake", prompt=["3", "4"], n=n, seed=2)
    texts, reasons = [""] * 2 * n, [None] * 2 * n
    ids = set()
    with served.openai.completions.create(
        model="fake", prompt=["3", "4"], n=n, seed=2, stream=True
    ) as stream:
        for chunk in stream:
            assert chunk.object == "text_completion"
            assert chunk.usage is None
            (choice,) = chunk.choices
            assert reasons[choice.index] is None
            ids.add((chunk.id, chunk.created, chunk.model))
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(ids) == 1


def test_async_client_many_at_once(served):
    async def ask(client, start, stream):
        answer = await client.completions.create(
            model="fake", prompt="1", seed=start, max_tokens=3, stream=stream
        )
        if not stream:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def everyone():
        async with served.async_openai() as client:
            return await asyncio.gather(*(ask(client, i % 5, i % 2 == 0) for i in range(24)))

    expected = ["".join(STORY[i % 5 + j] + " " for j in range(3)) for i in range(24)]
    assert asyncio.run(everyone()) == expected


def test_echo(served):
    def ask(**fields):
        return served.openai.completions.create(model="fake", echo=True, **fields)

    assert ask(prompt="lazy as", max_tokens=1).choices[0].text == "lazy asThe "
    assert ask(prompt=[1, 2], max_tokens=0).choices[0].text == "🦊 jumps "
    stream = ask(prompt="lazy as", max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "lazy asThe 🦊 "


def test_echo_with_logprobs_covers_prompt_and_answer(served):
    answer = served.openai.completions.create(
        model="fake", prompt=[1, 2, 3], max_tokens=2, echo=True, logprobs=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs == [None, -1.5, -1.5, 0.0, 0.0]
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset == [0, 2, 8, 17, 21]


def test_logprobs_are_finite_and_aligned_in_both_modes(served):
    fields = {"model": "fake", "prompt": "1", "max_tokens": 3, "logprobs": 4}
    body = served.http.post("/v1/completions", json=fields).text

    def forbid(constant):
        raise AssertionError(constant)

    logprobs = json.loads(body, parse_constant=forbid)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["The ", "🦊 ", "jumps "]
    assert logprobs["text_offset"] == [0, 4, 6]
    assert logprobs["top_logprobs"][0] == {
        "The ": 0.0,
        "🦊 ": -0.25,
        "jumps ": -9999.0,
        "over\nthe ": -9999.0,
    }
    pieces = [
        chunk.choices[0].logprobs
        for chunk in served.openai.completions.create(**fields, stream=True)
    ]
    for name, values in logprobs.items():
        assert [value for piece in pieces for value in getattr(piece, name)] == values


def test_sampling_fields_reach_the_engine(served):
    served.engine.calls.clear()
    served.openai.completions.create(
        model="fake",
        prompt="1",
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        stop=["a", "b"],
        extra_body={
            "top_k": 7,
            "min_p": 0.1,
            "stop_token_ids": [3],
            "ignore_eos": True,
            "min_tokens": 2,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        },
    )
    ((_, params),) = served.engine.calls.values()
    assert (params.max_tokens, params.temperature, params.top_p) == (5, 0.5, 0.9)
    assert (params.stop, params.top_k, params.min_p) == (("a", "b"), 7, 0.1)
    assert (params.stop_token_ids, params.ignore_eos, params.min_tokens) == ((3,), True, 2)
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens


def test_unknown_and_neutral_fields_are_ignored(served):
    answer = served.openai.completions.create(
        model="fake",
        prompt="1",
        max_tokens=1,
        user="someone",
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        suffix=None,
        best_of=1,
        stop=None,
        extra_body={"a_field_of_tomorrow": {"x": [1]}, "repetition_penalty": 1.0},
    )
    assert answer.choices[0].text == "The "


def test_unknown_model(served):
    with pytest.raises(openai.NotFoundError) as caught:
        served.openai.completions.create(model="gpt-9", prompt="1")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "fake" in caught.value.message


def test_usage_chunk_of_several_choices(served):
    chunks = list(
        served.openai.completions.create(
            model="fake",
            prompt=["1 2", "3"],
            n=2,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [len(chunk.choices) for chunk in chunks] == [1] * 8 + [0]
    assert not any(chunk.usage for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 8, 11)


def test_model_defaults_fill_what_a_request_leaves_out(start, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 20, "x": 1}')
    defaults = SamplingDefaults.of_model(tmp_path)
    with start(config=ServingConfig(("fake",), defaults=defaults)) as served:
        served.openai.completions.create(model="fake", prompt="1", max_tokens=1, temperature=0)
        served.openai.completions.create(model="fake", prompt="1", max_tokens=1)
        params = [params for _, params in served.engine.calls.values()]
    assert [(each.temperature, each.top_k, each.top_p) for each in params] == [
        (0, 20, 1.0),
        (0.7, 20, 1.0),
    ]


@pytest.mark.parametrize("text", ['{"temperature": 9}', '{"top_p": "x"}', "{", "[]"])
def test_damaged_generation_config(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        SamplingDefaults.of_model(tmp_path)


def test_no_generation_config(tmp_path):
    assert SamplingDefaults.of_model(tmp_path) == SamplingDefaults()
