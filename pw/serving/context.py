"""What all routes of one app share."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from pw import __version__
from pw.errors import ConfigError, RequestError
from pw.serving.engine_protocol import AsyncEngineProtocol, TokenizerProtocol
from pw.serving.generation import Generation
from pw.serving.health import Health
from pw.serving.limits import AdmissionGate, ServingLimits
from pw.serving.logprobs import TokenTexts
from pw.serving.metrics import ServingMetrics
from pw.serving.prompts import PromptEncoder
from pw.serving.schemas import SamplingDefaults
from pw.serving.watch import Watch

logger = logging.getLogger("pw.serving")


@dataclass(frozen=True)
class ServingConfig:
    """How the app presents itself and what it allows."""

    model_names: tuple[str, ...]  # the first is echoed in answers, all are accepted
    artifact_hash: str = ""
    limits: ServingLimits = field(default_factory=ServingLimits)
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    api_keys: tuple[str, ...] = ()  # empty: no key needed

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("at least one served model name is needed, none of them empty")
        if not all(self.api_keys):
            raise ConfigError("an API key is empty", "leave the option out to need no key")


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
        self.encoder = PromptEncoder(tokenizer)
        self.texts = TokenTexts(tokenizer)
        self.gate = AdmissionGate(config.limits)
        self.generations: set[Generation] = set()
        self.watch = Watch(engine)
        self.health = Health(engine, self.gate, self.watch.progress)
        self._unknown_logged: set[str] = set()
        policy = engine.status().policy
        self.fingerprint = "-".join(
            filter(None, ("pw", __version__, config.artifact_hash[:12], policy.replace(":", "-")))
        )
        build = {"version": __version__, "artifact_hash": config.artifact_hash, "policy": policy}
        self.metrics = ServingMetrics(engine, self.model_name, build)

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.config.model_names[0]

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

    def check_healthy(self) -> None:
        """Refuse at once what an engine that has stopped would never answer.

        Raises:
            RequestError: 503.
        """
        if not self.engine.healthy():
            raise RequestError("engine is not able to serve", code="engine_unavailable", status=503)

    def note_unknown(self, names: list[str]) -> None:
        """Log each ignored field once, and no more of them than a client can fill memory with."""
        for name in names:
            if name not in self._unknown_logged and len(self._unknown_logged) < 100:
                self._unknown_logged.add(name)
                logger.info("ignoring unknown request field %r", name[:64])
