"""Run as the engine's process by tests: `StepEngine` behind the real worker's socket and loop."""

import signal
import socket
import sys

from pw import logs
from pw.engine.process import wire, worker
from support.step_engine import StepEngine

if __name__ == "__main__":
    mode, descriptor = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(descriptor))
    load = wire.decode_to_engine(wire.read_body(sock))
    assert isinstance(load, wire.Load)
    logs.configure(load.logs.level, load.logs.style)
    if mode == "die":
        signal.raise_signal(signal.SIGKILL)
    worker.LAST_STEP_SECONDS = 0.5
    worker.end_with_the_other_end(sock)
    sys.exit(worker.serve(StepEngine(float(mode), 64), sock, load.queue_timeout))
