"""What a request may ask for."""

import math

import pytest

from pw.engine.request import Grammar, SamplingParams
from pw.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs_start", -1),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("seed", 2**63),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", tuple((token, 0.0) for token in range(1025))),
        ("min_bits", 0),
        ("min_bits", 17),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{name} must be") as refused:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert refused.value.param == name
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("kind", "text"), [("xml", "<a/>"), ("regex", ""), ("json_schema", "x" * (1 << 18) + "x")]
)
def test_grammars_that_cannot_be_meant_are_refused(kind: str, text: str) -> None:
    with pytest.raises(RequestError, match="grammar must be") as refused:
        Grammar(kind, text)  # type: ignore[arg-type]
    assert refused.value.param == "grammar"


def test_only_penalties_that_change_something_count() -> None:
    assert not SamplingParams(logit_bias=((1, 2.0),)).penalized
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{name: 0.5}).penalized  # type: ignore[arg-type]
