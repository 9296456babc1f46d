"""Whether no value can match two of several JSON schemas, as far as that is easy to see."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

_MAX_HOPS = 8  # of references that follow each other


def all_disjoint(branches: list[Any], root: Any) -> bool:
    """Whether each value matches one of the schemas at most; False where it is not clear.

    They are told apart by type, by their values, or by the value of a member that objects of each
    must have, as in tagged unions.

    Args:
        branches: The schemas.
        root: The document that references point into.
    """
    resolved = [_resolved(branch, root) for branch in branches]
    return all(_disjoint(one, other, root) for one, other in combinations(resolved, 2))


def json_type(value: Any) -> str:
    """JSON schema's name for a value's type."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, float) and value.is_integer():
        return "integer"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names[type(value)]


def _disjoint(one: dict[str, Any], other: dict[str, Any], root: Any) -> bool:
    values = _values(one), _values(other)
    if values[0] is not None and values[1] is not None:
        return values[0].isdisjoint(values[1])
    types = _types(one), _types(other)
    if types[0] and types[1] and types[0].isdisjoint(types[1]):
        return True
    if types != ({"object"}, {"object"}):
        return False
    tags = _tags(one, root), _tags(other, root)
    return any(tags[0][name].isdisjoint(tags[1][name]) for name in tags[0].keys() & tags[1].keys())


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """The schema that a chain of references ends at; {} where it does not."""
    for _ in range(_MAX_HOPS):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if reference is None:
            return schema
        schema = root
        for part in str(reference).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, dict) else None
    return {}


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The values that a schema lists, spelled."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(listed, list):
        return None
    return {json.dumps(value, sort_keys=True) for value in listed}


def _types(schema: dict[str, Any]) -> set[str]:
    """The types of a schema's values, "number" standing for integers, too; empty: any."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list):
        stated = [json_type(value) for value in listed]
    else:
        stated = schema.get("type", "object" if "properties" in schema else [])
    names = [stated] if isinstance(stated, str) else stated
    return {"number" if name == "integer" else str(name) for name in names}


def _tags(schema: dict[str, Any], root: Any) -> dict[str, set[str]]:
    """Values of the members that an object must have, where they are listed."""
    properties = schema.get("properties")
    required = schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    found = {
        name: _values(_resolved(properties.get(name), root))
        for name in required
        if isinstance(name, str)
    }
    return {name: values for name, values in found.items() if values is not None}
