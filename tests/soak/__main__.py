"""Soak of the bundled model: `make soak`, `python -m tests.soak --minutes 20`.

`pw serve tiny` runs in a budget that its load does not fit; 64 users with disconnects and nonsense
among them; then ten times the rate that it can answer; then 500 connections a second that are
reset. Prints JSON, exit code 1 if a promise of docs/reliability.md was not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from pw.evaluation.demo.process import serving
from tests.soak.overload import overload
from tests.soak.storm import storm
from tests.soak.users import Mix, Users
from tests.soak.watching import Processes, Rest, Watch, rest

VOCABULARY = 4096
SEQUENCES, QUEUE = 16, 64
SERVE = [
    "tiny",
    *("--memory-budget", "25MiB"),
    *("--max-num-seqs", str(SEQUENCES)),
    *("--max-num-queued-reqs", str(QUEUE)),
    *("--max-num-batched-tokens", "128"),
    *("--kv-cache-dtype", "bfloat16"),
    "--quiet",
]  # fmt: skip
RSS_GROWTH = 0.01  # of what was there at rest after the warm-up
PARTS = ("soak", "overload", "storm")
KEPT_CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=512)


async def soak(client: httpx.AsyncClient, minutes: float, warm_up: float) -> dict[str, Any]:
    """The mixed load; figures, and `not_kept`: what should have been otherwise.

    Args:
        client: Knows the server.
        minutes: Of the load.
        warm_up: Seconds of the same load before anything is compared.
    """
    processes = Processes.of_this_child()
    start = processes.rss()
    await Users(client, Mix(seed=1), VOCABULARY).run(warm_up)
    before = await rest(client, processes)
    watch, began = Watch(client, processes), time.monotonic()
    watching = asyncio.create_task(watch.run())
    outcomes = await Users(client, Mix(seed=2), VOCABULARY).run(60 * minutes)
    seconds = time.monotonic() - began
    watch.stop()
    await watching
    after = await rest(client, processes)
    figures = {
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(outcomes.counts.items())),
        "examples": outcomes.examples,
        "slowest_answer_s": round(outcomes.slowest, 2),
        "seen": watch.figures(),
        "rss_mib_at_the_start": [round(size / 2**20, 1) for size in start],
        "rss_mib_each_minute": watch.rss_mib,
        **_differences(before, after),
    }
    promises = {
        "every request came to its right end": not outcomes.examples,
        "requests were answered, refused, abandoned": {"answered", "refused", "left"}
        <= set(outcomes.counts),
        "the same two processes": Processes.of_this_child() == processes,
        "always ready": watch.not_ready == 0,
        "no byte over the budget": watch.over_budget == 0,
        "planes were given up": watch.least_bits < before.status["mean_bits"],
        "pages as before": all(then == now for then, now in figures["rest"].values()),
        "the same greedy answer as before": before.text == after.text,
        f"RSS grew by less than {RSS_GROWTH:.0%}": max(figures["rss_growth"]) < RSS_GROWTH,
    }
    return figures | {"not_kept": [promise for promise, kept in promises.items() if not kept]}


def _differences(before: Rest, after: Rest) -> dict[str, Any]:
    done = ("generation_tokens", "prompt_tokens", "preemptions", "transitions", "bytes_reloaded")
    held = ("pages_kv", "pages_free", "pages_weights", "mean_bits", "open_sequences")
    return {
        "done": {name: after.status[name] - before.status[name] for name in done},
        "rest": {name: [before.status[name], after.status[name]] for name in held},
        "rss_mib": [[round(size / 2**20, 1) for size in rest.rss] for rest in (before, after)],
        "rss_growth": [
            round(now / then - 1, 4) for then, now in zip(before.rss, after.rss, strict=True)
        ],
    }


async def everything(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Soak, overload and storm of one server, which must be as before at the end."""
    async with httpx.AsyncClient(base_url=url, limits=KEPT_CONNECTIONS, timeout=30) as client:
        figures: dict[str, Any] = {}
        if arguments.minutes:
            figures["soak"] = await soak(client, arguments.minutes, arguments.warm_up)
        if arguments.overload:
            figures["overload"] = await overload(
                client, VOCABULARY, 2 * SEQUENCES, arguments.overload
            )
        if arguments.storm:
            figures["storm"] = await storm(client, 500, arguments.storm)
        processes = Processes.of_this_child()
        last = await rest(client, processes)
        figures["end"] = {
            "pages_kv": last.status["pages_kv"],
            "mean_bits": last.status["mean_bits"],
            "bytes_over_budget": last.status["bytes_over_budget"],
            "rss_mib": [round(size / 2**20, 1) for size in last.rss],
        }
        return figures


def main() -> int:
    """Run as the command line says."""
    parser = argparse.ArgumentParser("tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="of the mixed load; 0: none")
    parser.add_argument("--warm-up", type=float, default=180.0, help="seconds of it before")
    parser.add_argument("--overload", type=float, default=60.0, help="seconds of flood; 0: none")
    parser.add_argument("--storm", type=float, default=60.0, help="seconds of resets; 0: none")
    parser.add_argument("--output", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        with serving(SERVE, log) as url:
            figures = asyncio.run(everything(url, arguments))
        lines = log.read_text().splitlines()
        figures["tracebacks"] = sum(line.startswith("Traceback") for line in lines)
    text = json.dumps({"command": ["pw", "serve", *SERVE], **figures}, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    broken = [
        f"{name}: {promise}"
        for name in PARTS
        for promise in figures.get(name, {}).get("not_kept", ())
    ]
    broken += [f"{figures['tracebacks']} tracebacks in the log"] if figures["tracebacks"] else []
    print("\n".join(f"NOT KEPT  {promise}" for promise in broken) or "PASS  all promises kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
