"""Expressions that the grammar compiler misreads are refused; what it reads rightly passes."""

from __future__ import annotations

import json

import pytest

from pw.errors import RequestError
from pw.serving.structured.output_formats import OutputFormats
from pw.serving.structured.regexes import check_regex

FINE = [
    "", "a+", "^a$", "^(a|b)$", "^a$|^b$", "(^a|^b)c", "a(b|c$)", "(?:a|(?<n>b))+", r"\d{3}-\w\s",
    r"[^\"\\]+", "[$^]a", r"\^\$\.", "[[:alpha:]]", r"\x41é", "(", "a)b", "[a", "a{2,1}", "é.*🦊",
]  # fmt: skip
MISREAD = [
    ("(?=a)b", "(?="), ("a(?!b)", "(?!"), ("(?<=a)b", "(?<="), ("(?<!a)b", "(?<!"),
    ("(?i)a", "(?i"), ("(?P<n>a)", "(?P"), (r"\Aa", r"\A"), (r"a\Z", r"\Z"), (r"\ba", r"\b"),
    (r"(a)\1", r"\1"), (r"\p{L}", r"\p"), ("a^b", "`^`"), ("a(^b)", "`^`"), ("a$b", "`$`"),
    ("(a$|b)c", "`$`"), ("(a$)+", "`$`"), ("$[a]", "`$`"), (r"[\A]", r"\A"),
]  # fmt: skip


@pytest.mark.parametrize("text", FINE)
def test_what_is_read_as_it_is_meant(text: str) -> None:
    check_regex(text)


@pytest.mark.parametrize(("text", "named"), MISREAD)
def test_what_is_not_is_refused_by_name(text: str, named: str) -> None:
    for in_json in (False, True):
        with pytest.raises(ValueError, match="not supported") as caught:
            check_regex(text, in_json=in_json)
        assert named in str(caught.value)


@pytest.mark.parametrize(
    "text", ['a"b', r"a\"", '["]', r"a\\b", r"[\\]", r"\n", r"\x0a", r"\cJ", "\t"]
)
def test_a_pattern_whose_characters_json_must_escape(text: str) -> None:
    check_regex(text)
    with pytest.raises(ValueError, match="a pattern with"):
        check_regex(text, in_json=True)


def test_patterns_that_leave_such_characters_to_a_class() -> None:
    for text in (r'^[\w"]+$', r'[^"]*', ".*", r"\s+", r"[\n\t]"):
        check_regex(text, in_json=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)b"}}, "guided_json"),
        ({"guided_json": {"items": {"type": "string", "pattern": 'a"'}}}, "guided_json"),
        ({"guided_json": {"propertyNames": {"pattern": r"\Aa"}}}, "guided_json"),
        ({"guided_json": {"patternProperties": {"(?!a)": {}}}}, "guided_json"),
        ({"guided_json": {"type": "string", "pattern": 5}}, "guided_json"),
        ({"guided_json": {"patternProperties": [1]}}, "guided_json"),
    ],
)
def test_requests_with_them_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        OutputFormats.model_validate(json.loads(json.dumps(fields))).grammar()
    assert caught.value.param == param
