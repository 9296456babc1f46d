"""Builds the sample in child processes that are killed on the way, and resumes each one.

Run as a script: children are forked from a process that has started no thread. Prints one JSON
object: the hash of the uninterrupted tree, the number of file operations of a build, and for every
kill how it was timed, whether the child died of it, and the hash of the resumed tree.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.store import Sample, tree_hash

OPERATIONS = ("write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


def count_operations(kill_at: int | None) -> Callable[[], int]:
    """Count file operations, and kill this process instead of doing number `kill_at`."""
    counter = itertools.count()
    fsync = os.fsync
    last = [0]

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            last[0] = next(counter)
            if last[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            # What was written outlives a killed process, synced or not: syncing only costs time.
            return None if operation is fsync else operation(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    return lambda: last[0] + 1


def in_child(work: Callable[[], Any]) -> tuple[int, Callable[[], Any]]:
    """Start `work` in a fork. Returns its pid and a function that waits for (killed, result)."""
    reader, writer = os.pipe()
    write = os.write
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        code = 1
        try:
            write(writer, json.dumps(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)

    def wait() -> tuple[bool, Any]:
        with os.fdopen(reader, "rb") as pipe:
            data = pipe.read()
        status = os.waitpid(pid, 0)[1]
        return os.WIFSIGNALED(status), json.loads(data) if data else None

    return pid, wait


def build(sample: Sample, path: Path, kill_at: int | None = None) -> dict[str, Any]:
    """Build or resume and describe the run."""
    operations = count_operations(kill_at)
    start = time.monotonic()
    sample.build(path)
    seconds = time.monotonic() - start
    return {"hash": tree_hash(path), "operations": operations(), "seconds": seconds}


def main(folder: Path, points: int, moments: int, seed: int) -> None:
    """Kill at `points` file operations and at `moments` instants, both random."""
    chance = random.Random(seed)
    sample = Sample(folder)
    whole = in_child(lambda: build(sample, folder / "whole.pw"))[1]()[1]
    kills: list[tuple[str, float]] = [
        ("operation", k) for k in chance.sample(range(whole["operations"]), points)
    ]
    kills += [("seconds", chance.uniform(0, whole["seconds"])) for _ in range(moments)]
    runs = []
    for number, (kind, at) in enumerate(kills):
        path = folder / f"{number}.pw"
        kill_at = int(at) if kind == "operation" else None
        pid, wait = in_child(partial(build, sample, path, kill_at))
        if kind == "seconds":
            time.sleep(at)
            os.kill(pid, signal.SIGKILL)
        killed = wait()[0]
        resumed = in_child(partial(build, sample, path))[1]()[1]
        left = sorted(p.name for p in folder.glob(f"{number}.pw*"))
        runs.append({"at": [kind, at], "killed": killed, "resumed": resumed, "left": left})
    print(json.dumps({"whole": whole, "runs": runs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(value) for value in sys.argv[2:5]))
