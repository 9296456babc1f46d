"""Schemas made ready for a grammar: what it would let through wrongly is narrowed or refused."""

from __future__ import annotations

import json

import pytest

from pw.serving.json_schema import MAX_DEPTH, normalized

CLOSED = {"additionalProperties": False}
A = {"properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        (True, True),
        ({}, {}),
        ({"type": "object"}, {"type": "object"}),
        (A, A | CLOSED | {"type": "object"}),
        (A | {"additionalProperties": True}, A | {"type": "object", "additionalProperties": True}),
        (A | {"required": ["b"]}, A | {"type": "object", "required": ["b"]}),
        ({"minLength": 3}, {"type": "string", "minLength": 3}),
        ({"minimum": 3}, {"type": "number", "minimum": 3}),
        ({"type": "integer", "minimum": 3}, {"type": "integer", "minimum": 3}),
        ({"type": "string", "minimum": 3}, {"type": "string"}),
        (
            {"type": ["string", "null"], "maxLength": 3},
            {"type": ["string", "null"], "maxLength": 3},
        ),
        ({"type": "string", "enum": ["a", 1]}, {"enum": ["a"]}),
        ({"type": "number", "enum": ["a", 1, 2.5]}, {"enum": [1, 2.5]}),
        ({"type": "string", "const": "a"}, {"enum": ["a"]}),
        (
            {"type": "object", "anyOf": [A, True]},
            {"anyOf": [A | CLOSED | {"type": "object"}, {"type": "object"}]},
        ),
        (
            {"type": "number", "oneOf": [{"minimum": 3}]},
            {"oneOf": [{"minimum": 3, "type": "number"}]},
        ),
        ({"uniqueItems": False}, {"uniqueItems": False}),
        (
            {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"maxLength": 1}}},
            {
                "type": "array",
                "items": {"$ref": "#/$defs/x"},
                "$defs": {"x": {"type": "string", "maxLength": 1}},
            },
        ),
        (  # a property may have a keyword's name
            {"properties": {"not": {"type": "null"}}},
            {"type": "object", "properties": {"not": {"type": "null"}}} | CLOSED,
        ),
    ],
)
def test_made_plain(schema, made):
    before = json.dumps(schema)
    assert normalized(schema) == made
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"not": {}}, "`not`"),
        ({"properties": {"a": {"if": {}}}}, "`if`"),
        ({"type": "array", "uniqueItems": True}, "`uniqueItems`"),
        ({"contains": {}}, "`contains`"),
        ({"dependentRequired": {}}, "`dependentRequired`"),
        ({"$ref": "http://example.com/schema"}, "`\\$ref` must point into"),
        ({"$ref": "#name"}, "`\\$ref` must point into"),
        ({"$ref": "#/a", "minLength": 3}, "beside `minLength`"),
        ({"$ref": "#/a", "type": "string"}, "beside `type`"),
        ({"anyOf": [{}], "required": ["a"]}, "beside `required`"),
        ({"allOf": [{}, {}]}, "`allOf`"),
        ({"pattern": "a", "minLength": 3}, "only one of"),
        ({"minLength": 1, "minimum": 3}, "needs a type"),
        ({"type": "object", "anyOf": [{"type": "string"}]}, "both object and string"),
        ({"type": "object", "enum": ["a"]}, "no value of `enum`"),
        ({"properties": []}, "`properties` must be an object"),
        ({"anyOf": {}}, "`anyOf` must be an array"),
        ({"items": 3}, "an object or a boolean, not integer"),
        ([], "not array"),
        ("x", "not string"),
        (None, "not null"),
    ],
)
def test_refused_by_name(schema, sentence):
    with pytest.raises(ValueError, match=sentence):
        normalized(schema)


def test_depth_is_bounded():
    schema = {}
    for _ in range(MAX_DEPTH + 1):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="deep"):
        normalized(schema)
    assert normalized(schema["items"])["type"] == "array"
