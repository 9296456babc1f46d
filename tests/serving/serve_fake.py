"""Run as a process by test_server.py: the fake engine under `serve`, to be sent signals.

Arguments: the length of a step in seconds, seconds to drain; "paced": no more than one token until
SIGUSR1 comes.
"""

import logging
import signal
import sys

from pw.serving.context import ServingConfig
from pw.serving.listen import Endpoint
from pw.serving.server import serve
from tests.serving.fakes import FakeEngine, WordTokenizer

if __name__ == "__main__":
    step_seconds, shutdown_timeout = map(float, sys.argv[1:3])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    engine = FakeEngine(step_seconds)
    if "paced" in sys.argv:
        engine.allowed = 1
        signal.signal(signal.SIGUSR1, lambda *_: setattr(engine, "allowed", None))
    code = serve(
        engine,
        WordTokenizer(),
        ServingConfig(("fake",)),
        endpoint=Endpoint(port=0),
        shutdown_timeout=shutdown_timeout,
    )
    print("engine stopped" if engine.stopped else "engine left running", flush=True)
    sys.exit(code)
