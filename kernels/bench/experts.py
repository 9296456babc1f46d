"""Routed experts on a GPU, the whole table: four models' shapes, tokens, widths, opponents, peers.

    python kernels/bench/experts.py --json FILE              # all of it, some 200 s of an H200
    python kernels/bench/experts.py --shapes mixtral --tokens 32 1 --no-peers --json FILE
    python kernels/bench/experts_table.py FILE...            # Markdown of saved runs

One record for each shape, number of tokens and width. `us` is gate_up and down with the activation
(and `arrange`, for prompts), the median of each kernel as the profiler reports it, launches kept
apart, calls rotating through the experts; `layer_us` is the whole layer, routing and last sum
included, replayed from a CUDA graph in which launches overlap. Each is in the form that `dispatch`
takes, and of a uniform width that of a policy which has no other. `ratio` is times faster than the
best tile of a Triton grouped matmul over bf16 weights, `torch_ratio` than torch's grouped matmul,
`layer_ratio` than the bf16 layer of `cuda_dense`. `mean_us` and `mean_layer_us` of a mix are the
times of uniform widths weighted by its blocks; `mean_wide_layer_us` the same of `wide_layer_us`,
uniform widths through the kernels of a policy that has all, as the mix has. Results are compared
with decoded blocks in fp32, two runs bit by bit. Peers: see `peers.py`; their `ratio` is over
cuBLAS on the same matrix.

Kernels are compiled first, side by side, by processes of their own where Triton compiles them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import experts_table
import moe
import peers
import torch
import triton
from experts_shape import Calls, Shape, Width
from records import about
from torch.profiler import ProfilerActivity, profile

from pw_kernels import nvrtc
from pw_kernels.bitplane import MAX_BITS

TOKENS = [32, 1, 2048, 128, 64, 16, 4, 512]  # a run that is cut has those that say most
AROUND = ("route", "arrange", "combine")  # kernels that are no products
PROCESSES = 8  # that compile Triton's kernels at a time
TUNED = ("GemLite 4 bit", "GemLite 8 bit")  # compile and time many tiles for each size


def named_times(
    groups: Sequence[tuple[Callable[[], Any], Calls]], rounds: int
) -> list[list[tuple[str, float]]]:
    """Name and median microseconds of each kernel of a call, for each group; one profile for all.

    Args:
        groups: What comes before, not timed, and calls that launch equal kernels.
        rounds: Of each group's calls.
    """
    for before, calls in groups:
        before()
        for call in calls:
            call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for before, calls in groups:
            before()
            torch.cuda._sleep(2000)  # a kernel whose name stands between the groups
            for _ in range(rounds):
                for call in calls:
                    call()
            torch.cuda._sleep(2000)
        torch.cuda.synchronize()
    events = [e for e in trace.events() if str(e.device_type) == "DeviceType.CUDA"]
    events = sorted((e for e in events if "Mem" not in e.name), key=lambda e: e.time_range.start)
    parts: list[list[Any]] = [[]]
    for event in events:
        if "spin_kernel" in event.name:
            parts.append([])
        else:
            parts[-1].append(event)
    found = []
    for (_, calls), part in zip(groups, parts[1::2], strict=True):
        each, rest = divmod(len(part), rounds * len(calls))
        if rest or not each:
            raise RuntimeError(f"{len(part)} kernels in {rounds} rounds of {len(calls)} calls")
        times = [
            statistics.median(float(e.time_range.end - e.time_range.start) for e in part[i::each])
            for i in range(each)
        ]
        found.append([(part[i].name, times[i]) for i in range(each)])
    return found


def by_module(kernels: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Microseconds of each part of a layer; `us` adds up the products and what arranges inputs."""
    times = {f"{name}_us": micros for name, micros in kernels if name in AROUND}
    products = [micros for name, micros in kernels if name not in AROUND]
    half = len(products) // 2
    times |= {"gate_up_us": sum(products[:half]), "down_us": sum(products[half:])}
    times["us"] = times["gate_up_us"] + times["down_us"] + times.get("arrange_us", 0.0)
    return times


