"""Where values come from: an error names the variable or the file's key that gave the value.

Checks know settings by their flags. Somebody who gave no flag looks for it in vain.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import typer

from pw.errors import PwError

FILE_KEYS = "pw.file_keys"  # of a context's `meta`: parameter -> `server.yaml:max-model-len`


def variable(context: typer.Context, parameter: Any) -> str:
    """The environment variable of an option."""
    own = parameter.envvar
    if own:
        return own if isinstance(own, str) else str(own[0])
    return f"{context.auto_envvar_prefix}_{parameter.name}".upper()


def name_the_origin(error: PwError, context: typer.Context | None) -> PwError:
    """The same error in words of the user, whose values may have come by other ways than flags.

    Args:
        error: About a flag, a field or a value.
        context: Of the command, its values read.
    """
    if context is None:
        return error
    message, hint = error.message, error.hint
    named, suspects = False, []
    for parameter, origin in _given_elsewhere(context):
        pattern = "|".join(_spellings(parameter))  # at once: an origin may hold a spelling itself
        message, found = re.subn(pattern, lambda _: origin, message)  # noqa: B023
        hint = re.sub(pattern, lambda _: origin, hint)  # noqa: B023
        named |= found > 0
        if _shows(error.message, context.params.get(parameter.name)):
            suspects.append(origin)
    if suspects and not named:
        message = f"{' or '.join(suspects)}: {message}"
    if (message, hint) != (error.message, error.hint):
        error.message, error.hint = message, hint
        error.args = (message,)
    return error


def _given_elsewhere(context: typer.Context) -> Iterator[tuple[Any, str]]:
    """Parameters whose value a variable or a file gave, and what to call that place."""
    for parameter in context.command.params:
        kind = _kind(context, parameter)
        if kind == "ENVIRONMENT":
            yield parameter, variable(context, parameter)
        elif kind == "DEFAULT_MAP":
            keys = context.meta.get(FILE_KEYS, {})
            yield parameter, keys.get(parameter.name, parameter.name)


def _kind(context: typer.Context, parameter: Any) -> str:
    """COMMANDLINE, ENVIRONMENT, DEFAULT_MAP ...; "" before a parameter is read."""
    source = context.get_parameter_source(parameter.name)
    return "" if source is None else source.name


def value_elsewhere(context: typer.Context, parameter: Any) -> Any:
    """What a variable or a file gives to a parameter, as it stands there; None: nothing."""
    kind = _kind(context, parameter)
    if kind == "ENVIRONMENT":
        return os.environ.get(variable(context, parameter))
    return (context.default_map or {}).get(parameter.name) if kind == "DEFAULT_MAP" else None


def _spellings(parameter: Any) -> list[str]:
    """Patterns of what messages call a parameter.

    A field of one word is a word like any other, but at the beginning: `planner must be`.
    """
    flags = sorted(filter(lambda flag: flag.startswith("--"), parameter.opts), key=len)
    patterns = [rf"(?<![\w-]){re.escape(flag)}(?![\w-])" for flag in reversed(flags)]
    name = re.escape(parameter.name)
    plain = rf"(?<![\w.-]){name}(?!\w)" if "_" in parameter.name else rf"^{name}(?= must )"
    return [*patterns, plain]


def _shows(message: str, value: Any) -> bool:
    """Whether a message shows a value, in backticks or at its end."""
    values = value if isinstance(value, list | tuple) else [value]
    return any(
        f"`{each}`" in message or message.endswith(f": {each}")
        for each in values
        if each is not None and not isinstance(each, bool) and str(each)
    )
