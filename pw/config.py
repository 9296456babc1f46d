"""Frozen settings of each stage, checked when made. The same objects go into the manifest."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from pw.errors import ConfigError

WIDTHS = range(2, 9)  # widths a LUT can have
LEAST_PAGE = 4096  # bytes
LEAST_STEP_TOKENS = 512  # of a step, where their number is not given
_MOST_BYTES = 1 << 60  # what is more is a slip of the pen, and no 64-bit number holds its sums
_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes from `10GiB`, `512MB`, `64k` or a plain number.

    Raises:
        ConfigError: The text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    size = int(float(match[1]) * _SUFFIX[match[2] or ""]) if match and len(text) < 30 else 0
    if not 0 < size < _MOST_BYTES:
        raise ConfigError(f"not a size in bytes: `{text}`", "write it like `24MiB` or `10GB`")
    return size


def parse_memory(flag: str, text: str) -> int:
    """Bytes of memory, as `parse_bytes` reads them. Elsewhere a bare number means GiB: ask.

    Args:
        flag: What the message calls it.
        text: A size; without a unit at least a MiB.

    Raises:
        ConfigError: The text is no size, or a number so small that bytes cannot be meant.
    """
    size, number = parse_bytes(text), text.strip()
    if size < 1 << 20 and re.fullmatch(r"[\d.]+", number):
        raise ConfigError(
            f"{flag} is in bytes, and so few hold nothing: `{text}`",
            f"did you mean `{number}GiB`?",
        )
    return size


def format_bytes(number: float) -> str:
    """Bytes in the largest binary unit that keeps it above 1: 25165824 -> `24.00 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.2f} {unit}"
        number /= 1024
    return f"{number:.2f} TiB"


def format_exactly(number: int) -> str:
    """Bytes for reading and for copying: 40002624 -> `38.15 MiB (40,002,624 bytes)`."""
    return f"{format_bytes(number)} ({number:,} bytes)"


def format_seconds(seconds: float) -> str:
    """A duration in the largest unit that keeps it above 2: 4000 -> `67 min`."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True)
class CalibrationConfig:
    """Which text calibrates a model. Offline stages that run the model take it whole."""

    dataset: str = "bundled"  # "bundled", or a path to .jsonl (text | messages) or .txt
    nsamples: int = 128
    seqlen: int = 512  # tokens
    seed: int = 0

    def __post_init__(self) -> None:
        if self.nsamples < 1:
            raise ConfigError(f"nsamples must be at least 1: {self.nsamples}")
        if self.seqlen < 8:
            raise ConfigError(f"seqlen must be at least 8 tokens: {self.seqlen}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be between 0 and 2^63 - 1: {self.seed}")


@dataclass(frozen=True)
class QuantizeConfig:
    """How the experts become bit-planes."""

    min_bits: int = 2
    max_bits: int | None = None  # None = auto: widest whose real bytes stay below the dense weights
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    strict_coverage: bool = False
    codebook: str = "joint"  # "joint": all widths under the full Hessian; "kmeans": its start alone

    def __post_init__(self) -> None:
        if self.codebook not in ("joint", "kmeans"):
            raise ConfigError(f"codebook must be `joint` or `kmeans`: `{self.codebook}`")
        if self.min_bits not in (2, 3):
            raise ConfigError(f"min_bits must be 2 or 3: {self.min_bits}")
        if self.max_bits is not None and not self.min_bits <= self.max_bits <= 8:
            raise ConfigError(
                f"max_bits must be between min_bits ({self.min_bits}) and 8: {self.max_bits}"
            )


@dataclass(frozen=True)
class TuneConfig:
    """For which bytes the codebooks of `pw tune` are fitted."""

    bits: float = 3.0  # the planner has the bytes of uniform widths of so many bits
    distill: int = 0  # steps of training on the divergence from the unquantized model
    distill_text: str = ""  # .jsonl or .txt that is trained on beside the calibration text

    def __post_init__(self) -> None:
        if self.distill < 0:
            raise ConfigError(f"distill must be at least 0 steps: {self.distill}")
        if self.distill_text and not self.distill:
            raise ConfigError(
                f"this text is trained on by distillation alone: `{self.distill_text}`",
                "give --distill 240, too (recipes: `distill = 240`), or leave --distill-text out",
            )


@dataclass(frozen=True)
class PrecisionPolicy:
    """`adaptive`, `dense`, `static:<bits>`, `static:<file>` or `replay:<trace>`."""

    kind: str  # "adaptive" | "dense" | "static" | "replay"
    bits: int | None = None  # of static:<bits>
    path: Path | None = None  # of static:<file> and replay:<trace>

    @classmethod
    def parse(cls, text: str) -> PrecisionPolicy:
        """Read the command line form.

        Raises:
            ConfigError: The text names no policy.
        """
        kind, _, argument = text.partition(":")
        if kind in ("adaptive", "dense") and not argument:
            return cls(kind)
        if kind == "static" and argument.isdigit():
            if int(argument) not in WIDTHS:
                raise ConfigError(
                    f"static width must be 2 to 8: `{text}`",
                    "and one that the artifact has: `pw inspect` shows them",
                )
            return cls(kind, bits=int(argument))
        if kind in ("static", "replay") and argument:
            return cls(kind, path=Path(argument))
        raise ConfigError(
            f"unknown precision policy: `{text}`",
            "use adaptive, static:<bits>, static:<file>, replay:<trace> or dense",
        )

    def __str__(self) -> str:
        argument = self.bits if self.bits is not None else self.path
        return self.kind if argument is None else f"{self.kind}:{argument}"


@dataclass(frozen=True)
class PlannerConfig:
    """The planner's and the pressure policy's dials (DESIGN 5 and 7)."""

    planner: str = "hull"  # "hull" | "greedy" (the paper's)
    metric: str = "output_gradient"  # "output_gradient" | "hessian"
    # "off" | "learned" | "exact" | "auto": learned where heads are fitted. Beside routing it wins
    # nothing that could be measured (docs/quality.md).
    residual: str = "off"
    routing_window: int = 4096  # tokens after which a count has decayed to 1/e
    routing_prior: int = 256  # tokens' worth of offline trace that online counts are shrunk toward
    routing_rule: str = "proportional"  # damage to mass; or "buckets" (the paper's)
    evidence_prior: int = 16  # router weight that a block's own damage is shrunk with to the usual
    # Buckets: mass relative to the offline trace with `output_gradient`, to uniform with `hessian`.
    hot_mass: float = 2.0  # relative mass from which an expert is hot
    cold_mass: float = 0.5  # ... below which it is cold
    hot_multiplier: float = 2.0
    warm_multiplier: float = 1.0
    cold_multiplier: float = 0.5
    hot_expert_floor: int | None = None  # bits; None = min_bits + 1 with buckets, else min_bits
    layer_floor: float = 0.0  # least mean bits of a layer; 0 = min_bits
    residual_clamp: float = 1.0  # |log eta| at most
    low_watermark: float = 0.01  # fraction of arena pages free below which planes are given up
    high_watermark: float = 0.10  # ... above which planes come back
    idle_grace_seconds: float = 0.5  # an engine idle for less keeps what the next request needs
    dwell_steps: int = 16  # least steps between a reduction and the next reload
    settle_steps: int = 64  # pages free at so many steps in a row are not needed; 0 = never judged
    transfer_budget_bytes: int = 1 << 28  # bytes reloaded per second at most
    rebalance_steps: int = 256  # steps between trades of planes at constant bytes; 0 = never
    forecast_steps: int = 8  # steps of decoding whose KV pages count as needed

    def __post_init__(self) -> None:
        if self.planner not in ("hull", "greedy"):
            raise ConfigError(f"planner must be hull or greedy: `{self.planner}`")
        if self.metric not in ("output_gradient", "hessian"):
            raise ConfigError(f"metric must be output_gradient or hessian: `{self.metric}`")
        if self.routing_rule not in ("proportional", "buckets"):
            raise ConfigError(
                f"routing rule must be proportional or buckets: `{self.routing_rule}`"
            )
        if self.residual not in ("auto", "learned", "exact", "off"):
            raise ConfigError(f"residual must be auto, learned, exact or off: `{self.residual}`")
        if not 0 <= self.low_watermark < self.high_watermark <= 1:
            raise ConfigError(
                "watermarks must satisfy 0 <= low < high <= 1: "
                f"low {self.low_watermark}, high {self.high_watermark}"
            )
        if self.routing_window < 1:
            raise ConfigError(f"routing_window must be at least 1 token: {self.routing_window}")
        if self.dwell_steps < 0 or self.forecast_steps < 0:
            raise ConfigError(
                "dwell_steps and forecast_steps must not be negative: "
                f"{self.dwell_steps}, {self.forecast_steps}"
            )
        if self.hot_expert_floor is not None and self.hot_expert_floor not in WIDTHS:
            raise ConfigError(f"hot_expert_floor must be 2 to 8 bits: {self.hot_expert_floor}")
        if not 0 <= self.layer_floor <= WIDTHS[-1]:
            raise ConfigError(f"layer_floor must be 0 to 8 bits: {self.layer_floor}")


@dataclass(frozen=True)
class EngineConfig:
    """What `pw serve`, `pw generate` and `pw eval` need to run a model."""

    memory_budget: int | None = None  # bytes for weights + KV + workspace; exclusive with the next
    gpu_memory_utilization: float = 0.9  # fraction of device (or host, on a CPU) memory
    policy: PrecisionPolicy = field(default_factory=lambda: PrecisionPolicy("adaptive"))
    device: str = "auto"  # "auto" | "cpu" | "cuda"
    dtype: str = "auto"  # "auto": the model's own on a GPU, float32 on a CPU
    kv_cache_dtype: str = "auto"  # "auto": as dtype
    page_bytes: int | None = None  # None: chosen for least padding
    max_model_len: int | None = None  # tokens; None: what the model states
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None  # tokens in one step; None: see `step_tokens`
    max_num_queued_reqs: int = 256
    enforce_eager: bool = False  # no CUDA graphs: slower, for debugging
    async_scheduling: bool = True  # decode steps in graphs are launched before the last is read
    min_bits: int | None = None  # None: the artifact's
    max_bits: int | None = None
    load_format: str = "auto"  # "auto" | "dummy": random weights in the shape of a config
    enable_prefix_caching: bool = True
    prefix_cache_precision: str = (
        "not-worse"  # "not-worse" | "any" | "exact": pw.memory.prefix_cache
    )
    offload_cpu_memory: int | None = None  # bytes of host plane store; None: all planes
    seed: int | None = None  # of requests that bring none; None: fresh entropy for each
    trace: Path | None = None  # JSONL of every transition
    trace_requests: bool = False  # put token ids of requests into the trace too
    checkpoint: Path | None = None  # source of dense experts (policy dense); None: the manifest's
    tensor_parallel_size: int = 1  # ranks, each with a device and a budget of its own
    enable_expert_parallel: bool = False  # routed experts by rank; else a part of each
    collective_timeout: float = 60.0  # seconds that a rank waits for the others in a step
    planner: PlannerConfig = field(default_factory=PlannerConfig)

    def step_tokens(self, device_type: str) -> int:
        """Tokens in one step at most, where the budget holds them. On a GPU a short step takes as
        long as the host needs to launch it: 512 tokens of a prompt 30 ms in the shape of
        Qwen1.5-MoE, 2,048 of them 51.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return 2048 if device_type == "cuda" else LEAST_STEP_TOKENS

    def __post_init__(self) -> None:
        self._check_ranks()
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1]: {self.gpu_memory_utilization}"
            )
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format must be auto or dummy: `{self.load_format}`")
        if self.prefix_cache_precision not in ("not-worse", "any", "exact"):
            raise ConfigError(
                f"unknown prefix cache precision: `{self.prefix_cache_precision}`",
                "use not-worse, any or exact",
            )
        if self.max_num_seqs < 1 or self.step_tokens("cpu") < 1:
            raise ConfigError(
                "max_num_seqs and max_num_batched_tokens must be at least 1: "
                f"{self.max_num_seqs}, {self.max_num_batched_tokens}"
            )
        if self.max_num_queued_reqs < 0:
            raise ConfigError(
                f"max_num_queued_reqs must not be negative: {self.max_num_queued_reqs}"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device must be auto, cpu or cuda: `{self.device}`")
        page = self.page_bytes
        if page is not None and (page < LEAST_PAGE or page & (page - 1)):
            raise ConfigError(f"page_bytes must be a power of two from {LEAST_PAGE}: {page}")

    def _check_ranks(self) -> None:
        size = self.tensor_parallel_size
        if size < 1:
            raise ConfigError(f"tensor_parallel_size must be at least 1: {size}")
        if not self.collective_timeout > 0:
            raise ConfigError(f"collective_timeout must be positive: {self.collective_timeout}")
        if self.enable_expert_parallel and size == 1:
            raise ConfigError(
                "enable_expert_parallel needs several ranks, tensor_parallel_size is 1",
                "give --tensor-parallel-size too",
            )
        if self.enable_expert_parallel and self.policy.kind == "static" and self.policy.path:
            raise ConfigError(
                f"a file gives each expert widths of its own, with enable_expert_parallel {size} "
                f"experts share one: `{self.policy}`",
                "use static:<bits> or adaptive, or leave --enable-expert-parallel out",
            )
        if size > 1 and self.planner.residual == "exact":
            raise ConfigError(
                f"residual exact needs all of an expert on one rank: {size} ranks",
                "use learned or off",
            )
