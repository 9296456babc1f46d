"""How a function becomes a command: option groups, environment variables, errors and exit codes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

from pw import logs
from pw.cli.options import Common
from pw.errors import PwError

# The parser's usage errors. Typer exports only this leaf of their tree.
UsageError: type[Exception] = typer.BadParameter.__mro__[2]

_SETTINGS = {
    "auto_envvar_prefix": "PW",  # --max-model-len is also PW_MAX_MODEL_LEN, whatever the command
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --max_model_len
    "help_option_names": ["-h", "--help"],
}


def add_command(
    app: typer.Typer, function: Callable[..., None], *, panel: str, name: str | None = None
) -> None:
    """Make a function a command.

    A parameter whose annotation is a dataclass of options (see `pw.cli.options`) becomes one option
    per field. The parameter `common: Common` is required: it says how errors are shown.

    Args:
        app: The application that gets the command.
        function: What it runs.
        panel: Heading under which `pw --help` lists it.
        name: What the user types; default the function's name.
    """
    flat = _expand(function)
    name = name or function.__name__.replace("_", "-")
    app.command(name, rich_help_panel=panel, context_settings=_SETTINGS)(flat)


def _expand(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with every group of options replaced by its fields."""
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        group = parameter.annotation
        if not dataclasses.is_dataclass(group):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        parameters.extend(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in dataclasses.fields(group)
        )

    @functools.wraps(function)
    def run(**values: Any) -> None:
        arguments = {
            name: group(**{f.name: values.pop(f.name) for f in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        _run(lambda: function(**arguments, **values), arguments["common"])

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _run(function: Callable[[], None], common: Common) -> None:
    """Run a command's body; a user's mistake ends in one line, a hint and its exit code."""
    level = logging.DEBUG if common.verbose else logging.WARNING if common.quiet else logging.INFO
    logs.configure(level)
    try:
        function()
    except BrokenPipeError:
        raise
    except (PwError, OSError) as error:
        if common.verbose:
            traceback.print_exc()
        known = error if isinstance(error, PwError) else _from_os(error)
        print_error(known)
        raise typer.Exit(known.exit_code) from None


def _from_os(error: OSError) -> PwError:
    """A file or socket that the system refuses, in one line."""
    place = f": `{error.filename}`" if error.filename else ""
    return PwError(f"{(error.strerror or str(error)).lower()}{place}", "-v shows where")


def print_error(error: PwError) -> None:
    """Print `error: ...` and, when there is one, `hint: ...` on stderr."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a result on stdout as JSON; dataclasses, arrays and paths are taken as they are."""
    from pw.store.manifest import plain

    print(json.dumps(plain(value), indent=2, allow_nan=False))