def measure(shape: Shape, tokens: int) -> Iterator[dict[str, Any]]:
    """Records of the bf16 opponents and of each width, without the stamp."""
    batches, touched = shape.batches[tokens], shape.touched(tokens)
    rounds = max(2, -(-8 // len(batches)))
    dense = shape.bf16_calls(tokens)
    groups: list[tuple[Callable[[], Any], Calls]] = []
    places: list[tuple[str, str]] = []  # what each group is
    for kind, modules in dense.items():
        for module, variants in modules.items():
            groups += [(lambda: None, calls) for calls in variants]
            places += [(kind, module)] * len(variants)
    for width in shape.widths:
        calls = [lambda b=batch: shape.apart(b) for batch in batches]
        groups.append((lambda width=width: shape.take(width, tokens), calls))
    times = named_times(groups, rounds)
    best: dict[tuple[str, str], float] = {}
    for place, kernels in zip(places, times, strict=False):
        micros = sum(each for _, each in kernels)
        best[place] = min(micros, best.get(place, micros))
    del dense, groups
    weights = int(3 * shape.model.inner * shape.model.hidden * shape.active(tokens))
    opponents = {}
    for kind in ("triton", "torch"):
        gate_up, down = best[kind, "gate_up"], best[kind, "down"]
        record = {"width": f"bf16 {kind}", "bytes": 2 * weights, "weights": weights}
        opponents[kind] = record | {"gate_up_us": gate_up, "down_us": down, "us": gate_up + down}
    opponents["triton"]["layer_us"] = moe.graph_time(
        lambda batch: moe.dense_layer(shape.layer, batch), batches, replays=12
    )
    yield from opponents.values()
    uniform: dict[int, dict[str, float]] = {}
    for width, kernels in zip(shape.widths, times[len(places) :], strict=True):
        record = {"width": width.name, "weights": weights, "error": shape.error(tokens, width)}
        if not record["error"] < peers.TOLERANCE:
            print(f"WRONG: {shape.name}, {tokens} tokens, {width.name}: {record['error']:.1e}")
            continue
        record |= by_module(kernels)
        record["layer_us"] = moe.graph_time(shape.layer.run, batches, replays=12)
        record["bytes"] = round(
            statistics.mean(
                sum(b.bytes_read(width.bits[m], t) for m, b in shape.layer.blocks.items())
                for t in touched
            )
        )
        record["ratio"] = opponents["triton"]["us"] / record["us"]
        record["torch_ratio"] = opponents["torch"]["us"] / record["us"]
        record["layer_ratio"] = opponents["triton"]["layer_us"] / record["layer_us"]
        if width.span[0] == width.span[1]:
            uniform[width.span[0]] = record
            shape.take(replace(width, span=(moe.MIN_BITS, MAX_BITS)), tokens)
            record["wide_layer_us"] = moe.graph_time(shape.layer.run, batches, replays=12)
        elif len(uniform) == MAX_BITS + 1 - moe.MIN_BITS:
            record |= means(width, uniform)
        yield record


def means(width: Width, uniform: dict[int, dict[str, float]]) -> dict[str, float]:
    """Times that a mix would take if each block took what it does among blocks of its width."""
    shares = {
        module: [bits.count(b) / len(bits) for b in uniform] for module, bits in width.bits.items()
    }
    times = list(uniform.values())

    def mean(module: str, key: str) -> float:
        return sum(s * t[key] for s, t in zip(shares[module], times, strict=True))

    products = mean("gate_up", "gate_up_us") + mean("down", "down_us")
    return {
        "mean_us": products + times[0].get("arrange_us", 0.0),
        **{  # gate_up has two thirds of the weights
            f"mean_{key}": (2 * mean("gate_up", key) + mean("down", key)) / 3
            for key in ("layer_us", "wide_layer_us")
        },
    }


def peer_records(
    shape: Shape, tokens: int, names: Sequence[str], missing: set[str]
) -> Iterator[dict[str, Any]]:
    """What each peer takes for a dense matrix of the same size; one that fails is named once."""
    m, rows, cols = shape.peer_size(tokens)
    base = None
    for name in names:
        try:
            record = peers.dense_record(peers.PEERS[name], m, rows, cols)
        except Exception as error:  # optional: whatever it is, the others are still measured
            if name not in missing:
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            missing.add(name)
            continue
        finally:
            torch.cuda.empty_cache()
        base = record["us"] if name == "cuBLAS bf16" else base
        ratio = {} if base is None else {"ratio": base / record["us"]}
        yield {"width": name, "rows": m} | record | ratio


def stamp() -> dict[str, Any]:
    """GPU, versions and time."""
    try:
        gemlite = metadata.version("gemlite")
    except metadata.PackageNotFoundError:
        gemlite = None
    versions = {"triton": triton.__version__, "cuda": torch.version.cuda, "gemlite": gemlite}
    return about() | versions


def write(records: list[dict[str, Any]], path: Path) -> None:
    """One record a line."""
    plain = [
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in r.items()} for r in records
    ]
    path.write_text("[\n" + ",\n".join(map(json.dumps, plain)) + "\n]\n")


def tiles(shapes: Sequence[Shape], part: int, parts: int) -> None:
    """Run every n-th call of the bf16 opponents once, so that it is compiled."""
    jobs: list[Callable[[], Any]] = []
    for shape in shapes:
        for tokens, batches in shape.batches.items():
            for modules in shape.bf16_calls(tokens).values():
                jobs += [calls[0] for variants in modules.values() for calls in variants]
            jobs.append(lambda s=shape, b=batches[0]: moe.dense_layer(s.layer, b))
    for job in jobs[part::parts]:
        job()
    torch.cuda.synchronize()


def compile_all(
    shapes: Sequence[Shape], options: argparse.Namespace, clock: Callable[[], float]
) -> None:
    """Everything that will run, side by side, into the caches of Triton and of NVRTC's kernels."""
    here = Path(__file__)
    tokens = [str(count) for count in options.tokens]
    commands: list[list[Any]] = []
    if "tiles" in options.prepare:
        commands += [
            [here, "--shapes", shape.name, "--tokens", *tokens, "--tiles", str(part), "2"]
            for shape in shapes
            for part in range(2)
        ]
    if "peers" in options.prepare:
        jobs = [
            f"{name}:{'x'.join(map(str, shape.peer_size(count)))}"
            for count in options.tokens
            if count in options.tuned_tokens
            for shape in shapes
            for name in options.peers
            if name in TUNED
        ]
        parts = [jobs[i::PROCESSES] for i in range(PROCESSES)]
        commands += [[here.with_name("peers.py"), "--prepare", *part] for part in parts if part]

    def run(command: list[Any]) -> None:
        left = max(1.0, options.seconds - clock())
        try:
            done = subprocess.run(
                [sys.executable, *command], timeout=left, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return
        if done.returncode:
            print(f"{command[1:]}: {done.stderr[-300:]}", flush=True)

    with ThreadPoolExecutor(PROCESSES) as pool:
        for command in commands:
            pool.submit(run, command)
        if options.compile or not options.experts:  # NVRTC's kernels have a cache filled fast
            return
        with nvrtc.Rehearsal():
            for shape in shapes:
                for count, batches in shape.batches.items():
                    for width in shape.widths:
                        shape.allow(width, count)
                        shape.layer.run(batches[0])
    torch.cuda.synchronize()


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    shapes = [Shape(name, options.tokens) for name in options.shapes]
    if options.tiles:
        tiles(shapes, *options.tiles)
        return []
    print(f"weights made, {clock():.0f} s", flush=True)
    compile_all(shapes, options, clock)
    if options.compile:
        return []
    print(f"compiled, {clock():.0f} s", flush=True)
    records: list[dict[str, Any]] = []
    missing: set[str] = set()
    for tokens in options.tokens:
        for shape in shapes:
            if clock() > options.seconds:
                print(f"not measured: {shape.name}, {tokens} tokens")
                continue
            where = {"model": shape.name, "tokens": tokens}
            found: list[dict[str, Any]] = []
            start = clock()
            try:
                if options.experts:
                    found.extend(measure(shape, tokens))
            except RuntimeError as error:  # the rest is still measured
                print(f"{shape.name}, {tokens} tokens: {error}", flush=True)
            middle = clock()
            tuned = tokens in options.tuned_tokens
            names = [name for name in options.peers if tuned or name not in TUNED]
            found.extend(peer_records(shape, tokens, names, missing))
            now = stamp()
            records.extend(where | record | now for record in found)
            if options.json:
                write(records, options.json)
            took = f"{middle - start:.1f} s and {clock() - middle:.1f} for peers"
            print(f"{shape.name}, {tokens} tokens: {took}, at {clock():.0f} s", flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(moe.MODELS), default=list(moe.MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--peers", nargs="*", choices=list(peers.PEERS), default=list(peers.PEERS))
    parser.add_argument("--no-peers", dest="peers", action="store_const", const=[])
    parser.add_argument("--no-experts", dest="experts", action="store_false", help="peers alone")
    parser.add_argument(
        "--prepare", nargs="*", choices=("tiles", "peers"), default=["tiles", "peers"],
        help="what is compiled by processes first, nothing if it is in Triton's cache",
    )  # fmt: skip
    parser.add_argument(
        "--tuned-tokens", type=int, nargs="*", default=TOKENS,
        help="where peers run that search for their tiles at each size",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="Triton's kernels, nothing else")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--json", type=Path, help="write the records here as they come")
    parser.add_argument("--tiles", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peers and not options.tiles:
        peers.tune_quickly()
    records = bench(options)
    if records:
        print(experts_table.lines(records))


if __name__ == "__main__":
    main()
