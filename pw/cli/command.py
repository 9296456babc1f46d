"""How a function becomes a command: option groups, environment variables, errors and exit codes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import logging
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer

from pw import logs
from pw.cli.options import Common
from pw.cli.origin import name_the_origin
from pw.errors import PwError

_CONTEXT = "command_context"  # the parameter in which the parser says what it has read
# The parser's usage errors. Typer exports only this leaf of their tree.
UsageError: type[Exception] = typer.BadParameter.__mro__[2]

_SAME = {"base-url": "url"}  # where a server is: one flag under both names, whatever the command


def _spelling(token: str) -> str:
    """A flag without its dashes as all its spellings are known: --max_model_len, --base-url."""
    token = token.replace("_", "-")
    return _SAME.get(token, token)


_SETTINGS = {
    "auto_envvar_prefix": "PW",  # --max-model-len is also PW_MAX_MODEL_LEN, whatever the command
    "token_normalize_func": _spelling,
    "help_option_names": ["-h", "--help"],
}
# One variable for two meanings would be a trap. What a run makes is of that run alone; the others,
# by their heading in the help, mean another thing than flags of their names elsewhere.
_WITHOUT_VARIABLE = {"output", "bits"}
_OWN_VARIABLES = {
    **{
        ("Server under test", name): "PW_BENCH"
        for name in ("host", "port", "model", "request_timeout")
    },
    ("Workload", "seed"): "PW_BENCH",
    **{("Calibration", name): "PW_CALIBRATION" for name in ("seed", "seqlen")},
    **{("Bit-widths", name): "PW_CALIBRATION" for name in ("min_bits", "max_bits")},
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
    parameters = [p.replace(annotation=_with_its_variable(p)) for p in parameters]
    parameters.append(
        inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    )

    @functools.wraps(function)
    def run(**values: Any) -> None:
        context = values.pop(_CONTEXT)
        arguments = {
            name: group(**{f.name: values.pop(f.name) for f in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        _run(lambda: function(**arguments, **values), arguments["common"], context)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _with_its_variable(parameter: inspect.Parameter) -> Any:
    """The annotation of a parameter; its environment variable is the rule's, its own, or none."""
    kind, *found = get_args(parameter.annotation) or (None,)
    options = [each for each in found if hasattr(each, "allow_from_autoenv")]
    own = [_OWN_VARIABLES.get((each.rich_help_panel or "", parameter.name)) for each in options]
    if not any(own) and parameter.name not in _WITHOUT_VARIABLE:
        return parameter.annotation
    option = copy.copy(options[0])
    option.allow_from_autoenv = False
    option.envvar = f"{own[0]}_{parameter.name.upper()}" if own[0] else None
    return Annotated[kind, option]


def _run(function: Callable[[], None], common: Common, context: typer.Context) -> None:
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
        print_error(name_the_origin(known, context))
        raise typer.Exit(known.exit_code) from None


def _from_os(error: OSError) -> PwError:
    """A file or socket that the system refuses, in one line."""
    place = f": `{error.filename}`" if error.filename else ""
    return PwError(f"{(error.strerror or str(error)).lower()}{place}", "-v shows where")


def print_error(error: PwError) -> None:
    """Print `error: ...` and, when there is one, `hint: ...` on stderr, a line each.

    What a library has said may have several.
    """
    print(f"error: {' '.join(error.message.split())}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a result on stdout as JSON; dataclasses, arrays and paths are taken as they are."""
    from pw.store.manifest import plain

    print(json.dumps(plain(value), indent=2, allow_nan=False))
