"""What goes into the engine and what comes out: requests, sampling parameters, outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pw.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is sampled. Checked when made; a bad value is a `RequestError` (400)."""

    max_tokens: int | None = None  # None: up to the context limit
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 or 0 = off
    min_p: float = 0.0
    seed: int | None = None  # None: fresh entropy
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # before which neither end tokens nor stop strings count
    logprobs: int | None = None  # top-k log-probabilities of each sampled token, 0 = chosen only
    prompt_logprobs: bool = False  # log-probability of each prompt token given those before it
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, value: object, expected: str) -> None:
            if not ok:
                raise RequestError(f"{name} must be {expected}: {value}", param=name)

        check(
            self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, ">= 0"
        )
        check(0 <= self.temperature <= 2, "temperature", self.temperature, "between 0 and 2")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        check(self.top_k >= -1, "top_k", self.top_k, "-1, 0 or a positive count")
        check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        check(self.min_tokens >= 0, "min_tokens", self.min_tokens, ">= 0")
        check(
            self.logprobs is None or 0 <= self.logprobs <= 20,
            "logprobs",
            self.logprobs,
            "between 0 and 20",
        )
        check(len(self.stop) <= 16, "stop", len(self.stop), "at most 16 strings")
        check(all(self.stop), "stop", self.stop, "strings that are not empty")
        check(
            self.seed is None or -(2**63) <= self.seed < 2**63,
            "seed",
            self.seed,
            "a 64-bit integer",
        )


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a sampled token and of the most likely ones, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to one request. Deltas, in order; the last has `finish_reason` set."""

    request_id: str
    text: str = ""  # new text, whole characters only, never part of a stop string
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()  # with the first output, entry 0 is None
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason "error"
    prompt_tokens: int = 0
    completion_tokens: int = 0  # in all so far
    mean_bits: float = 0.0  # mean committed bits over the routed weights at this step


@dataclass(frozen=True)
class BytesByClass:
    """Where every byte of the budget is. Planes, LUTs and KV are whole pages."""

    planes: int = 0
    luts: int = 0
    experts_dense: int = 0  # policy dense only
    dense: int = 0  # weights that are never quantized
    kv: int = 0
    free: int = 0  # free pages of the arena
    tables: int = 0  # page tables, KV block tables
    workspace: int = 0  # scratch and activations
    padding: int = 0  # bytes in weight pages that hold nothing (contained in planes and luts)
    host: int = 0  # outside the budget: host plane store
    budget: int = 0

    @property
    def total(self) -> int:
        """Bytes charged to the budget."""
        return (
            self.planes + self.luts + self.experts_dense + self.dense
            + self.kv + self.free + self.tables + self.workspace
        )  # fmt: skip


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot for `/v1/pw/status`, `/metrics`, the demo and logs."""

    step: int = 0
    policy: str = ""
    running: int = 0
    waiting: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    pages_total: int = 0
    pages_weights: int = 0
    pages_kv: int = 0
    pages_free: int = 0
    page_bytes: int = 0
    mean_bits: float = 0.0
    layer_bits: dict[int, float] = field(default_factory=dict)  # model layer -> mean bits
    blocks_by_bits: dict[int, int] = field(default_factory=dict)
    moves_in_flight: int = 0
    bytes_reloaded: int = 0
    bytes_released: int = 0
    transitions: int = 0
    plans: int = 0
    transfer_failures: int = 0  # planes or LUTs that could not be read; the old width stayed
    bytes_over_budget: int = 0  # worst seen; must stay 0
    max_model_len: int = 0
    last_step_time: float = 0.0  # monotonic seconds of the last finished step
    bytes: BytesByClass = field(default_factory=BytesByClass)
    plan_history: tuple[dict[str, object], ...] = ()  # newest last, at most 64
