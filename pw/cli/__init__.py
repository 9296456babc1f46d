"""The command line: one thin function per command. Knows no algorithm; every command imports its
stage inside, so that `pw --help` loads neither torch nor transformers.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from pw import __version__
from pw.cli.bench import bench_app
from pw.cli.command import UsageError, add_command, print_error
from pw.cli.evaluation import evaluate
from pw.cli.inspection import env, inspect
from pw.cli.offline import calibrate, export, fit_residuals, quantize, sensitivity, trace, tune
from pw.cli.origin import name_the_origin, value_elsewhere
from pw.cli.recipes import run
from pw.cli.runtime import generate, serve
from pw.cli.top import top
from pw.errors import PwError

app = typer.Typer(
    name="pw",
    help="Serve Mixture-of-Experts models whose weights and KV cache share one memory budget.",
    epilog="Exit codes: 0 done, 1 failure, 2 wrong usage, 3 artifact invalid, 4 does not fit in "
    "the memory budget, 5 stopped half way (the same command resumes), 130 interrupted.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
for _panel, _functions in {
    "Make an artifact": (calibrate, quantize, sensitivity, trace, tune, fit_residuals, run),
    "Run a model": (serve, generate),
    "Measure": (evaluate,),
    "Look": (top, inspect, export, env),
}.items():
    for _function in _functions:
        add_command(app, _function, panel=_panel, name="eval" if _function is evaluate else None)
app.add_typer(bench_app(), name="bench", rich_help_panel="Measure")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"pw {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code.

    Args:
        arguments: What follows `pw`; None takes the process's own.

    Raises:
        SystemExit: Always, with the exit code.
    """
    # Torch's CPU threads spin for milliseconds waiting for each other. Where other jobs want the
    # cores that makes small products a hundred times slower. 10,000 turns are as fast as the
    # default on a quiet machine and ten times faster on a busy one; fewer pay for waking up.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        code = app(args=arguments, prog_name="pw", standalone_mode=False)
    except UsageError as error:
        code = 2
        print_error(_as_usage(error))
    except typer.Abort:
        code = 1
    if code == 130:
        print("interrupted", file=sys.stderr)
    sys.stdout.flush()
    sys.exit(code)


_OF_THE_ENGINE = (
    "of commands that run an engine; offline work is shared by `torchrun ... -m pw calibrate`"
)

# Flags of other servers that a command here does not have, and what to do.
_ELSEWHERE = {
    "--tensor-parallel-size": _OF_THE_ENGINE,
    "--pipeline-parallel-size": "ranks share every layer: use --tensor-parallel-size",
    "--data-parallel-size": "start several servers behind a balancer: docs/scale.md",
    "--enable-expert-parallel": _OF_THE_ENGINE,
    "--quantization": "an artifact says how it is quantized: leave it out",
    "--enable-chunked-prefill": "prompts are always read in pieces: leave it out",
    "--disable-log-requests": "prompts are logged only with --enable-log-requests",
    "--trust-remote-code": "code of a model is never run here: leave it out",
    "--model": "MODEL comes first and without a flag",
}


def _read_elsewhere(error: Exception) -> str:
    """The value that a variable or a file gave to the parameter that an error is about."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    value = None if context is None or parameter is None else value_elsewhere(context, parameter)
    return "" if value is None else f": `{value}`"


def _as_usage(error: Exception) -> PwError:
    """The parser's complaint in our form: one line, then the nearest flag or the help to read."""
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path if context else 'pw'} --help`"
    option = getattr(error, "option_name", None)  # of an unknown option
    known = getattr(error, "possibilities", None)
    nearest = [name for name in known or () if name != "--help"]
    message = str(error.message if known else error.format_message())  # type: ignore[attr-defined]
    message, _, suggestion = message.partition(" Did you mean ")
    if option and (elsewhere := _ELSEWHERE.get(option.replace("_", "-"))):
        hint = elsewhere
    elif nearest:
        hint = "did you mean " + " or ".join(f"`{option}`" for option in sorted(nearest)) + "?"
    elif suggestion:
        hint = "did you mean " + suggestion.replace("'", "`")
    elif (parameter := getattr(error, "param", None)) and getattr(parameter, "multiple", False):
        hint = f"repeat `{parameter.opts[0]}` for several values, or {hint}"
    message = re.sub(r" \(env var: '\w+'\)", "", " ".join(message.split()).rstrip("."))
    message = message.replace("'", "`") + _read_elsewhere(error)
    return name_the_origin(PwError(message[:1].lower() + message[1:], hint), context)
