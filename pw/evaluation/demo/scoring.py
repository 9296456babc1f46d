"""Perplexity of the widths that a run really had, beside uniform widths of the same bytes.

Teacher-forced on the realised bit timeline: snapshots of the committed bits, spread evenly over the
steps of the run, each score their share of the held-out chunks as a static allocation. The uniform
opponent gets, chunk by chunk, the bytes that the snapshot of that chunk had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pw.blocks import ExpertGeometry
from pw.config import EngineConfig, PrecisionPolicy
from pw.engine import Engine
from pw.engine.request import BytesByClass
from pw.evaluation.bootstrap import Interval, paired_interval
from pw.evaluation.perplexity import PerplexityReport, perplexity
from pw.planning.bits_file import write_bits

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """Quality and bytes of one policy. Arrays are per chunk, in text order."""

    policy: str
    nll: FloatArray  # [chunks], mean negative log-probability of a token in nats
    bits: FloatArray  # [chunks], mean bits of the routed weights
    expert_bytes: FloatArray  # [chunks], planes + LUTs in whole pages, or the unquantized experts
    bytes: BytesByClass  # mean over chunks

    @property
    def perplexity(self) -> float:
        """Of all chunks, each with the same weight."""
        return math.exp(self.nll.mean())


@dataclass(frozen=True)
class Comparison:
    """All scores on the same chunks."""

    dense: Score
    uniform: tuple[Score, ...]  # by width, ascending
    adaptive: Score
    equal_bytes: FloatArray  # [chunks], nll of uniform widths at the adaptive run's bytes
    snapshots: int

    @property
    def against_equal_bytes(self) -> Interval:
        """Adaptive minus uniform at the same bytes, nats per token; negative = better."""
        return paired_interval(self.adaptive.nll.tolist(), self.equal_bytes.tolist())

    @property
    def against_narrowest(self) -> Interval:
        """Adaptive minus the narrowest uniform width, nats per token; negative = better."""
        return paired_interval(self.adaptive.nll.tolist(), self.uniform[0].nll.tolist())

    def over_dense(self, nll: FloatArray) -> Interval:
        """What is lost against the unquantized model, nats per token."""
        return paired_interval(nll.tolist(), self.dense.nll.tolist())


class Scorer:
    """Scores allocations on the same chunks.

    Args:
        artifact: What to run.
        chunks: Token ids, all of one length.
        kv_cache_dtype: As the server had it.
    """

    def __init__(self, artifact: Path, chunks: Sequence[list[int]], kv_cache_dtype: str) -> None:
        self._artifact, self._chunks = artifact, chunks
        self._kv_cache_dtype = kv_cache_dtype

    def policy(self, policy: PrecisionPolicy) -> Score:
        """Score all chunks under one policy."""
        report = self._run(policy, self._chunks)
        count = len(self._chunks)
        return Score(
            policy=str(policy),
            nll=np.array(report.chunk_nll),
            bits=np.full(count, report.mean_bits),
            expert_bytes=np.full(count, _expert_bytes(report.bytes)),
            bytes=report.bytes,
        )

    def snapshots(
        self, bits: Sequence[NDArray[np.int64]], geometry: ExpertGeometry, folder: Path
    ) -> Score:
        """Score chunk i under snapshot i mod their number.

        Args:
            bits: Widths [n] of each snapshot, in geometry order.
            geometry: Of the model.
            folder: Keeps the snapshots as bits files, to be served again with `static:<file>`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        count = len(self._chunks)
        nll, width, size = np.empty(count), np.empty(count), np.empty(count)
        held: list[BytesByClass] = []
        for number, widths in enumerate(bits[:count]):
            path = folder / f"snapshot-{number:02d}.json"
            write_bits(path, geometry, widths)
            mine = slice(number, count, len(bits))
            report = self._run(PrecisionPolicy("static", path=path), self._chunks[mine])
            nll[mine], width[mine] = report.chunk_nll, report.mean_bits
            size[mine] = _expert_bytes(report.bytes)
            held += [report.bytes] * len(report.chunk_nll)
        return Score("adaptive", nll, width, size, _mean_bytes(held))

    def _run(self, policy: PrecisionPolicy, chunks: Sequence[list[int]]) -> PerplexityReport:
        config = EngineConfig(
            policy=policy,
            device="cpu",
            kv_cache_dtype=self._kv_cache_dtype,
            max_model_len=len(chunks[0]) + 1,
            max_num_seqs=4,
        )
        engine = Engine.from_artifact(self._artifact, config)
        return perplexity(engine, chunks)


def at_equal_bytes(dense: Score, uniform: Sequence[Score], expert_bytes: FloatArray) -> FloatArray:
    """Per chunk, the nll of uniform widths at so many bytes, between the two widths around them.

    What quantization adds to the loss falls about geometrically with the bytes, so that is how it
    is interpolated: a straight line would lie above it and make the opponent weaker than it is.
    Only where a width adds nothing is the line straight.

    Args:
        dense: The unquantized model.
        uniform: Scores by width, ascending.
        expert_bytes: Bytes wanted for each chunk [chunks]; beyond the ends, the end counts.
    """
    sizes = np.array([score.expert_bytes[0] for score in uniform])
    added = np.array([(score.nll - dense.nll).mean() for score in uniform])
    nll = np.stack([score.nll for score in uniform])
    wanted = expert_bytes.clip(sizes[0], sizes[-1])
    lower = np.searchsorted(sizes, wanted, side="right").clip(1, len(sizes) - 1) - 1
    share = (wanted - sizes[lower]) / (sizes[lower + 1] - sizes[lower])
    weight = np.array(
        [_weight(added[low], added[low + 1], t) for low, t in zip(lower, share, strict=True)]
    )
    chunks = np.arange(len(wanted))
    mixed: FloatArray = weight * nll[lower, chunks] + (1 - weight) * nll[lower + 1, chunks]
    return mixed


def _weight(narrow: float, wide: float, share: float) -> float:
    """Weight of the narrower of two widths, `share` of the way in bytes to the wider one."""
    if not 0 < wide < narrow:
        return 1 - share
    return float((narrow ** (1 - share) * wide**share - wide) / (narrow - wide))


def _expert_bytes(held: BytesByClass) -> int:
    return held.planes + held.luts + held.experts_dense


def _mean_bytes(held: Sequence[BytesByClass]) -> BytesByClass:
    names = [field.name for field in fields(BytesByClass)]
    return BytesByClass(
        **{name: round(sum(getattr(one, name) for one in held) / len(held)) for name in names}
    )
