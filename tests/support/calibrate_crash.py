"""Kill `pw calibrate` at random instants and finish it: see test_killed_calibrate.py.

Arguments: checkpoint, text, folder, instants, seed. Children are forked from a process that has
imported everything and computed nothing. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pw_pipelines.quantize
import pw_pipelines.sensitivity
import pw_pipelines.trace  # noqa: F401 - imported once, for all children
from pw.cli import main
from support.cli import TEXT_FLAGS
from support.offline import tree_digests


def start(arguments: list[str]) -> int:
    """Run one command in a child; its pid."""
    pid = os.fork()
    if pid == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        try:
            main(arguments)
        except SystemExit as stop:
            os._exit(int(stop.code or 0))
        finally:
            os._exit(70)
    return pid


def finish(pid: int) -> int:
    """Its exit code, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(checkpoint: str, text: str, folder: Path, instants: int, seed: int) -> None:
    """Calibrate once in peace, then with a kill at each of `instants` moments."""
    chance = random.Random(seed)

    def command(path: Path) -> list[str]:
        flags = ("--dataset", text, *TEXT_FLAGS, "--max-bits", "4", "-q")
        return ["calibrate", checkpoint, "-o", str(path), *flags]

    begin = time.monotonic()
    assert finish(start(command(folder / "whole.pw"))) == 0
    seconds = time.monotonic() - begin
    expected = tree_digests(folder / "whole.pw")
    killed = same = twice = 0
    faults = []
    for number in range(instants):
        path = folder / f"{number}.pw"
        for again in range(chance.choice((1, 1, 2))):  # the second run may be killed, too
            pid = start(command(path))
            time.sleep(chance.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
            died = finish(pid) == -signal.SIGKILL
            killed += died
            twice += died and again
        code = finish(start(command(path)))
        left = sorted(p.name for p in folder.glob(f"{number}.pw*"))
        if code == 0 and left == [path.name] and tree_digests(path) == expected:
            same += 1
        else:
            faults.append([number, code, left])
        shutil.rmtree(path, ignore_errors=True)
    figures = {"seconds": seconds, "killed": killed, "second kills": twice, "same": same}
    print(json.dumps(figures | {"faults": faults}))


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
