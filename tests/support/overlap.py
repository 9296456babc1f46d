"""What tests of overlapped steps ask of an engine, on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

from pw.engine import Engine
from pw.engine.computing import Flight
from pw.engine.request import SamplingParams

WIDTHS = (6, 2, 4, 3)  # of all blocks, step by step


def launches(engine: Engine) -> list[str]:
    """Fills, as the engine steps, with `plain`, `ahead` and `read`."""
    computer, log = engine._computer, list[str]()
    launch, read = computer.launch, computer.read

    def watched_launch(chunks: Any, tag: Any, after: Flight | None = None) -> Flight:
        log.append("plain" if after is None else "ahead")
        return launch(chunks, tag, after)

    def watched_read(flight: Flight) -> Any:
        log.append("read")
        return read(flight)

    computer.launch = watched_launch  # type: ignore[method-assign]
    computer.read = watched_read  # type: ignore[method-assign]
    return log


def serve_at_changing_bits(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[list[int]], list[float]]:
    """Run requests while all blocks change their width at the safe point of every step.

    Returns:
        Tokens of each request, and mean bits of each output in order.
    """
    precision: Any = engine._parts.precision
    table: Any = engine._parts.table
    safe_point, bits, first = precision.safe_point, list[float](), engine._launcher.step

    def changing(step: int, *rest: Any) -> None:
        precision.hold(WIDTHS[(step - first) % len(WIDTHS)])
        safe_point(step, *rest)
        while table.in_transfer:
            safe_point(step, *rest)

    precision.safe_point = changing
    for number, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"r{number}", prompt, its)
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work():
        for output in engine.step():
            tokens[int(output.request_id[1:])] += output.token_ids
            bits.append(output.mean_bits)
        engine.check_integrity()
    return tokens, bits
