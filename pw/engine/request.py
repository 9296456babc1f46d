"""What goes into the engine and what comes out: requests, sampling parameters, outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from pw.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf"]

MAX_LOGPROBS = 20  # alternatives of a token at most
MAX_LOGIT_BIAS = 1024  # entries of a request at most
MAX_GRAMMAR_CHARS = 1 << 18


@dataclass(frozen=True)
class Grammar:
    """What the output must match, to its last character. Checked when made, compiled later.

    `text` is the schema as JSON (json_schema), the expression (regex), a JSON list of strings
    (choice) or the grammar (ebnf); json_object has none.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        _check(self.kind in kinds, "grammar", self.kind, f"one of {', '.join(kinds)}")
        size = len(self.text)
        _check(
            size <= MAX_GRAMMAR_CHARS, "grammar", size, f"at most {MAX_GRAMMAR_CHARS} characters"
        )
        if self.kind != "json_object":
            _check(size > 0, "grammar", "", "a text that is not empty")


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is sampled. Checked when made; a bad value is a `RequestError` (400).

    The logits of a step pass, in this order: repetition penalty, frequency and presence penalty,
    `logit_bias`, the tokens that may not come (grammar, `min_tokens`), temperature, `top_k`,
    `top_p`, `min_p`. Log-probabilities are the model's own, before all of it (as in vLLM).
    """

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
    prompt_logprobs: int | None = None  # the same of each prompt token given those before it
    prompt_logprobs_start: int = 0  # place of the first prompt token to score; None before it
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0  # taken from the logit of a token that the output has
    frequency_penalty: float = 0.0  # ... once for each time that the output has it
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    grammar: Grammar | None = None
    min_bits: int | None = None  # while the request runs no block is narrower

    def __post_init__(self) -> None:
        self._check_counts()
        _check(0 <= self.temperature <= 2, "temperature", self.temperature, "between 0 and 2")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(self.top_k >= -1, "top_k", self.top_k, "-1, 0 or a positive count")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(-2 <= value <= 2, name, value, "between -2 and 2")
        repetition = self.repetition_penalty
        _check(0 < repetition < math.inf, "repetition_penalty", repetition, "a positive number")
        for token, bias in self.logit_bias:
            _check(token >= 0, "logit_bias", token, "of token ids that are not negative")
            _check(-100 <= bias <= 100, "logit_bias", bias, "between -100 and 100")

    def _check_counts(self) -> None:
        most = self.max_tokens
        _check(most is None or most >= 0, "max_tokens", most, ">= 0")
        for name in ("min_tokens", "prompt_logprobs_start"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), ">= 0")
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(self, name)
            _check(k is None or 0 <= k <= MAX_LOGPROBS, name, k, f"between 0 and {MAX_LOGPROBS}")
        _check(len(self.stop) <= 16, "stop", len(self.stop), "at most 16 strings")
        _check(all(self.stop), "stop", self.stop, "strings that are not empty")
        seed, biases, bits = self.seed, len(self.logit_bias), self.min_bits
        _check(seed is None or -(2**63) <= seed < 2**63, "seed", seed, "a 64-bit integer")
        _check(biases <= MAX_LOGIT_BIAS, "logit_bias", biases, f"at most {MAX_LOGIT_BIAS} entries")
        _check(bits is None or 1 <= bits <= 16, "min_bits", bits, "between 1 and 16")

    @property
    def penalized(self) -> bool:
        """Whether tokens that came before change the logits."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


def _check(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise RequestError(f"{name} must be {expected}: {value}", param=name)


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token and of the most likely ones at its place, most likely first.

    All numbers come from one computation: a token is the likeliest exactly if its `logprob`
    equals the first of `top`.
    """

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
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # entry 0 of the prompt is None
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason "error"
    error_code: str | None = None  # ... "nonfinite", "engine_failed", ...
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    completion_tokens: int = 0  # in all so far
    mean_bits: float = 0.0  # mean committed bits over the routed weights at this step
    min_bits: int = 0  # least committed bits of any block at this step
    queue_seconds: float = 0.0  # waiting until first scheduled; with the first output
    prefill_seconds: float = 0.0  # from then to the first token; with the first output


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
    workspace: int = 0  # scratch and activations; inboxes of the ranks' sums
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
    pages_cached: int = 0  # of the free ones: they hold prefixes that may be used again
    page_bytes: int = 0
    mean_bits: float = 0.0
    layer_bits: dict[int, float] = field(default_factory=dict)  # model layer -> mean bits
    blocks_by_bits: dict[int, int] = field(default_factory=dict)
    moves_in_flight: int = 0
    bytes_reloaded: int = 0
    bytes_released: int = 0
    transitions: int = 0
    plans: int = 0
    plans_by_trigger: dict[str, int] = field(default_factory=dict)
    plan_runs: int = 0  # of the planner, those that found nothing included
    plan_seconds_total: float = 0.0  # of these
    move_seconds_total: float = 0.0  # of all raises that landed, from start to commit
    moves: int = 0  # raises that landed
    experts_never_routed: int | None = None  # since the start; None: nobody counts
    steps_by_tokens: dict[int, int] = field(default_factory=dict)  # most tokens (2^n) -> steps
    step_tokens: int = 0  # of all steps
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # ... and found
    nonfinite: int = 0  # requests failed by logits that were not finite
    transfer_failures: int = 0  # planes or LUTs that could not be read; the old width stayed
    bytes_over_budget: int = 0  # worst seen; must stay 0
    max_model_len: int = 0
    last_step_time: float = 0.0  # monotonic seconds of the last finished step
    bytes: BytesByClass = field(default_factory=BytesByClass)  # of rank 0, where there are several
    ranks: tuple[BytesByClass, ...] = ()  # of each rank, where there are several
    replicated: int = 0  # bytes of embedding and head, then whole on every rank (part of dense)
    plan_history: tuple[dict[str, object], ...] = ()  # newest last, at most 64
