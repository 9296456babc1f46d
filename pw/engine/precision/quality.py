"""The planner's numbers at this moment: offline table, routing of late, prompts in hand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from shlex import quote

import numpy as np
import torch
from numpy.typing import NDArray

from pw.config import EngineConfig, PlannerConfig
from pw.engine.experts import RoutingCounter
from pw.engine.parallel.share import Share
from pw.engine.precision.statistics import ExactStatistics, LearnedStatistics, PromptStatistics
from pw.engine.sequence import Sequence
from pw.engine.start.sources import WeightSource
from pw.errors import StoreError
from pw.memory.kv_cache import KvCache
from pw.memory.page_table import WeightPageTable
from pw.planning.damage import DamageModel
from pw.planning.planner import PlannerState
from pw.planning.residual import ExactResidual, ResidualHeads, merge
from pw.planning.routing import RoutingStats
from pw.planning.table import BlockTable

logger = logging.getLogger("pw.engine")

RoutedPass = tuple[NDArray[np.float32], int]
"""Router weight [L, E] of a forward pass and its tokens; there once a later `mark` is reached."""
_LIVE = 1.0  # weight of a request about to end: it still shares the weights for this step


@dataclass(frozen=True)
class PromptEta:
    """Prompt residual [L, E, 2] float32, kept with the prompt's units in the prefix cache."""

    eta: NDArray[np.float32]


class Quality:
    """Joins sensitivity, routing mass and prompt residuals for the planner.

    Args:
        model: Damage of each transition from mass and eta.
        routing: Decayed routing mass.
        counter: Where the experts function adds router weights.
        new_statistics: Makes the statistics of a new prompt; None = no prompt residual.
        share: What each of several ranks holds of the blocks; None: there is one.
    """

    def __init__(
        self,
        model: DamageModel,
        routing: RoutingStats,
        counter: RoutingCounter,
        new_statistics: Callable[[], PromptStatistics] | None,
        share: Share | None = None,
    ) -> None:
        self._share = share
        self._model, self._routing, self._counter = model, routing, counter
        self._new_statistics = new_statistics
        self._eta: NDArray[np.float64] | None = None

    @property
    def experts_never_routed(self) -> int:
        """Experts, of all layers, that no token has been routed to since the start."""
        return self._routing.never_routed

    def mass(self) -> NDArray[np.float64]:
        """Share of router weight that each expert has received of late: [L, E]."""
        return self._routing.mass()

    def statistics(self) -> PromptStatistics | None:
        """Statistics for a new sequence, or None when nothing is wanted of its prompt."""
        return None if self._new_statistics is None else self._new_statistics()

    def open_prompt(self, sequence: Sequence, start: int) -> None:
        """Begin the statistics of a prompt whose first computed token is at `start`."""
        if start == sequence.reused and sequence.eta is None:
            sequence.statistics = self.statistics()

    def close_prompt(self, sequence: Sequence, kv: KvCache) -> None:
        """Take the residual of a prompt whose tokens have all been computed.

        The experts' inputs of tokens found in the prefix cache are gone. The residual of the prompt
        that put them there stands in for theirs, by their share of the tokens.
        """
        if sequence.statistics is None or sequence.computed < len(sequence.prompt):
            return
        assert sequence.kv is not None
        eta, known = sequence.statistics.eta(), sequence.kv.note
        sequence.statistics = None
        if isinstance(known, PromptEta):
            share = sequence.reused / len(sequence.prompt)
            eta = np.exp(share * np.log(known.eta) + (1 - share) * np.log(eta))
        sequence.eta = eta
        kv.annotate(sequence.kv, PromptEta(eta.astype(np.float32)))

    def read_pass(self, tokens: int) -> RoutedPass:
        """Have the routing of a forward pass over so many tokens read with its results."""
        return self._counter.take(), tokens

    def after_step(self, running: Iterable[Sequence], passes: Iterable[RoutedPass]) -> None:
        """Take in the routing of a step's passes; merge the prompts of the running sequences."""
        routed = list(passes)
        if routed:
            mass, tokens = zip(*routed, strict=True)
            self._routing.update(np.sum(mass, axis=0), sum(tokens))
        live = [seq for seq in running if seq.eta is not None]
        etas = [seq.eta for seq in live if seq.eta is not None]
        self._eta = merge(etas, [seq.remaining + _LIVE for seq in live])

    def drop_pass(self) -> None:
        """Forget what a forward pass that broke has counted."""
        self._counter.sums.zero_()

    def state(self, bits: NDArray[np.int64], ceil: NDArray[np.int64]) -> PlannerState:
        """The planner's view of now: committed bits [n] and most bits [n]."""
        if self._share is None:
            return self._model.state(bits, ceil, self._routing.mass(), self._eta)
        bits, ceil = self._share.expand(bits), self._share.expand(ceil)
        return self._share.fold(self._model.state(bits, ceil, self._routing.mass(), self._eta))


