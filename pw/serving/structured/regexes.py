r"""Regular expressions that the grammar compiler would read in another way than everybody else.

It overlooks lookaround in the patterns of a schema, ignores anchors in the middle, takes unknown
escapes such as `\A` for the letter, and writes a quote or a backslash of a pattern into a JSON
string as it is. Such expressions are refused here by what they contain.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|c[A-Za-z]|.|$)  # an escape
    |\(\?(?:<[A-Za-z_]\w*>|<?.|$)  # how a group begins that says what it is
    |\[\^?|.""",  # the beginning of a class, or any other character
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = set("dDwWsSnrtfv0xuc")
_NUMBERED = {"x", "u", "c"}
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


def check_regex(text: str, *, in_json: bool = False) -> None:
    """Return if the compiler reads an expression as it is meant, or refuses it itself.

    Args:
        text: The expression.
        in_json: It is the pattern of a string in a JSON document.

    Raises:
        ValueError: It does not; naming what it cannot follow.
    """
    reader = _Reader(in_json)
    for found in _TOKEN.finditer(text):
        reader.take(found[0])


class _Reader:
    """Follows an expression from left to right."""

    def __init__(self, in_json: bool) -> None:
        self._in_json = in_json
        self._members: list[str] | None = None  # of the class that is open
        self._fresh = [True]  # of each open group: nothing stands before it
        self._start = True  # nothing stands before this place in its alternative
        self._ended = [False]  # of each open group: an alternative ends with `$`
        self._after = False  # this place is behind a `$`

    def take(self, token: str) -> None:
        """Read the next token.

        Raises:
            ValueError: The compiler would read it in another way.
        """
        if token.startswith("\\"):
            _check_escape(token)
        if self._members is not None:
            self._in_class(token)
        elif token.startswith("["):
            self._consume()
            self._members = [token]
        elif token.startswith("("):
            self._open(token)
        elif token == ")":
            self._close()
        elif token == "|":
            self._ended[-1] |= self._after
            self._start, self._after = self._fresh[-1], False
        elif token == "^":
            if not self._start:
                raise ValueError("`^` in the middle of an expression is not supported")
        elif token == "$":
            self._after = True
        else:
            self._literal(token)
            self._consume()

    def _open(self, token: str) -> None:
        if token.startswith("(?") and token != "(?:" and not token.endswith(">"):
            raise ValueError(f"`{token}` in a regular expression is not supported")
        self._fresh.append(self._start)
        self._ended.append(self._after)

    def _close(self) -> None:
        if len(self._fresh) > 1:  # else the compiler says what is wrong
            self._fresh.pop()
            self._after |= self._ended.pop()
        self._start = False

    def _consume(self) -> None:
        if self._after:
            raise ValueError("`$` in the middle of an expression is not supported")
        self._start = False

    def _in_class(self, token: str) -> None:
        assert self._members is not None
        if token != "]":
            self._members.append(token)
            return
        if self._members[0] == "[" and len(self._members) == 2:
            self._literal(self._members[1])
        self._members = None

    def _literal(self, token: str) -> None:
        """A character that the compiler would not escape in a JSON string."""
        if self._in_json and (mark := _character(token)) and (mark in '"\\' or mark < " "):
            raise ValueError(f"a pattern with {mark!r} is not supported")


def _check_escape(token: str) -> None:
    if token[1:2].isalnum() and token[1] not in _ESCAPES:
        raise ValueError(f"`{token}` in a regular expression is not supported")


def _character(token: str) -> str:
    """The character that a token stands for; "" where it is a class."""
    if not token.startswith("\\"):
        return token
    kind, number = token[1:2], token[2:]
    if kind in _NUMBERED and number:
        return chr(ord(number) % 32 if kind == "c" else int(number, 16))
    return _CONTROL.get(kind, "" if kind.isalnum() else kind)
