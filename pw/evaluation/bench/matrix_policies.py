"""Policies of a comparison: what they are called, which share an engine, whose widths are held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pw.config import WIDTHS, EngineConfig, PrecisionPolicy
from pw.engine import Engine
from pw.errors import BudgetError, ConfigError
from pw.planning.bits_file import write_bits


def parse_policy(text: str) -> tuple[PrecisionPolicy, int | None]:
    """A policy, and for `adaptive:<b>` and `held:<b>` the uniform width whose bytes it has.

    Raises:
        ConfigError: It is none of `dense`, `static:<b>`, `adaptive:<b>`, `held:<b>`.
    """
    kind, _, bits = text.partition(":")
    if kind in ("adaptive", "held") and bits.isdigit():
        if int(bits) not in WIDTHS:
            raise ConfigError(
                f"{kind} width must be {WIDTHS[0]} to {WIDTHS[-1]}: `{text}`",
                "and one that the artifact has: `pw inspect` shows them",
            )
        return PrecisionPolicy("adaptive" if kind == "adaptive" else "static"), int(bits)
    if text != "dense" and not (kind == "static" and bits.isdigit()):
        raise ConfigError(
            f"not a policy of the comparison: `{text}`",
            "use dense, static:3, adaptive:3, held:3",
        )
    return PrecisionPolicy.parse(text), None


def out_of_bounds(policy: str, config: EngineConfig) -> ConfigError | None:
    """Why --min-bits and --max-bits do not allow the width of a policy; None: they do."""
    kind, _, width = policy.partition(":")
    if not width:
        return None
    bits, least, most = int(width), config.min_bits, config.max_bits
    if least is not None and bits < least:
        return ConfigError(
            f"policy `{policy}` is narrower than --min-bits {least} allows",
            f"ask for {kind}:{least} or wider, or give --min-bits {bits}",
        )
    if most is not None and bits > most:
        return ConfigError(
            f"policy `{policy}` is wider than --max-bits {most} allows",
            f"ask for {kind}:{most} or narrower, or give --max-bits {bits}",
        )
    return None


def allowed(policies: Iterable[str], config: EngineConfig) -> list[str]:
    """Those whose widths --min-bits and --max-bits allow."""
    return [policy for policy in policies if out_of_bounds(policy, config) is None]


def by_engine(policies: Iterable[str]) -> list[list[str]]:
    """Policies that share an engine: adaptive ones, most bytes first (planes are only given up).

    Widths are held behind the adaptive ones that find them.
    """
    groups: dict[str, list[str]] = {}
    for policy in sorted(policies, key=lambda policy: policy.startswith("held")):
        kind = policy.partition(":")[0]
        groups.setdefault(kind if kind == "adaptive" else policy, []).append(policy)
    return [sorted(group, reverse=True) for group in groups.values()]


class Widths:
    """Widths that adaptive policies have come to, in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, bits: int) -> Path:
        return self._folder / f"{bits}.json"

    def note(self, policy: str, engine: Engine) -> None:
        """Keep those of a measured cell's end, if it is the first of its policy."""
        kind, bits = parse_policy(policy)
        table = engine._parts.table
        if kind.kind == "adaptive" and bits and table and not self._file(bits).exists():
            write_bits(self._file(bits), table.geometry, table.committed)

    def policy(self, text: str) -> PrecisionPolicy:
        """The policy of an engine.

        Raises:
            BudgetError: No cell has come to the widths that it holds.
        """
        policy, bits = parse_policy(text)
        if not text.startswith("held") or bits is None:
            return policy
        if not self._file(bits).exists():
            raise BudgetError(
                f"no cell of adaptive:{bits} was measured", "ask for one that fits the budget"
            )
        return replace(policy, path=self._file(bits))