def settle_residual(source: WeightSource, config: EngineConfig) -> EngineConfig:
    """`residual` auto made definite: learned where the heads are fitted, else off and told."""
    if config.planner.residual != "auto":
        return config
    fitted = source.has_table("residuals")
    if not fitted and config.policy.kind in ("adaptive", "replay"):
        logger.warning(
            "no residual heads, what prompts say of themselves is not used; fit them once: "
            "`pw fit-residuals %s`",
            source.path,
        )
    settled = replace(config.planner, residual="learned" if fitted else "off")
    return replace(config, planner=settled)


def make_quality(
    artifact: WeightSource,
    table: WeightPageTable,
    config: PlannerConfig,
    counter: RoutingCounter,
    device: torch.device,
    share: Share | None = None,
) -> Quality:
    """Read the planner's tables from an artifact. They are of the model, the table of a share.

    Raises:
        StoreError: The artifact has no sensitivities, or not what `config.residual` (settled,
            not auto) needs.
    """
    geometry, costs = artifact.geometry, table.cost_bytes()
    if share is not None:
        geometry, costs = share.whole, share.expand(costs)
    _require(artifact, "sensitivity", "pw sensitivity")
    widths = np.arange(table.min_bits, table.max_bits + 1)
    blocks = BlockTable.from_artifact(
        artifact.table("sensitivity"), config.metric, geometry, costs, widths
    )
    offline = None
    if artifact.has_table("routing"):
        offline = np.nansum(artifact.table("routing").arrays["mass"], axis=0)
    routing = RoutingStats(
        len(geometry.layers),
        geometry.experts,
        config.routing_window,
        config.routing_prior,
        offline,
    )
    new_statistics = _statistics(artifact, config, device)
    return Quality(DamageModel(blocks, config, offline), routing, counter, new_statistics, share)


def _statistics(
    artifact: WeightSource, config: PlannerConfig, device: torch.device
) -> Callable[[], PromptStatistics] | None:
    geometry = artifact.geometry
    if config.residual == "learned":
        _require(artifact, "residuals", "pw fit-residuals")
        heads = ResidualHeads.from_table(artifact.table("residuals"), config.residual_clamp)
        return lambda: LearnedStatistics(heads, geometry, device)
    if config.residual == "exact":
        _require(artifact, "moments", "pw quantize")
        arrays, moments = artifact.table("sensitivity").arrays, artifact.table("moments").arrays
        exact = ExactResidual(
            (arrays["energy_gate_up"], arrays["energy_down"]),
            (moments["gate_up"], moments["down"]),
            config.residual_clamp,
        )
        return lambda: ExactStatistics(exact, geometry, device)
    return None


def _require(artifact: WeightSource, stage: str, command: str) -> None:
    if not artifact.has_table(stage):
        raise StoreError(
            f"artifact has no table `{stage}`: `{artifact.path}`",
            f"run `{command} {quote(str(artifact.path))}`, or serve with "
            "--precision-policy static:<bits>"
            + (", or with --residual off" if stage == "residuals" else ""),
        )
