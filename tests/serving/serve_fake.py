"""Run as a process by test_server.py: the fake engine under `serve`, to be sent signals."""

import logging
import sys

from pw.serving.context import ServingConfig
from pw.serving.listen import Endpoint
from pw.serving.server import serve
from tests.serving.fakes import FakeEngine, WordTokenizer

if __name__ == "__main__":
    step_seconds, shutdown_timeout = map(float, sys.argv[1:])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    engine = FakeEngine(step_seconds)
    code = serve(
        engine,
        WordTokenizer(),
        ServingConfig(("fake",)),
        endpoint=Endpoint(port=0),
        shutdown_timeout=shutdown_timeout,
    )
    print("engine stopped" if engine.stopped else "engine left running", flush=True)
    sys.exit(code)
