"""Arguments of the application: those of `pw serve` by the same names, and how replicas scale."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pw.config import EngineConfig, PrecisionPolicy, parse_bytes
from pw.errors import ConfigError
from pw.serving.context import ServingConfig
from pw.serving.limits import ServingLimits
from pw.serving.openai.defaults import SamplingDefaults
from pw.serving.operations.health import STALL_SECONDS
from pw.serving.replicas.ingress import IngressSettings

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class ReplicaArgs(BaseModel):
    """What `serve run pw.serving.replicas.app:build name=value ...` and a config's `args` take.

    Names and meanings are those of `pw serve --help` unless a comment says more. Paths must exist
    on every node; keys stand in files, so that no config holds one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str  # folder of an artifact
    served_model_name: str | None = None

    memory_budget: str | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = (
        EngineConfig.gpu_memory_utilization
    )
    offload_cpu_memory: str | None = None
    page_bytes: str | None = None
    precision_policy: str = "adaptive"
    min_bits: int | None = None
    max_bits: int | None = None
    device: str = "cuda"  # cpu: no GPU is asked for
    dtype: str = EngineConfig.dtype
    kv_cache_dtype: str = EngineConfig.kv_cache_dtype
    enable_prefix_caching: bool = EngineConfig.enable_prefix_caching
    prefix_cache_precision: str = EngineConfig.prefix_cache_precision
    max_model_len: Count | None = None
    max_num_seqs: Count = EngineConfig.max_num_seqs
    max_num_batched_tokens: Count | None = EngineConfig.max_num_batched_tokens
    max_num_queued_reqs: Count = EngineConfig.max_num_queued_reqs  # of all, in the ingress
    tensor_parallel_size: Count = EngineConfig.tensor_parallel_size
    enable_expert_parallel: bool = EngineConfig.enable_expert_parallel
    checkpoint: Path | None = None
    seed: int | None = None

    request_timeout: Seconds | None = None
    queue_timeout: Seconds | None = None  # in a replica's engine
    stall_timeout: Annotated[float, Field(ge=1)] = STALL_SECONDS
    shutdown_timeout: Seconds = 30.0  # for running requests of a replica that leaves
    api_key_file: Path | None = None  # a key a line
    admin_key_file: Path | None = None  # ... that may change the policy, too
    strict: bool = False
    tool_call_parser: str = "auto"
    log_format: str = "text"

    min_replicas: Count = 1
    max_replicas: Count = 1
    target_ongoing_requests: Annotated[float, Field(gt=0)] | None = None  # None: max_num_seqs
    upscale_delay: Annotated[float, Field(ge=0)] = 30.0  # seconds
    downscale_delay: Annotated[float, Field(ge=0)] = 600.0
    look_back_period: Annotated[float, Field(gt=0)] = 30.0  # seconds over which load is averaged
    max_ongoing_requests: Count | None = None  # that a replica takes; None: max_num_seqs + 8
    max_imbalance: Annotated[int, Field(ge=0)] = 8  # requests that a known prefix may cost
    attempts: Count = 3  # replicas that a request is sent to at most
    accept_timeout: Seconds = 60.0  # for a replica to take a request
    health_check_period: Seconds = 2.0
    ingress_replicas: Count = 1
    num_cpus: Annotated[float, Field(ge=0)] = 1.0  # of a replica; threads of the engine on a CPU
    num_gpus: Annotated[float, Field(ge=0)] | None = None  # None: one a rank, 0 with device cpu

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas must be at least min_replicas: "
                f"{self.max_replicas} < {self.min_replicas}"
            )
        if self.log_format not in ("text", "json"):
            raise ValueError(f"log_format must be text or json: `{self.log_format}`")
        self.engine_config()
        return self

    def absolute(self) -> Self:
        """The same with paths that mean the same in any process."""
        names = ("model", "api_key_file", "admin_key_file", "checkpoint")
        paths = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return self.model_copy(
            update={name: type(path)(os.path.abspath(path)) for name, path in paths.items()}
        )

    @property
    def target(self) -> float:
        """Requests that a replica shall run; more on average start another replica."""
        return self.target_ongoing_requests or float(self.max_num_seqs)

    @property
    def ongoing(self) -> int:
        """Requests that a replica takes; others wait in the ingress, for any replica."""
        return self.max_ongoing_requests or self.max_num_seqs + 8

    @property
    def gpus(self) -> float:
        """GPUs of a replica."""
        if self.num_gpus is not None:
            return self.num_gpus
        return 0.0 if self.device == "cpu" else float(self.tensor_parallel_size)

    def engine_config(self) -> EngineConfig:
        """Settings of a replica's engine.

        Raises:
            ConfigError: One cannot be honoured.
        """
        return EngineConfig(
            memory_budget=_size(self.memory_budget),
            offload_cpu_memory=_size(self.offload_cpu_memory),
            page_bytes=_size(self.page_bytes),
            policy=PrecisionPolicy.parse(self.precision_policy),
            **self.model_dump(
                include={
                    *("gpu_memory_utilization", "min_bits", "max_bits", "device", "dtype"),
                    *("kv_cache_dtype", "enable_prefix_caching", "prefix_cache_precision"),
                    *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
                    *("max_num_queued_reqs", "checkpoint", "seed"),
                    *("tensor_parallel_size", "enable_expert_parallel"),
                }
            ),
        )

    def serving_config(self, model: str, artifact_hash: str) -> ServingConfig:
        """Settings of a replica's app.

        Args:
            model: Name of the checkpoint.
            artifact_hash: Of the artifact.

        Raises:
            ConfigError: One cannot be honoured, or a file with keys cannot be read.
        """
        path = Path(self.model)
        names = (self.served_model_name,) if self.served_model_name else ()
        return ServingConfig(
            model_names=names or tuple(dict.fromkeys((path.name.removesuffix(".pw"), model))),
            artifact_hash=artifact_hash,
            limits=ServingLimits(
                max_open_sequences=self.max_num_seqs + self.max_num_queued_reqs,
                request_timeout=self.request_timeout,
            ),
            defaults=SamplingDefaults.of_model(path),
            strict=self.strict,
            tool_call_parser=self.tool_call_parser,
            grammar_tokenizer=path,
            stall_seconds=self.stall_timeout,
            **self._keys(),
        )

    def ingress_settings(self) -> IngressSettings:
        """Settings of the ingress.

        Raises:
            ConfigError: A file with keys cannot be read.
        """
        return IngressSettings(attempts=self.attempts, **self._keys())

    def _keys(self) -> dict[str, Any]:
        return {
            "api_keys": _keys_of(self.api_key_file),
            "admin_keys": _keys_of(self.admin_key_file),
        }


def _keys_of(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise ConfigError(f"keys cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"file has no key: `{file}`")
    return tuple(lines)


def _size(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)
