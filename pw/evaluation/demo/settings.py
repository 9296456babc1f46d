"""The demo's dials: how tight the budget is, what the load sends, what is scored."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pw.config import EngineConfig, PrecisionPolicy
from pw.engine import Engine
from pw.evaluation.demo.load import Wave
from pw.models.resolve import asset

MODEL = "tiny"
LOAD_SHARE = 4  # every so manieth held-out document feeds the load, the others are scored


@dataclass(frozen=True)
class DemoSettings:
    """What one run of the demo does. Defaults: under 4 minutes on two CPU cores."""

    waves: tuple[Wave, ...] = (
        Wave("conversations that grow", 6, 14, 6, 13, 0.2),
        Wave("a burst of requests", 24, 1, 50, 80, 0.0),
        Wave("long documents", 3, 4, 100, 50, 0.2),
    )
    room_share: float = 0.6  # KV room beside the widest experts, as a share of their bytes
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 128
    kv_cache_dtype: str = "bfloat16"
    transfer_budget: str = "2MiB"  # bytes a second that may come back: slow enough to be watched
    sample_seconds: float = 0.1
    quiet_seconds: float = 1.0  # between two waves, after the bits have come back
    settle_seconds: float = 30.0  # within which they must
    snapshots: int = 16
    chunks: int = 64
    chunk_tokens: int = 512

    @property
    def requests(self) -> int:
        """Requests of the whole load."""
        return sum(wave.requests for wave in self.waves)

    def serve_arguments(self, artifact: Path, budget: int, trace: Path) -> list[str]:
        """What follows `pw serve`."""
        return [
            str(artifact),
            *("--memory-budget", str(budget)),
            *("--precision-policy", "adaptive"),
            *("--precision-trace", str(trace)),
            *("--kv-cache-dtype", self.kv_cache_dtype),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--transfer-budget", self.transfer_budget),
            *("--served-model-name", MODEL),
        ]

    def tight_budget(self, artifact: Path, widest: int) -> int:
        """A memory budget that holds the widest experts and little KV beside them.

        Args:
            artifact: To be served.
            widest: Its most bits.
        """
        config = EngineConfig(
            memory_budget=1 << 32,
            policy=PrecisionPolicy("static", bits=widest),
            device="cpu",
            kv_cache_dtype=self.kv_cache_dtype,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        held = Engine.from_artifact(artifact, config).status().bytes
        return held.total - held.free + round(self.room_share * (held.planes + held.luts))


def heldout_documents() -> tuple[list[str], list[str]]:
    """Held-out text of the package, never calibrated on: (for the load, to be scored)."""
    lines = asset("heldout.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [str(json.loads(line)["text"]) for line in lines]
    load = texts[::LOAD_SHARE]
    return load, [text for number, text in enumerate(texts) if number % LOAD_SHARE]
