"""`response_format`, `structured_outputs` and `guided_*`: what grammar they become."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from pw.engine.request import Grammar
from pw.errors import RequestError
from pw.serving.structured.output_formats import OutputFormats

INTEGER = {"type": "integer"}


def grammar(**fields):
    return OutputFormats.model_validate(fields).grammar()


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "ü"]}, Grammar("choice", '["a","ü"]')),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
        ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("ebnf", 'root ::= "a"')),
    ],
)
def test_grammar_of_a_format(fields, made):
    assert grammar(**fields) == made


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": INTEGER},
            }
        },
        {"guided_json": INTEGER},
        {"guided_json": json.dumps(INTEGER)},
        {"structured_outputs": {"json": INTEGER}},
        {"structured_outputs": {"json": json.dumps(INTEGER)}},
    ],
)
def test_schemas_in_every_place(fields):
    made = grammar(**fields)
    assert (made.kind, json.loads(made.text)) == ("json_schema", INTEGER)


def test_the_field_that_is_to_blame():
    formats = OutputFormats.model_validate({"structured_outputs": {"regex": "("}})
    assert formats.grammar_param == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "5"}, "guided_json"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * 300_000}, "guided_regex"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
    ],
)
def test_formats_that_cannot_be_followed(fields, param):
    with pytest.raises(RequestError) as caught:
        grammar(**fields)
    assert (caught.value.param, caught.value.status) == (param, 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": []},
        {"guided_choice": [""]},
        {"guided_choice": [1]},
        {"guided_choice": "a"},
        {"response_format": {"type": "grammar"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"structured_outputs": {"structural_tag": "x"}},
        {"structured_outputs": {"regex": 5}},
    ],
)
def test_formats_of_the_wrong_form(fields):
    with pytest.raises(ValidationError):
        grammar(**fields)
