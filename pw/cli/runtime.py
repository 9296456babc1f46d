"""Commands that run a model: serve, generate."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pw import logs
from pw.cli.command import print_json
from pw.cli.locate import TINY, model_folder
from pw.cli.openai_options import OpenAI
from pw.cli.options import Common, Planner, Runtime, Sampling
from pw.cli.precheck import check_artifact, check_context, check_settings
from pw.cli.server_options import Server
from pw.errors import ModelError, PwError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pw.config import EngineConfig
    from pw.engine.request import EngineStatus
    from pw.serving.listen import Endpoint
    from pw.serving.process.engine_process import EngineProcess

logger = logging.getLogger("pw.cli")

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="An artifact (see `pw calibrate`), or `tiny`.")
]
Prompt = Annotated[
    str | None, typer.Argument(metavar="[PROMPT]", help="The text to go on from (default: stdin).")
]


def generate(
    model: ModelName,
    sampling: Sampling,
    runtime: Runtime,
    planner: Planner,
    common: Common,
    prompt: Prompt = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message of a chat.")
    ] = False,
) -> None:
    """Go on from a prompt, once, without a server. The text appears as it is made."""
    config = runtime.config(planner)
    params = sampling.params(runtime.seed)
    text = sys.stdin.read() if prompt is None else prompt
    path = model_folder(model, runtime, quiet=common.quiet)
    check_settings(path, config)
    if not common.quiet:
        print(f"loading {path} ...", file=sys.stderr)

    from pw.engine import Engine

    engine = Engine.from_artifact(path, config)
    check_context(config.max_model_len, engine.status())
    tokenizer = engine.tokenizer
    ids = (
        tokenizer.encode_chat([{"role": "user", "content": text}])
        if chat
        else tokenizer.encode(text)
    )
    engine.add_request("generate", ids, params)
    pieces, last = [], None
    while engine.has_work():
        for last in engine.step():
            pieces.append(last.text)
            if not common.json:
                print(last.text, end="", flush=True)
    assert last is not None
    if last.error is not None:
        raise PwError(f"generation failed: {last.error}")
    if common.json:
        print_json(
            {
                "text": "".join(pieces),
                "finish_reason": last.finish_reason,
                "prompt_tokens": last.prompt_tokens,
                "completion_tokens": last.completion_tokens,
                "mean_bits": last.mean_bits,
                "bytes": engine.status().bytes,
            }
        )
    else:
        print()


def serve(
    model: ModelName,
    server: Server,
    api: OpenAI,
    runtime: Runtime,
    planner: Planner,
    common: Common,
) -> None:
    """Serve a model over HTTP with OpenAI's API, inside one memory budget.

    SIGINT or SIGTERM drains: running requests finish, new ones get a 503. A second one ends now.
    The engine runs in a process of its own; when it dies, this one ends with exit code 1.
    """
    config = runtime.config(planner, max_num_queued_reqs=server.max_num_queued_reqs)
    server.check()
    logs.configure(logs.current().level, server.log_format)
    # A wrong MODEL is told first; only the bundled one may take a minute to be made.
    path = None if model == TINY else model_folder(model, runtime, quiet=common.quiet)
    endpoint = None if server.dry_run else _endpoint(server)
    path = path or model_folder(model, runtime, quiet=common.quiet)
    check_artifact(path, config)
    api.check(path)

    from pw.engine.process.wire import Load
    from pw.serving.process.engine_process import EngineProcess

    load = Load(path.resolve(), config, logs.current(), server.queue_timeout)
    with EngineProcess.launch(load) as process:
        code = _serve(process, path, server, api, config, endpoint, quiet=common.quiet)
    raise typer.Exit(code)


def _endpoint(server: Server) -> Endpoint:
    """Where to listen; a taken port and a bad certificate are told now, not minutes later."""
    from pw.serving.listen import Endpoint

    endpoint = Endpoint(
        server.host,
        server.port,
        server.uds,
        server.ssl_certfile,
        server.ssl_keyfile,
        server.root_path,
    )
    endpoint.check_free()
    return endpoint


def _serve(
    process: EngineProcess,
    path: Path,
    server: Server,
    api: OpenAI,
    config: EngineConfig,
    endpoint: Endpoint | None,
    *,
    quiet: bool,
) -> int:
    """Serve what the engine's process has loaded; the exit code."""
    # The engine loads meanwhile.
    from pw.models.light import load_tokenizer_alone
    from pw.serving.limits import ServingLimits
    from pw.serving.process.remote import RemoteEngine
    from pw.serving.server import serve as run

    try:
        tokenizer = load_tokenizer_alone(path)
    except ModelError:
        process.wait_until_ready()  # what the engine has to say about the artifact comes first
        raise
    ready = process.wait_until_ready()
    if not quiet:
        _show_plan(ready.status, ready.info.concurrency)
    check_context(config.max_model_len, ready.status)
    if endpoint is None:
        return 0
    if (template := api.template()) is not None:
        tokenizer.use_template(template)
    serving = api.config(
        path,
        ServingLimits(
            max_open_sequences=config.max_num_seqs + config.max_num_queued_reqs,
            max_queued_tokens=server.max_num_queued_tokens,
            request_timeout=server.request_timeout,
        ),
        model_names=tuple(server.served_model_name or _names(path, ready.info.model_name)),
        artifact_hash=ready.info.artifact_hash,
        api_keys=tuple(server.api_key or ()),
        stall_seconds=server.stall_timeout,
    )
    return run(
        RemoteEngine(process, ready, stall_timeout=server.stall_timeout),
        tokenizer,
        serving,
        endpoint=endpoint,
        allowed_origins=server.allowed_origins or (),
        shutdown_timeout=server.shutdown_timeout,
        announce=_announce,
    )


def _names(path: Path, model: str) -> list[str]:
    """What a request may call the model: the artifact's name first, then the checkpoint's."""
    return list(dict.fromkeys((path.name.removesuffix(".pw"), model)))


def _show_plan(status: EngineStatus, concurrency: Mapping[str, float]) -> None:
    """Where the budget goes, on stderr: a table, or a line where every line is JSON."""
    from pw.serving.operations.log_lines import memory_plan, memory_plan_fields

    if logs.current().style == "json":
        logger.info("memory plan", extra={"fields": memory_plan_fields(status, concurrency)})
    else:
        print(memory_plan(status, concurrency), file=sys.stderr)


def _announce(message: str) -> None:
    """Where to call: with lines to paste on stdout, or one line where every line is JSON."""
    if logs.current().style == "json":
        logger.info(message.partition("\n")[0], extra={"fields": {"event": "listening"}})
    else:
        print(message, flush=True)
