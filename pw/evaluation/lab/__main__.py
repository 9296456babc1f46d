"""The tables of docs/quality.md.

python -m pw.evaluation.lab run STUDY... --artifact A --checkpoint C ...   measure again
python -m pw.evaluation.lab show STUDY... --out FOLDER                     print what was measured
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pw.evaluation.lab.running import fail, printed, run
from pw.evaluation.lab.studies import STUDIES


def main(arguments: list[str] | None = None) -> int:
    """Run or show the studies named; the exit status."""
    given = _parser().parse_args(arguments)
    if given.command == "run":
        return run(given)
    try:
        for name in given.study:
            print(printed(name, json.loads((given.out / f"{name}.json").read_text("utf-8"))))
    except OSError as error:
        fail(f"error: {error}")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pw.evaluation.lab")
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure")
    show = commands.add_parser("show", help="print what was measured")
    for command in (measure, show):
        command.add_argument("study", nargs="+", choices=sorted(STUDIES))
        command.add_argument("--out", type=Path, required=True, help="one JSON file per study")
    for name, text in (
        ("artifact", "what `pw calibrate` and `pw fit-residuals` made"),
        ("checkpoint", "the unquantized model"),
        ("calibration", "a .jsonl with `text`: the text of the artifact"),
        ("heldout", "a .jsonl or .txt that is not in it"),
    ):
        measure.add_argument(f"--{name}", type=Path, required=True, help=text)
    measure.add_argument("--other", type=Path, help="text of another source, such as WikiText-2")
    measure.add_argument("--tasks", type=Path, help="folder of task files (.jsonl)")
    measure.add_argument("--narrow", type=Path, help="the model's artifact from prose alone")
    measure.add_argument("--apl", type=Path, help="the model's artifact with APL's codebooks")
    measure.add_argument("--without", type=int, nargs="*", default=[], help="held-out documents")
    measure.add_argument("--windows", type=int, default=32, help="held-out windows of 2,048 tokens")
    measure.add_argument("--other-windows", type=int, default=12)
    measure.add_argument("--memory", type=Path, help="folder of scores measured before")
    measure.add_argument("--threads", type=int, default=1, help="of a CPU, for each study")
    measure.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    measure.add_argument(
        "--jobs", type=_count, default=1, help="studies side by side, in processes"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1: `{text}`")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
