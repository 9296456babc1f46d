"""Run as a process by tests: `serve` with the engine of `step_worker.py` in another process.

Arguments: the length of a step in seconds, then options of this file as JSON.
"""

import json
import logging
import sys
from pathlib import Path

from pw import logs
from pw.serving import server
from pw.serving.context import ServingConfig
from pw.serving.limits import ServingLimits
from pw.serving.listen import Endpoint
from pw.serving.process.remote import RemoteEngine
from support.remote import launch
from tests.serving.fakes import WordTokenizer

PATHS = ("uds", "ssl_certfile", "ssl_keyfile")

if __name__ == "__main__":
    mode, options = sys.argv[1], json.loads(sys.argv[2])
    logs.configure(logging.INFO, "text")
    endpoint = {"port": 0} | options.get("endpoint", {})
    for name in PATHS:
        if name in endpoint:
            endpoint[name] = Path(endpoint[name])
    server.ENGINE_FAILED_SECONDS = options.get("failed_seconds", server.ENGINE_FAILED_SECONDS)
    with launch(mode, options.get("queue_timeout")) as process:
        engine = RemoteEngine(
            process, process.wait_until_ready(), stall_timeout=options.get("stall_timeout", 60.0)
        )
        limits = ServingLimits(**options.get("limits", {}))
        code = server.serve(
            engine,
            WordTokenizer(),
            ServingConfig(("fake",), limits=limits, api_keys=tuple(options.get("keys", ()))),
            endpoint=Endpoint(**endpoint),
            allowed_origins=options.get("origins", ()),
            shutdown_timeout=options.get("shutdown_timeout", 30.0),
        )
    sys.exit(code)
