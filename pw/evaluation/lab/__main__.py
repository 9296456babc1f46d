"""`python -m pw.evaluation.lab STUDY ...`: measure a table of docs/quality.md again."""

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


def main() -> int:
    """Run the studies named, print their tables, write their numbers."""
    given = _parser().parse_args()
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
    try:
        room = Room(given.artifact, given.checkpoint, texts, given.memory)
        given.out.mkdir(parents=True, exist_ok=True)
        for name in given.study:
            started = time.monotonic()
            result = STUDIES[name].run(room)
            result["seconds"] = round(time.monotonic() - started)
            path = given.out / f"{name}.json"
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(f"## {name}\n\n{STUDIES[name].tables(result)}\n", flush=True)
    except PwError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pw.evaluation.lab", description=__doc__)
    parser.add_argument("study", nargs="+", choices=sorted(STUDIES))
    for name, text in (
        ("artifact", "what `pw calibrate` and `pw fit-residuals` made"),
        ("checkpoint", "the unquantized model"),
        ("calibration", "a .jsonl with `text`: the text of the artifact"),
        ("heldout", "a .jsonl or .txt that is not in it"),
        ("out", "folder for the numbers, one JSON file per study"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=text)
    parser.add_argument("--other", type=Path, help="text of another source, such as WikiText-2")
    parser.add_argument("--tasks", type=Path, help="folder of task files (.jsonl)")
    parser.add_argument("--narrow", type=Path, help="the model's artifact from prose alone")
    parser.add_argument("--apl", type=Path, help="the model's artifact with APL's codebooks")
    parser.add_argument("--without", type=int, nargs="*", default=[], help="held-out documents")
    parser.add_argument("--windows", type=int, default=32, help="held-out windows of 2,048 tokens")
    parser.add_argument("--other-windows", type=int, default=12)
    parser.add_argument("--memory", type=Path, help="folder of scores measured before")
    parser.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
