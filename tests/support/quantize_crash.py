"""Quantize in a process that kills itself after some writes: see test_quantize.py."""

import os
import signal
import sys
from pathlib import Path

from pw.config import CalibrationConfig, QuantizeConfig
from pw.store.writer import ArtifactWriter
from pw_pipelines import quantize
from support.offline import QUIET

checkpoint, text, out, survived = sys.argv[1:]
write_blocks = ArtifactWriter.write_blocks
written = 0


def write_or_die(self, *arguments):
    global written
    if written == int(survived):
        os.kill(os.getpid(), signal.SIGKILL)
    write_blocks(self, *arguments)
    written += 1


ArtifactWriter.write_blocks = write_or_die
config = CalibrationConfig(dataset=text, nsamples=8, seqlen=64)
quantize.run(checkpoint, Path(out), QuantizeConfig(max_bits=4, calibration=config), QUIET)
