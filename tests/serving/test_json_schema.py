"""Schemas made ready for a grammar: what it would let through wrongly is narrowed or refused."""

from __future__ import annotations

import json

import pytest

from pw.serving.structured.json_schema import MAX_DEPTH, normalized
from pw.serving.structured.schema_overlap import all_disjoint

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
        (
            A | {"required": ["b"]},
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": True},
                "required": ["b"],
                "additionalProperties": True,
            },
        ),
        ({"multipleOf": 3}, {"type": "integer", "multipleOf": 3}),
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
            {"anyOf": [{"minimum": 3, "type": "number"}]},
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
        ({"multipleOf": 0.5}, "whole numbers only"),
        ({"type": ["integer", "null"], "multipleOf": 2}, "whole numbers only"),
        ({"required": ["b"], "additionalProperties": False}, "'b', which is no property"),
        ({"required": [1]}, "array of strings"),
        ({"patternProperties": {"a": {}, "b": {}}}, "beside other members"),
        ({"patternProperties": {"a": {}}, "properties": {"b": {}}}, "beside other members"),
        ({"oneOf": [{"minimum": 1}, {"type": "integer"}]}, "may overlap"),
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


def tagged(name, **members):
    properties = {"kind": {"const": name}} | members
    return {"type": "object", "properties": properties, "required": ["kind"]}


@pytest.mark.parametrize(
    ("branches", "disjoint"),
    [
        ([], True),
        ([{}], True),
        ([{"type": "string"}, {"type": "integer"}, {"type": "null"}], True),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"type": ["string", "null"]}, {"type": "null"}], False),
        ([{"type": "string"}, {}], False),
        ([{"type": "string"}, True], False),
        ([{"enum": [1, "a"]}, {"const": "b"}], True),
        ([{"enum": [1, "a"]}, {"const": "a"}], False),
        ([{"const": None}, {"type": "string"}], True),
        ([{"const": "a"}, {"type": "string"}], False),
        ([tagged("a"), tagged("b", x={})], True),
        ([tagged("a"), tagged("a", x={})], False),
        ([tagged("a"), {"type": "object", "properties": {"kind": {"const": "b"}}}], False),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b~1c"}], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/loop"}], False),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/nowhere"}], False),
    ],
)
def test_branches_that_exclude_each_other(branches, disjoint):
    root = {"$defs": {"a": tagged("a"), "b/c": tagged("b"), "loop": {"$ref": "#/$defs/loop"}}}
    assert all_disjoint(branches, root) is disjoint
