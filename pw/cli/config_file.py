"""`--config FILE`: settings of a command in YAML, under the names of its flags."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import typer

from pw.cli.origin import FILE_KEYS


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Make a file's values the defaults of the command; flags and `PW_...` variables go before.

    Keys are spelled as the flags, with hyphens or underscores, other names of a flag included, or
    `model`. A list is a flag that is given several times, a mapping a flag that takes JSON.

    Args:
        context: Of the command; its `default_map` is set.
        file: What follows `--config`, if anything does.

    Raises:
        typer.BadParameter: The file cannot be read, a key is none of the command's flags, or two
            keys are the same one.
    """
    if file is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise typer.BadParameter(f"cannot read `{file}`: {reason}") from error
    if not isinstance(found, dict | None):
        raise typer.BadParameter(f"`{file}` must map flags to values")
    names = {
        spelling.lstrip("-").replace("-", "_"): str(parameter.name)
        for parameter in context.command.params
        if parameter.name not in ("config", "help")
        for spelling in (*parameter.opts, str(parameter.name))
    }
    given: dict[str, tuple[str, Any]] = {}
    for key, value in (found or {}).items():
        name = _name(str(key), names, file)
        if name in given:
            raise typer.BadParameter(f"`{file}` says twice: {given[name][0]}, {key}")
        if value is not None:
            given[name] = (str(key), _value(value))
    context.default_map = {name: value for name, (_, value) in given.items()}
    context.meta[FILE_KEYS] = {name: f"{file}:{key}" for name, (key, _) in given.items()}
    return file


def _name(key: str, names: dict[str, str], file: Path) -> str:
    """The parameter that a key means."""
    known = names.get(key.replace("-", "_"))
    if known is not None:
        return known
    near = difflib.get_close_matches(key.replace("-", "_"), names, n=1)
    hint = f" Did you mean '{near[0].replace('_', '-')}'?" if near else ""
    raise typer.BadParameter(f"no such setting in `{file}`: {key}.{hint}")


def _value(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value
