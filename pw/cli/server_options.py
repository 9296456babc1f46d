"""Options of `pw serve` alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pw.cli.config_file import read_config
from pw.cli.options import option
from pw.config import EngineConfig
from pw.errors import ConfigError

_server = partial(option, "Server")


@dataclass(frozen=True)
class Server:
    """How `serve` presents itself."""

    host: Annotated[str, _server("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _server("Port; 0 takes a free one.")] = 8000
    uds: Annotated[Path | None, _server("Unix socket instead of host and port.")] = None
    ssl_certfile: Annotated[Path | None, _server("Certificate chain, PEM: serve HTTPS.")] = None
    ssl_keyfile: Annotated[Path | None, _server("Its key, PEM.")] = None
    root_path: Annotated[str, _server("Path under which a proxy shows this server.")] = ""
    allowed_origins: Annotated[
        list[str] | None,
        _server("Origin whose pages may call from a browser, `*` for all; repeatable."),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        _server("Name in answers; repeat it for more names (default: the artifact's)."),
    ] = None
    api_key: Annotated[
        list[str] | None, _server("Key that clients must send; repeatable (default: none).")
    ] = None
    max_num_queued_reqs: Annotated[int, _server("Sequences that may wait; more get a 503.")] = (
        EngineConfig.max_num_queued_reqs
    )
    max_num_queued_tokens: Annotated[
        int | None,
        _server("Prompt tokens that may wait; a request beyond them gets a 503 (default: any)."),
    ] = None
    request_timeout: Annotated[
        float | None, _server("Seconds that a request may take in all (default: no limit).")
    ] = None
    queue_timeout: Annotated[
        float | None, _server("Seconds that it may wait to begin (default: no limit).")
    ] = None
    stall_timeout: Annotated[
        float, _server("Seconds of the engine's silence after which its streams end.")
    ] = 60.0
    shutdown_timeout: Annotated[
        float, _server("Seconds that running requests get after the first signal.")
    ] = 30.0
    log_format: Annotated[str, _server("text, or json: one object a line.")] = "text"
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Settings in YAML, named as the flags; flags and PW_... go before.",
            rich_help_panel="Server",
            callback=read_config,
            is_eager=True,
        ),
    ] = None
    dry_run: Annotated[bool, _server("Load, print the memory plan, leave.", "--dry-run")] = False

    def check(self) -> None:
        """Refuse values that cannot be meant, before an engine is started.

        Raises:
            ConfigError: A timeout is not positive, or shorter than the engine's signs of life; a
                name or a key is empty.
        """
        for name in ("request_timeout", "queue_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be positive: {seconds}")
        if self.max_num_queued_tokens is not None and self.max_num_queued_tokens < 1:
            raise ConfigError(
                f"--max-num-queued-tokens must be positive: {self.max_num_queued_tokens}"
            )
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"--log-format must be text or json: `{self.log_format}`")
        if not self.stall_timeout >= 1:
            raise ConfigError(f"--stall-timeout must be at least 1 second: {self.stall_timeout}")
        if not self.shutdown_timeout >= 0:
            raise ConfigError(f"--shutdown-timeout must not be negative: {self.shutdown_timeout}")
        for flag, given in (
            ("--served-model-name", self.served_model_name),
            ("--api-key", self.api_key),
        ):
            if not all(given or ()):
                raise ConfigError(f"{flag} is empty", "leave it out, or give one")
