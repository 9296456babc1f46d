"""The tables of docs/quality.md.

python -m pw.evaluation.lab run STUDY... --artifact A --checkpoint C ...   measure again
python -m pw.evaluation.lab show STUDY... --out FOLDER                     print what was measured
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from pw.errors import PwError
from pw.evaluation.lab.room import Room, Texts
from pw.evaluation.lab.studies import STUDIES


def main(arguments: list[str] | None = None) -> int:
    """Run or show the studies named; the exit status."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "run":
            _run(given)
        else:
            for name in given.study:
                _print(name, json.loads((given.out / f"{name}.json").read_text("utf-8")))
    except (PwError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, PwError) and error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 1
    return 0


def _run(given: argparse.Namespace) -> None:
    """Measure; each study writes its numbers as soon as it has them."""
    torch.set_num_threads(given.threads)
    texts = Texts(
        given.calibration,
        given.heldout,
        tuple(given.without),
        given.other,
        given.tasks,
        given.narrow,
        given.apl,
        given.windows,
        given.other_windows,
    )
    room = Room(given.artifact, given.checkpoint, texts, given.memory)
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.study:
        started = time.monotonic()
        result = STUDIES[name].run(room)
        result["seconds"] = round(time.monotonic() - started)
        (given.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        _print(name, result)


def _print(name: str, result: dict[str, object]) -> None:
    print(f"## {name}\n\n{STUDIES[name].tables(result)}\n", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pw.evaluation.lab")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure")
    show = commands.add_parser("show", help="print what was measured")
    for command in (run, show):
        command.add_argument("study", nargs="+", choices=sorted(STUDIES))
        command.add_argument("--out", type=Path, required=True, help="one JSON file per study")
    for name, text in (
        ("artifact", "what `pw calibrate` and `pw fit-residuals` made"),
        ("checkpoint", "the unquantized model"),
        ("calibration", "a .jsonl with `text`: the text of the artifact"),
        ("heldout", "a .jsonl or .txt that is not in it"),
    ):
        run.add_argument(f"--{name}", type=Path, required=True, help=text)
    run.add_argument("--other", type=Path, help="text of another source, such as WikiText-2")
    run.add_argument("--tasks", type=Path, help="folder of task files (.jsonl)")
    run.add_argument("--narrow", type=Path, help="the model's artifact from prose alone")
    run.add_argument("--apl", type=Path, help="the model's artifact with APL's codebooks")
    run.add_argument("--without", type=int, nargs="*", default=[], help="held-out documents")
    run.add_argument("--windows", type=int, default=32, help="held-out windows of 2,048 tokens")
    run.add_argument("--other-windows", type=int, default=12)
    run.add_argument("--memory", type=Path, help="folder of scores measured before")
    run.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
