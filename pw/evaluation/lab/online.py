"""Plans as the adaptive policy makes them while prompts arrive: what it saw, then what it holds.

A stream is windows of one kind of text in order. Before a window's second half is scored, the
planner has seen the windows before it and the first half of this one, its prompt.

Axes: n blocks.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np

from pw.evaluation.baselines.static import exact
from pw.evaluation.lab.cache import CachedLab
from pw.evaluation.lab.damage_scores import measure_scores
from pw.evaluation.lab.groups import group_windows
from pw.evaluation.lab.lab import Lab
from pw.evaluation.lab.model import Bits
from pw.evaluation.lab.planned import ProductPlanner
from pw.evaluation.lab.probe import Prober, Prompt
from pw.evaluation.lab.room import Room
from pw.store.artifact import Artifact

WINDOWS = 4  # of each kind of text; as many others calibrate the domain's own allocation


@dataclass(frozen=True)
class Stream:
    """Windows of one kind of text and what their prompts show."""

    kind: str
    lab: CachedLab
    prompts: list[Prompt]  # first halves
    wholes: list[Prompt]


def streams(room: Room, tables: Artifact, kinds: dict[str, int], clamp: float) -> list[Stream]:
    """One stream for each kind of text and its window length."""
    prober = Prober(room.model, tables, clamp)
    found = []
    for kind, length in kinds.items():
        windows = group_windows(room, kind, 2 * WINDOWS, length)[::2]
        lab = CachedLab(Lab(room.model, windows), room.memory)
        prompts = [prober.read(window.ids[: window.scored]) for window in windows]
        wholes = [prober.read(window.ids) for window in windows]
        found.append(Stream(kind, lab, prompts, wholes))
    return found


def online_bits(
    planner: ProductPlanner,
    stream: Stream,
    budget_bytes: int,
    *,
    routing: bool = True,
    residual: str = "off",
) -> list[Bits]:
    """Widths [n] for each window of a stream.

    Args:
        planner: Plans, by its own rule of what routing says.
        stream: What arrives.
        budget_bytes: Of the routed experts.
        routing: Whether it is followed; else the trace stands.
        residual: "learned", "exact" or "off".
    """
    stats, plans = planner.new_stats(), []
    for prompt, whole in zip(stream.prompts, stream.wholes, strict=True):
        stats_now = copy(stats)  # updates replace its sums, they do not change them
        stats_now.update(prompt.mass, prompt.tokens)
        eta = {"learned": prompt.learned, "exact": prompt.exact, "off": None}[residual]
        mass = stats_now.mass() if routing else None
        plans.append(planner.bits(budget_bytes, mass, eta))
        stats.update(whole.mass, whole.tokens)
    return plans


def domain_bits(room: Room, kind: str, length: int, budget_bytes: int) -> Bits:
    """The exact static allocation for other windows of the same kind of text."""
    windows = [window.ids for window in group_windows(room, kind, 2 * WINDOWS, length)[1::2]]
    token = measure_scores(room.model, windows)["token"]
    damage = token.reshape(room.model.geometry.blocks, -1)
    damage = np.maximum.accumulate(damage[:, ::-1], axis=1)[:, ::-1]  # noise: never less at fewer
    return exact(damage, room.costs, room.model.widths, budget_bytes)
