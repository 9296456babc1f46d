"""One model on one GPU and on several: decode speed, bytes of each rank, planes that move.

    python kernels/bench/ranks.py --json out.json           # Mixtral-8x7B's shape, twice its layers
    python kernels/bench/ranks.py --cases 32:4:1 32:4:2 32:4:2e --batches 1 8 32
    python kernels/bench/ranks.py --cases 32:4:1=64,64:4:1@1=122 32:4:2,64:4:2

A case is LAYERS:BITS:RANKS, then perhaps `e` for --enable-expert-parallel, `m` for planes that move
(cycles of pressure on an adaptive engine of at most so many bits), `n` for NCCL's sums alone,
@DEVICE where there is one rank, =GiB of memory for each rank. Each runs in a process of its own
(`ranks_case.py`, which says what is measured); those with commas between them start at the same
time, and are measured in turn.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ranks_case import IDLE, MEASURED, READY, Case, run_case
from records import about

CASES = ["32:4:1", "32:4:2", "32:4:2e", "32:4:2m", "64:4:1", "64:4:2", "64:8:2"]
SHOWN = 14  # kernels
_END_SECONDS = 20.0  # for a case that has been measured to close its engine


class Started:
    """The process of a case.

    Args:
        text: The case.
        arguments: Of this program.
        folder: For its result.
    """

    def __init__(self, text: str, arguments: list[str], folder: Path) -> None:
        self.text, self._result = text, folder / f"{text}.json"
        command = [sys.executable, __file__, *arguments, "--case", text, "--json", self._result]
        nccl = {"PW_PEER_SUMS": "0"} if "n" in Case.parse(text).kind else {}
        self._child = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | nccl,
        )
        self._next = self._until(READY)

    def _until(self, word: str) -> threading.Thread:
        """Waits until it has said a word, or has ended; libraries may say something, too."""

        def read() -> None:
            assert self._child.stdout is not None
            for line in iter(self._child.stdout.readline, b""):
                if line.decode().strip() == word:
                    return

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def measure(self, seconds: float) -> dict[str, Any] | None:
        """Have it measure, once it is ready; None if it fails or takes longer."""
        try:
            self._next.join(seconds)
            assert self._child.stdin is not None
            self._child.stdin.write(b"go\n")
            self._child.stdin.flush()
            self._next = self._until(MEASURED)
            self._next.join(seconds)
            result: dict[str, Any] = json.loads(self._result.read_text())
        except (OSError, ValueError) as error:
            print(f"{self.text}: {error}", file=sys.stderr)
            self._child.kill()
            return None
        return result

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until it has started, or for so long."""
        self._next.join(seconds)

    def end(self) -> None:
        """See to it that it is gone."""
        try:
            self._child.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()


def run_together(
    texts: list[str], arguments: list[str], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Start cases at the same time, measure them in turn."""
    seconds = options.seconds
    with tempfile.TemporaryDirectory() as temporary:
        cases = [Started(text, arguments, Path(temporary)) for text in texts]
        end = time.monotonic() + seconds
        for case in cases:
            case.wait_until_ready(end - time.monotonic())
        while options.after and not options.after.exists() and time.monotonic() < end:
            time.sleep(0.1)
        for case in cases:
            result = case.measure(seconds)
            if result is not None:
                show(result)
                yield result
        for case in cases:
            case.end()


def show(result: dict[str, Any]) -> None:
    """A case for reading."""
    for row in result.get("decode", []):
        kernels = row["kernels_ms"]
        print(
            f"| {result['case']} | {row['batch']} | {row['step_ms']:.2f} "
            f"| {row['tokens_per_second']:.0f} | {kernels[IDLE]:.2f} "
            f"| {sum(ms for name, ms in kernels.items() if is_sum(name)):.2f} "
            f"| {row['routing']['experts']:.2f}, {row['routing']['busiest_rank_experts']:.2f} |",
            flush=True,
        )
    if "prefill" in result:
        print(f"{result['case']} prompt: {result['prefill']['tokens_per_second']:.0f} tokens/s")
    if "squeeze" in result:
        print(f"{result['case']} squeeze: {json.dumps(result['squeeze'])}")


def is_sum(name: str) -> bool:
    """Whether a kernel adds up over the ranks."""
    return "nccl" in name.lower() or name == "peer_sum"


def main() -> None:
    """Run the cases, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mixtral-8x7b", help="of pipelines/recipes/configs")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--cycles", type=int, default=3, help="of planes that move")
    parser.add_argument("--prefill", action="store_true", help="time a prompt, too")
    parser.add_argument("--seconds", type=float, default=120.0, help="for a start, for figures")
    parser.add_argument("--after", type=Path, help="measure when this file exists")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run_case(options.case, options)
        return
    print(
        "| layers:bits:ranks | batch | ms a step | tokens/s | between kernels, ms | sums, ms "
        "| experts of a layer, busiest rank |"
    )
    print("|---" * 7 + "|", flush=True)
    results: list[dict[str, Any]] = []
    for group in options.cases:
        for result in run_together(group.split(","), sys.argv[1:], options):
            results.append(result)
            if options.json:
                write(results, options)
    for result in results:
        for row in result.get("decode", [])[:1]:
            print(f"{result['case']}, batch {row['batch']}, ms a step by kernel:")
            for name, milliseconds in list(row["kernels_ms"].items())[:SHOWN]:
                print(f"  {milliseconds:7.3f}  {name[:90]}")


def write(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """All that was measured so far."""
    how = {"options": {key: str(value) for key, value in vars(options).items()}}
    found = about() | how | {"results": results}
    options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
