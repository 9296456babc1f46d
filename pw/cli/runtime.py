"""Commands that run a model: serve, generate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pw.cli.command import print_json
from pw.cli.locate import artifact_path
from pw.cli.options import Common, Planner, Runtime, Sampling, Server
from pw.errors import PwError

if TYPE_CHECKING:
    from pw.engine.request import EngineStatus


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
    path = artifact_path(model, quiet=common.quiet)

    from pw.engine import Engine

    engine = Engine.from_artifact(path, config)
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
    model: ModelName, server: Server, runtime: Runtime, planner: Planner, common: Common
) -> None:
    """Serve a model over HTTP with OpenAI's API, inside one memory budget.

    SIGINT or SIGTERM drains: running requests finish, new ones get a 503. A second one ends now.
    """
    config = runtime.config(planner, max_num_queued_reqs=server.max_num_queued_reqs)
    if not server.dry_run:
        from pw.serving.server import bind

        bind(server.host, server.port).close()  # a taken port is told now, not minutes later
    path = artifact_path(model, quiet=common.quiet)

    from pw.engine import AsyncEngine, Engine
    from pw.serving.context import ServingConfig
    from pw.serving.limits import ServingLimits
    from pw.serving.schemas import SamplingDefaults
    from pw.serving.server import serve as run
    from pw.store import Artifact

    engine = Engine.from_artifact(path, config)
    if not common.quiet:
        _print_plan(engine.status())
    if server.dry_run:
        return
    serving = ServingConfig(
        model_names=tuple(server.served_model_name or _names(path, engine.model_name)),
        artifact_hash=Artifact.open(path).artifact_hash,
        limits=ServingLimits(max_open_sequences=config.max_num_seqs + config.max_num_queued_reqs),
        api_keys=tuple(server.api_key or ()),
        defaults=SamplingDefaults.of_model(path),
    )
    code = run(
        AsyncEngine(engine),
        engine.tokenizer,
        serving,
        host=server.host,
        port=server.port,
        shutdown_timeout=server.shutdown_timeout,
    )
    raise typer.Exit(code)


def _names(path: Path, model: str) -> list[str]:
    """What a request may call the model: the artifact's name first, then the checkpoint's."""
    return list(dict.fromkeys((path.name.removesuffix(".pw"), model)))


def _print_plan(status: EngineStatus) -> None:
    """Where the budget goes, on stderr."""
    held = status.bytes
    classes = ("dense", "experts_dense", "planes", "luts", "kv", "free", "tables", "workspace")
    lines = [
        f"memory plan: {held.total:,} of {held.budget:,} bytes, policy {status.policy}",
        *(f"  {name:<14}{size:>16,}" for name in classes if (size := getattr(held, name))),
        f"  {status.pages_total:,} pages of {status.page_bytes:,} bytes, "
        f"contexts up to {status.max_model_len:,} tokens, mean {status.mean_bits:.2f} bits",
    ]
    print("\n".join(lines), file=sys.stderr)
