"""Quantize in processes that kill themselves after some writes: see test_quantize.py.

Run as a script: children are forked from a process that has started no thread.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from pw.config import CalibrationConfig, QuantizeConfig
from pw.store.writer import ArtifactWriter
from pw_pipelines import quantize
from support.offline import QUIET


def quantize_until(checkpoint: str, text: str, out: Path, writes: int) -> None:
    """Quantize, and die instead of the write after so many."""
    write_blocks, written = ArtifactWriter.write_blocks, 0

    def write_or_die(self: ArtifactWriter, *arguments: Any) -> None:
        nonlocal written
        if written == writes:
            os.kill(os.getpid(), signal.SIGKILL)
        write_blocks(self, *arguments)
        written += 1

    ArtifactWriter.write_blocks = write_or_die  # type: ignore[method-assign]
    config = CalibrationConfig(dataset=text, nsamples=8, seqlen=64)
    quantize.run(checkpoint, out, QuantizeConfig(max_bits=4, calibration=config), QUIET)


def main(checkpoint: str, text: str, folder: Path, survived: list[int]) -> None:
    """Make `folder/N.pw` for each number N of writes that are survived."""
    for writes in survived:
        pid = os.fork()
        if pid == 0:
            try:
                quantize_until(checkpoint, text, folder / f"{writes}.pw", writes)
            except Exception:
                traceback.print_exc()
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == -signal.SIGKILL, code


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), [int(each) for each in sys.argv[4:]])
