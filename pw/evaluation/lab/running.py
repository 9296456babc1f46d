"""Studies one after the other, or side by side in processes, each with its own JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from multiprocessing import get_context

import torch

from pw.errors import PwError
from pw.evaluation.lab.room import Room, Texts
from pw.evaluation.lab.studies import STUDIES
from pw.evaluation.report.provenance import hardware

_KILLED = (
    "error: a process of this run was killed before the study was measured\n"
    "hint: memory may have run out: run it again with fewer --jobs"
)


def run(given: argparse.Namespace) -> int:
    """Measure; each study writes its numbers as soon as it has them. One that fails stops no other.

    Side by side, studies that start at once measure some of the same allocations; they agree.

    Returns:
        The exit status: 1 if one failed.
    """
    given.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, (text, error) in _outcomes(given):
        if error:
            fail(f"{name}: {error}")
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
            try:
                said = done.result()
            except BrokenProcessPool:  # it does not say which of them was killed
                said = "", _KILLED
            yield running[done], said


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
    except Exception:  # a bug of ours: its traceback, and the other studies' numbers
        return "", traceback.format_exc()
    return printed(name, result), ""


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


def printed(name: str, result: dict[str, object]) -> str:
    """The tables of a study under its name."""
    return f"## {name}\n\n{STUDIES[name].tables(result)}\n"


def fail(text: str) -> None:
    """To the standard error, at once."""
    print(text, file=sys.stderr, flush=True)
