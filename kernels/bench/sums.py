"""The ranks' sum on GPUs: right, inside CUDA graphs too, and how long it takes.

    python kernels/bench/sums.py                  # as many ranks as there are GPUs
    python kernels/bench/sums.py --ranks 2 --json out.json

One process a rank, connected as an engine's ranks are (`pw.engine.parallel.group`). Sums of [T, H]
bf16 are timed by calls and from a graph of 64 of them, without what a model does in between: over
NCCL, and small ones by the ranks' own kernel, where they have it.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing
from records import about

from pw.engine.parallel.group import RankGroup

CHAIN = 64  # sums of a graph: two a layer, 32 layers
RUNS = 20
TOKENS = (1, 8, 32, 128, 2048)
Row = dict[str, float | int | str]


def microseconds(run: Callable[[], object], times: int) -> float:
    """Of one of `times` sums that `run` makes, the median of some runs on the device's clock."""
    found = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / times * 1e3)
    return statistics.median(found)


def measure(group: RankGroup, tokens: int, hidden: int, device: torch.device) -> Row:
    """Check and time sums of [tokens, hidden], as the group makes them."""
    own = torch.full((tokens, hidden), float(group.rank + 1), dtype=torch.bfloat16, device=device)
    want = float(sum(range(1, group.size + 1)))
    assert (group.all_reduce(own.clone()) == want).all(), "a wrong sum by calls"
    work = torch.zeros_like(own)

    def chain() -> None:
        for _ in range(CHAIN):
            group.all_reduce(work)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    result = own.clone()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        chain()
        group.all_reduce(result)
    for _ in range(3):
        result.copy_(own)
        graph.replay()
        assert (result == want).all(), "a wrong sum from a graph"
    row: Row = {
        "way": "nccl" if group._peers is None or not group._peers.takes(own) else "kernel",
        "ranks": group.size,
        "tokens": tokens,
        "bytes": own.numel() * own.element_size(),
        "calls_us": microseconds(chain, CHAIN),
        "graph_us": microseconds(graph.replay, CHAIN + 1),
    }
    group.agree(True)
    return row


def of_rank(rank: int, size: int, folder: Path, hidden: int) -> None:
    """One rank; the first writes what it has measured."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = RankGroup(rank, size, folder, device, 60.0)
    rows = [measure(group, tokens, hidden, device) for tokens in TOKENS]
    peers, group._peers = group._peers, None
    if peers is not None:
        rows = [row for row in rows if row["way"] == "kernel"]
        rows += [measure(group, tokens, hidden, device) for tokens in TOKENS]
        group._peers = peers
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    group.agree(True)


def main() -> None:
    """Start the ranks, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torch.multiprocessing.spawn(
            of_rank, (options.ranks, folder, options.hidden), nprocs=options.ranks
        )
        rows: list[Row] = json.loads((folder / "rows.json").read_text())
    if options.json:
        nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        options.json.write_text(json.dumps(about() | nccl | {"rows": rows}, indent=1) + "\n")
    print("| way | ranks | tokens | bytes | by calls, us | from a graph, us |\n" + "|---" * 6 + "|")
    for row in rows:
        print(
            f"| {row['way']} | {row['ranks']} | {row['tokens']} | {row['bytes']} "
            f"| {row['calls_us']:.1f} "
            f"| {row['graph_us']:.1f} |"
        )


if __name__ == "__main__":
    main()
