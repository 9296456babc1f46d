"""Which policies an evaluation compares, and at which memory budgets: the command line's form."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pw.config import PrecisionPolicy, parse_bytes
from pw.errors import ConfigError

DENSE = "dense"


@dataclass(frozen=True)
class Budget:
    """A memory budget: bytes, or as much as a policy of the same run takes."""

    name: str  # as the user wrote it
    bytes: int | None = None
    policy: PrecisionPolicy | None = None


def parse_policies(text: str) -> tuple[PrecisionPolicy, ...]:
    """Policies from `dense,static:2..6,static:<file>,adaptive`, in that order.

    Raises:
        ConfigError: One is unknown, a range is empty, or one stands there twice.
    """
    policies: list[PrecisionPolicy] = []
    for part in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"static:(\d+)\.\.(\d+)", part)
        if match:
            first, last = int(match[1]), int(match[2])
            if first > last:
                raise ConfigError(
                    f"a range of widths goes upward: `{part}`", f"use static:{last}..{first}"
                )
            names = [f"static:{bits}" for bits in range(first, last + 1)]
        else:
            names = [part]
        policies += [PrecisionPolicy.parse(name) for name in names]
    twice = {str(policy) for policy in policies if policies.count(policy) > 1}
    if twice:
        raise ConfigError(f"--policies names `{min(twice)}` twice: `{text}`")
    return tuple(policies)


def parse_budgets(text: str) -> tuple[Budget, ...]:
    """Budgets from `24MiB,static:3`: sizes, or fixed policies whose bytes are the budget.

    Raises:
        ConfigError: One is neither.
    """
    budgets = []
    for part in (part.strip() for part in text.split(",")):
        if part == DENSE or part.startswith("static:"):
            budgets.append(Budget(part, policy=PrecisionPolicy.parse(part)))
            continue
        try:
            budgets.append(Budget(part, bytes=parse_bytes(part)))
        except ConfigError as error:
            raise ConfigError(
                f"not a memory budget: `{part}`",
                "use sizes like `24MiB`, or a fixed policy whose bytes count, like `static:3`",
            ) from error
    return tuple(budgets)


def is_fixed(policy: PrecisionPolicy) -> bool:
    """Whether its widths, and so its quality, are the same at every budget in which it fits."""
    return policy.kind in (DENSE, "static")


def choose_reference(policies: tuple[PrecisionPolicy, ...], wanted: str | None) -> PrecisionPolicy:
    """The policy that all others are compared with: the wanted one, dense, or the first.

    Raises:
        ConfigError: The wanted one is not among them or not fixed.
    """
    if wanted is None:
        fixed = [policy for policy in policies if is_fixed(policy)]
        return next((p for p in fixed if p.kind == DENSE), (fixed or list(policies))[0])
    policy = PrecisionPolicy.parse(wanted)
    if policy not in policies:
        raise ConfigError(
            f"--reference is not among the policies: `{wanted}`",
            f"choose one of {', '.join(map(str, policies))}",
        )
    return policy
