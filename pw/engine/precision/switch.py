"""Another precision policy for an engine that runs."""

from __future__ import annotations

import math

from pw.config import EngineConfig, PrecisionPolicy
from pw.engine.precision.adaptive import AdaptivePrecision
from pw.engine.start.build import Parts
from pw.errors import ConfigError, RequestError


def switch_policy(parts: Parts, config: EngineConfig, text: str) -> PrecisionPolicy:
    """Follow `adaptive` or `static:<bits>` from now on. Called between two steps.

    Args:
        parts: Of an engine that began as `adaptive`: the others have no planner, and a memory plan
            for their own widths.
        config: The engine's.
        text: The policy, in the command line's form.

    Raises:
        RequestError: It cannot be followed here.
    """
    try:
        policy = PrecisionPolicy.parse(text)
    except ConfigError as error:
        raise _refusal(error.message, error.hint) from error
    precision = parts.precision
    if not isinstance(precision, AdaptivePrecision):
        raise _refusal(
            f"this engine was started with the policy {config.policy} and keeps it",
            "start it with `--precision-policy adaptive`",
        )
    if policy.kind == "static" and policy.bits is not None:
        _check_width(parts, config, policy.bits)
    elif policy.kind != "adaptive":
        raise _refusal(
            f"not a policy for an engine that runs: `{text}`", "use adaptive or static:<bits>"
        )
    precision.hold(policy.bits)
    return policy


def _check_width(parts: Parts, config: EngineConfig, bits: int) -> None:
    """See that one width for all leaves the pages that the longest context was promised.

    Raises:
        RequestError: The width is not to be had, or leaves too few.
    """
    table = parts.table
    assert table is not None
    low, high = config.min_bits or table.min_bits, config.max_bits or table.max_bits
    if not low <= bits <= high:
        raise _refusal(f"static width must be between {low} and {high}: {bits}")
    if bits < parts.precision.floor:
        raise _refusal(f"a request that runs was promised {parts.precision.floor} bits: {bits}")
    weights = int(table.cost_bytes()[:, bits - table.min_bits].sum()) // parts.arena.page_bytes
    longest = parts.memory.max_model_len
    reserve = math.ceil(config.planner.low_watermark * parts.pool.num_pages) + 1
    needed = max(parts.kv.pages_for_tokens(longest), reserve)
    if weights + needed > parts.pool.num_pages:
        raise _refusal(
            f"all blocks at {bits} bits leave {parts.pool.num_pages - weights} pages for KV, "
            f"but a context of {longest} tokens needs {needed}",
            "use a narrower width, or start with a larger budget or a smaller --max-model-len",
        )


def _refusal(message: str, hint: str = "") -> RequestError:
    return RequestError(message, param="policy", hint=hint)
