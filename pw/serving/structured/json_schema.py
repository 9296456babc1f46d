"""JSON schemas made ready for a grammar: what it would overlook is made plain or refused.

A grammar compiler ignores keywords that it does not know, and then lets documents through that the
schema forbids. Here such schemas are refused by the keyword's name. Two liberties are taken, which
only make the output narrower: a schema without `type` gets the one that its keywords speak of, and
an object that lists its properties has no others unless the schema says so, as in OpenAI's strict
mode.
"""

from __future__ import annotations

from typing import Any

from pw.serving.structured.regexes import check_regex
from pw.serving.structured.schema_overlap import all_disjoint, json_type

MAX_DEPTH = 64

_OF_TYPE = {
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties",
    },
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}  # fmt: skip
_SUITABLE = {kind: {kind} for kind in _OF_TYPE} | {"number": {"number", "integer"}}
_COMBINING = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_REFUSED = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
    "additionalItems", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_ONE_SCHEMA = ("additionalProperties", "items", "propertyNames")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def normalized(schema: Any) -> Any:
    """The schema without anything that a grammar would overlook.

    Raises:
        ValueError: It is no schema, or cannot be followed exactly; the message names the keyword.
    """
    return _schema(schema, schema, 0)


def _schema(schema: Any, root: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object or a boolean, not {json_type(schema)}")
    _check_keywords(schema)
    made = dict(schema)
    for name in _ONE_SCHEMA:
        if name in schema:
            made[name] = _schema(schema[name], root, depth + 1)
    for name in _SCHEMA_LISTS:
        if name in schema:
            branches = _checked(schema[name], list, name)
            made[name] = [_schema(each, root, depth + 1) for each in branches]
    for name in _SCHEMA_MAPS:
        if name in schema:
            entries = _checked(schema[name], dict, name).items()
            made[name] = {key: _schema(each, root, depth + 1) for key, each in entries}
    if "oneOf" in made:
        if not all_disjoint(schema["oneOf"], root):
            raise ValueError("`oneOf` whose branches may overlap is not supported: use `anyOf`")
        made["anyOf"] = made.pop("oneOf")
    return _explicit(made)


def _check_keywords(schema: dict[str, Any]) -> None:
    """Refuse what a grammar cannot follow."""
    refused = sorted(_REFUSED.intersection(schema))
    if schema.get("uniqueItems") is True:
        refused.append("uniqueItems")
    if refused:
        raise ValueError(f"`{refused[0]}` is not supported")
    reference = schema.get("$ref", "#")
    if reference != "#" and not (isinstance(reference, str) and reference.startswith("#/")):
        raise ValueError(f"`$ref` must point into the schema itself: {str(reference)[:80]!r}")
    combining = [name for name in _COMBINING if name in schema]
    beside = sorted(set().union(*_OF_TYPE.values()) & set(schema))
    if len(combining) > 1 or (combining and beside):
        second = [*combining[1:], *beside][0]
        raise ValueError(f"`{combining[0]}` beside `{second}` is not supported")
    if len(_checked(schema.get("allOf", [0]), list, "allOf")) != 1:
        raise ValueError("`allOf` of more than one schema is not supported")
    binding = [{"pattern"}, {"format"}, {"minLength", "maxLength"}]
    if sum(bool(names.intersection(schema)) for names in binding) > 1:
        raise ValueError("only one of `pattern`, `format` and a length can be followed")
    keys = _checked(schema.get("patternProperties", {}), dict, "patternProperties")
    for pattern in (schema.get("pattern", ""), *keys):
        check_regex(_checked(pattern, str, "pattern"), in_json=True)


def _explicit(schema: dict[str, Any]) -> dict[str, Any]:
    """Say the type and what else an object or array may hold."""
    if any(name in schema for name in _COMBINING):
        return _without_type(schema)
    spoken = {kind for kind, names in _OF_TYPE.items() if names.intersection(schema)}
    stated = schema.get("type")
    types = [stated] if isinstance(stated, str) else _checked(stated or [], list, "type")
    if not types and len(spoken) > 1:
        raise ValueError(f"it needs a type, as it speaks of {' and '.join(sorted(spoken))}")
    if types and any(not _SUITABLE[kind].intersection(types) for kind in spoken):
        schema = _without_others(schema, types)
    if not types and spoken:
        schema = schema | {"type": spoken.pop()}
    return _multiple(_members(schema))


def _members(schema: dict[str, Any]) -> dict[str, Any]:
    """Say which members an object has: all listed ones, and no other if any were listed."""
    listed = schema.get("properties", {})
    required = _checked(schema.get("required", []), list, "required")
    if not all(isinstance(name, str) for name in required):
        raise ValueError("`required` must be an array of strings")
    patterns = _checked(schema.get("patternProperties", {}), dict, "patternProperties")
    if patterns and (len(patterns) > 1 or listed or required):
        raise ValueError("`patternProperties` beside other members is not supported")
    unlisted = [name for name in required if name not in listed]
    if unlisted and schema.get("additionalProperties", True) is not True:
        raise ValueError(f"`required` names {unlisted[0][:64]!r}, which is no property")
    if unlisted:
        return (
            schema
            | {"properties": listed | dict.fromkeys(unlisted, True)}
            | {"additionalProperties": True}
        )
    open_ended = {"additionalProperties", "patternProperties", "propertyNames"}
    if listed and not open_ended.intersection(schema):
        return schema | {"additionalProperties": False}
    return schema


def _multiple(schema: dict[str, Any]) -> dict[str, Any]:
    """Multiples of a whole number are whole numbers; others cannot be spelled by a grammar."""
    factor = schema.get("multipleOf")
    if factor is None:
        return schema
    if not isinstance(factor, int) or schema.get("type") not in ("integer", "number"):
        raise ValueError("`multipleOf` is supported for whole numbers only")
    return schema | {"type": "integer"}


def _without_type(schema: dict[str, Any]) -> dict[str, Any]:
    """A combining schema; a type beside it moves into the values or branches that it bounds."""
    types = schema.get("type")
    if types is None:
        return schema
    types = types if isinstance(types, list) else [types]
    rest = {name: value for name, value in schema.items() if name != "type"}
    if "enum" in rest or "const" in rest:
        values = _checked(rest.pop("enum", None) or [rest.pop("const", None)], list, "enum")
        fitting = [value for value in values if _has_type(value, types)]
        if not fitting:
            raise ValueError("no value of `enum` has the stated type")
        return rest | {"enum": fitting}
    for name in ("anyOf", "allOf"):
        if name in rest:
            rest[name] = [_typed(branch, types) for branch in rest[name]]
    if "$ref" in rest:
        raise ValueError("`$ref` beside `type` is not supported")
    return rest


def _typed(branch: Any, types: list[str]) -> Any:
    """A branch that also has the type stated beside it."""
    branch = {} if branch is True else branch
    if not isinstance(branch, dict) or "$ref" in branch or "anyOf" in branch:
        return branch
    stated = branch.get("type", types)
    stated = stated if isinstance(stated, list) else [stated]
    both = [kind for kind in stated if kind in types or (kind == "integer" and "number" in types)]
    if not both:
        raise ValueError(f"no value is both {' or '.join(types)} and {' or '.join(stated)}")
    return branch | {"type": both[0] if len(both) == 1 else both}


def _without_others(schema: dict[str, Any], types: list[str]) -> dict[str, Any]:
    """Drop keywords that speak of a type which the value never has."""
    idle: set[str] = set()
    for kind, names in _OF_TYPE.items():
        if not _SUITABLE[kind].intersection(types):
            idle |= names
    return {name: value for name, value in schema.items() if name not in idle}


def _has_type(value: Any, types: list[str]) -> bool:
    kind = json_type(value)
    return kind in types or (kind == "integer" and "number" in types)


def _checked(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"`{name}` must be an {'array' if kind is list else 'object'}")
    return value
