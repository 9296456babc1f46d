"""What all routes of one app share."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pw import __version__
from pw.engine.request import SamplingParams
from pw.errors import ConfigError, RequestError
from pw.serving.limits import AdmissionGate, ServingLimits
from pw.serving.openai.defaults import SamplingDefaults
from pw.serving.openai.generation import Generation, SequenceSpec
from pw.serving.openai.logprobs import TokenTexts
from pw.serving.openai.prompts import EncodedPrompt, PromptEncoder
from pw.serving.openai.tool_syntaxes import SYNTAXES
from pw.serving.openai.tools import ToolSettings
from pw.serving.operations.health import STALL_SECONDS, Health
from pw.serving.operations.metrics import ServingMetrics
from pw.serving.operations.watch import Watch
from pw.serving.process.engine_protocol import AsyncEngineProtocol, TokenizerProtocol
from pw.serving.structured.grammars import GrammarChecker

logger = logging.getLogger("pw.serving")


@dataclass(frozen=True)
class ServingConfig:
    """How the app presents itself and what it allows."""

    model_names: tuple[str, ...]  # the first is echoed in answers, all are accepted
    artifact_hash: str = ""
    limits: ServingLimits = field(default_factory=ServingLimits)
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    api_keys: tuple[str, ...] = ()  # empty: no key needed
    admin_keys: tuple[str, ...] = ()  # empty: nobody changes the policy
    strict: bool = False  # refuse unknown fields
    tokens_by_id: bool = False  # spell tokens in logprobs as `token_id:123`
    tool_call_parser: str = "auto"  # a name of `tool_syntaxes.SYNTAXES`, or by the chat template
    auto_tool_choice: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # for every chat template
    grammar_tokenizer: Path | None = None  # folder of the tokenizer; None: no structured output
    log_prompts: bool = False
    max_log_len: int | None = None  # characters of a prompt in the log
    stall_seconds: float = STALL_SECONDS  # without a step, with requests: not ready

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("at least one served model name is needed, none of them empty")
        if not all((*self.api_keys, *self.admin_keys)):
            raise ConfigError("an API key is empty", "leave the option out to need no key")
        if self.tool_call_parser not in ("auto", *SYNTAXES):
            raise ConfigError(
                f"--tool-call-parser must be auto or one of {', '.join(SYNTAXES)}: "
                f"`{self.tool_call_parser}`"
            )


class ServingContext:
    """The engine, the tokenizer's thread, the gate and the metrics of one app."""

    def __init__(
        self, engine: AsyncEngineProtocol, tokenizer: TokenizerProtocol, config: ServingConfig
    ) -> None:
        self.engine = engine
        self.config = config
        self.limits = config.limits
        self.created = int(time.time())  # Unix seconds
        self.has_chat = tokenizer.has_chat_template
        self.tokenizer_info = tokenizer.info()
        self.encoder = PromptEncoder(tokenizer)
        self.tools = ToolSettings.of_model(
            tokenizer, config.tool_call_parser, auto=config.auto_tool_choice
        )
        self.grammars = GrammarChecker(config.grammar_tokenizer)
        self._texts = {by_id: TokenTexts(tokenizer, by_id=by_id) for by_id in (False, True)}
        self.gate = AdmissionGate(config.limits)
        self.generations: set[Generation] = set()
        self.watch = Watch(engine, config.stall_seconds)
        self.health = Health(engine, self.gate, self.watch.progress)
        self._unknown_logged: set[str] = set()
        policy = engine.status().policy
        build = {"version": __version__, "artifact_hash": config.artifact_hash, "policy": policy}
        self.metrics = ServingMetrics(engine, self.model_name, build)

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.config.model_names[0]

    @property
    def fingerprint(self) -> str:
        """Version, artifact and policy: what an answer depends on beside its request."""
        policy = self.engine.status().policy.replace(":", "-")
        return "-".join(filter(None, ("pw", __version__, self.config.artifact_hash[:12], policy)))

    @property
    def ready(self) -> bool:
        """Whether new requests are taken and can be served."""
        return self.health.not_ready() is None

    def check_model(self, name: str | None) -> None:
        """Accept a served name or none.

        Raises:
            RequestError: 404 `model_not_found`.
        """
        if name is not None and name not in self.config.model_names:
            raise RequestError(
                f"model is not served here: `{name}`",
                code="model_not_found",
                param="model",
                status=404,
                hint=f"use `{self.model_name}`",
            )

    def check_queue(self, tokens: int) -> None:
        """Refuse prompts for which there is no room behind those that wait.

        A request that finds nobody waiting is taken, however long it is.

        Args:
            tokens: Of all prompts of the request, each choice's counted.

        Raises:
            RequestError: 503.
        """
        bound = self.limits.max_queued_tokens
        if bound is None:
            return
        waiting = sum(generation.waiting_tokens for generation in self.generations)
        if waiting and waiting + tokens > bound:
            raise RequestError(
                f"queue is full: {waiting} of {bound} prompt tokens wait",
                code="server_overloaded",
                status=503,
            )

    def check_healthy(self) -> None:
        """Refuse at once what an engine that has stopped would never answer.

        Raises:
            RequestError: 503.
        """
        if not self.engine.healthy():
            raise RequestError("engine is not able to serve", code="engine_unavailable", status=503)

    def note_unknown(self, names: list[str]) -> None:
        """Log each ignored field once, and no more of them than a client can fill memory with.

        Raises:
            RequestError: The server is strict.
        """
        if names and self.config.strict:
            raise RequestError(
                f"unknown field: `{names[0][:64]}`", code="unknown_parameter", param=names[0][:64]
            )
        for name in names:
            if name not in self._unknown_logged and len(self._unknown_logged) < 100:
                self._unknown_logged.add(name)
                logger.info("ignoring unknown request field %r", name[:64])

    def token_texts(self, by_id: bool | None) -> TokenTexts:
        """How tokens are spelled in logprobs; None: as the server is set."""
        return self._texts[self.config.tokens_by_id if by_id is None else by_id]

    def deadline(self) -> float | None:
        """When a request that comes now must have ended, on the event loop's clock."""
        seconds = self.limits.request_timeout
        return None if seconds is None else asyncio.get_running_loop().time() + seconds

    def generation(
        self,
        request_id: str,
        sequences: list[SequenceSpec],
        *,
        deadline: float | None,
        arrived: float,
    ) -> Generation:
        """A generation that has not started; see `Generation`."""
        return Generation(
            self.engine,
            self.metrics,
            self.generations,
            request_id,
            sequences,
            limits=self.limits,
            deadline=deadline,
            arrived=arrived,
        )

    def precision_headers(self) -> dict[str, str]:
        """Which plan was in force when an answer's head was sent; see `/v1/pw/precision`."""
        return {"x-pw-precision-epoch": str(self.engine.status().plans)}

    async def log_prompts(
        self, request_id: str, prompts: list[EncodedPrompt], params: SamplingParams
    ) -> None:
        """Log what a client asks, where the operator wants that."""
        if not self.config.log_prompts:
            return
        for prompt in prompts:
            text = await self.encoder.decode(prompt.token_ids)
            logger.info("%s: prompt %r, %s", request_id, text[: self.config.max_log_len], params)
