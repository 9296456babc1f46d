"""The tables of docs/quality.md.

python -m pw.evaluation.lab run STUDY... --artifact A --checkpoint C ...   measure again
python -m pw.evaluation.lab show STUDY... --out FOLDER                     print what was measured
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import torch

from pw.errors import PwError
from pw.evaluation.lab.room import Room, Texts
from pw.evaluation.lab.studies import STUDIES
from pw.evaluation.report.provenance import hardware


def main(arguments: list[str] | None = None) -> int:
    """Run or show the studies named; the exit status."""
    given = _parser().parse_args(arguments)
    if given.command == "run":
        return _run(given)
    try:
        for name in given.study:
            print(_printed(name, json.loads((given.out / f"{name}.json").read_text("utf-8"))))
    except OSError as error:
        _fail(f"error: {error}")
        return 1
    return 0


def _run(given: argparse.Namespace) -> int:
    """Measure; each study writes its numbers as soon as it has them. One that fails stops no other.

    Side by side, studies that start at once measure some of the same allocations; they agree.
    """
    given.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, (text, error) in _outcomes(given):
        if error:
            _fail(f"{name}: {error}")
            failed = 1
        else:
            print(text, flush=True)
    return failed


def _outcomes(given: argparse.Namespace) -> Iterator[tuple[str, tuple[str, str]]]:
    """Name of each study, and what `_study` says of it."""
    if given.jobs == 1 or len(given.study) == 1:
        rooms: list[Room] = []
        for name in given.study:
            yield name, _study(given, name, rooms)
        return
    spawn = get_context("spawn")  # a GPU's context does not outlive a fork
    with ProcessPoolExecutor(min(given.jobs, len(given.study)), mp_context=spawn) as pool:
        running = {pool.submit(_study, given, name, []): name for name in given.study}
        for done in as_completed(running):
            yield running[done], done.result()


def _study(given: argparse.Namespace, name: str, rooms: list[Room]) -> tuple[str, str]:
    """Measure one study and write it: its tables, or what went wrong.

    Args:
        given: The command line.
        name: Of the study.
        rooms: That of earlier studies of this process; made here if there is none.
    """
    started = time.monotonic()
    try:
        if not rooms:
            torch.set_num_threads(given.threads)
            rooms.append(_room(given))
        result = STUDIES[name].run(rooms[0])
        result["seconds"] = round(time.monotonic() - started)
        result["made"] = _made(given, rooms[0])
        (given.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    except PwError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        return "", f"error: {error}{hint}"
    except OSError as error:
        return "", f"error: {error}"
    return _printed(name, result), ""


def _room(given: argparse.Namespace) -> Room:
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
    return Room(given.artifact, given.checkpoint, texts, given.memory, given.device)


def _made(given: argparse.Namespace, room: Room) -> dict[str, object]:
    """Of what, when and on what a study was measured."""
    machine = hardware(given.device)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "artifact": room.model.artifact.artifact_hash,
        "windows": given.windows,
        "device": given.device,
        "hardware": {name: machine[name] for name in ("processor", "cores", "threads", "gpus")},
    }


def _printed(name: str, result: dict[str, object]) -> str:
    return f"## {name}\n\n{STUDIES[name].tables(result)}\n"


def _fail(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    run.add_argument("--threads", type=int, default=1, help="of a CPU, for each study")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    run.add_argument("--jobs", type=int, default=1, help="studies side by side, in processes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
