"""Tables of what `experts.py` has measured; needs no GPU.

    python kernels/bench/experts_table.py FILE...       # Markdown: marks, products, layers, peers

A record that several files have is taken from the last of them.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

NAMES = {
    "qwen1.5-moe": "Qwen1.5-MoE-A2.7B",
    "mixtral": "Mixtral-8x7B",
    "gemma4-26b": "Gemma-4-26B-A4B",
    "qwen3-30b": "Qwen3-30B-A3B",
}
FEW = (1, 4, 16, 32, 64, 128)  # tokens
ALL = (*FEW, 512, 2048)
AT_32 = {"2": 4.0, "3": 3.5, "4": 2.5, "5": 2.0, "6": 1.7, "7": 1.4, "8": 1.0}
WIDTHS = [*map(str, range(2, 9)), "planned 3", "planned 4"]
PEERS = ("cuBLAS bf16", "torch int4", "GemLite 4 bit", "GemLite 8 bit")
Record = dict[str, Any]
Key = tuple[str, int, str]


def lines(records: Sequence[Record]) -> str:
    """One line for each record: times, bandwidth, weights a second, ratios."""
    heads = ("model", "T", "width", "us", "TB/s", "Tweights/s", "of Triton", "of torch")
    form = "{:<12}{:<6}{:<15}{:>9}{:>7}{:>12}{:>11}{:>10}{:>10}{:>10}"
    out = [form.format(*heads, "layer us", "of bf16")]
    for r in records:
        rates = [f"{r[key] / r['us'] / 1e6:.2f}" for key in ("bytes", "weights")]
        more = [
            f"{r[key]:.{digits}f}" if key in r else ""
            for key, digits in (
                ("ratio", 2),
                ("torch_ratio", 2),
                ("layer_us", 1),
                ("layer_ratio", 2),
            )
        ]
        out.append(
            form.format(r["model"], r["tokens"], r["width"], f"{r['us']:.1f}", *rates, *more)
        )
    return "\n".join(out)


def cell(record: Record | None, key: str, ratio: str) -> str:
    """Microseconds and, in brackets, a ratio."""
    if record is None or key not in record:
        return ""
    text = f"{record[key]:.1f}" if record[key] < 100 else f"{record[key]:.0f}"
    return f"{text} ({record[ratio]:.2f})" if ratio in record else text


def rows(heads: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown."""
    for cells in (heads, ["---"] * len(heads), *body):
        yield "| " + " | ".join(cells) + " |"


def markdown(records: Sequence[Record]) -> str:
    """Three tables for each model."""
    by: dict[Key, Record] = {(r["model"], r["tokens"], r["width"]): r for r in records}
    out = []
    for model in dict.fromkeys(key[0] for key in by):
        counts = sorted({key[1] for key in by if key[0] == model})
        widths = [w for w in WIDTHS if any((model, t, w) in by for t in counts)]
        out += [
            f"#### {NAMES.get(model, model)}",
            "",
            "gate_up and down (times the best Triton tile)",
            "",
        ]
        heads = ["T", "Triton", "torch", *(f"{w} bit" if w.isdigit() else w for w in widths)]
        body = [
            [
                str(t),
                *(cell(by.get((model, t, f"bf16 {k}")), "us", "") for k in ("triton", "torch")),
                *(cell(by.get((model, t, w)), "us", "ratio") for w in widths),
            ]
            for t in counts
        ]
        out += [*rows(heads, body), "", "Layers from a graph (times the bf16 layer)", ""]
        body = [
            [
                str(t),
                cell(by.get((model, t, "bf16 triton")), "layer_us", ""),
                *(cell(by.get((model, t, w)), "layer_us", "layer_ratio") for w in widths),
            ]
            for t in counts
        ]
        out += [*rows(["T", "bf16", *heads[3:]], body), ""]
        out += [*peer_table(by, model, counts), ""]
    return "\n".join(out)


def marks(records: Sequence[Record]) -> Iterator[str]:
    """What was asked for and what each model's shape has; bold where it is met."""
    by = {(r["model"], r["tokens"], r["width"]): r for r in records}
    models = list(dict.fromkeys(key[0] for key in by))

    def row(
        text: str, values: Callable[[str], Iterator[float]], met: Callable[[float], bool]
    ) -> str:
        cells = []
        for model in models:
            found = list(values(model))
            worst = min(found, key=lambda v: (met(v), v)) if found else None
            number = "" if worst is None else f"{worst:.2f}"
            cells.append(f"**{number}**" if worst is not None and met(worst) else number)
        return "| " + " | ".join([text, *cells]) + " |"

    def at(model: str, tokens: int, width: str, key: str) -> Iterator[float]:
        record = by.get((model, tokens, width), {})
        if key in record:
            yield record[key]

    yield from rows(["mark", *(NAMES.get(m, m) for m in models)], [])
    for width, least in AT_32.items():
        yield row(
            f"T = 32, {width} bit: {least} times Triton",
            lambda m, w=width: at(m, 32, w, "ratio"), lambda v, n=least: v >= n,
        )  # fmt: skip
    for width in ("2", "3", "4"):
        yield row(
            f"T = 1, {width} bit, layers from a graph: 2 times bf16",
            lambda m, w=width: at(m, 1, w, "layer_ratio"), lambda v: v >= 2,
        )  # fmt: skip
    for width in AT_32:
        yield row(
            f"up to T = 128, {width} bit: never slower than Triton",
            lambda m, w=width: (v for t in FEW for v in at(m, t, w, "ratio")), lambda v: v >= 1,
        )  # fmt: skip
    for width in AT_32:
        yield row(
            f"up to T = 128, {width} bit, layers from a graph: never slower than bf16",
            lambda m, w=width: (v for t in FEW for v in at(m, t, w, "layer_ratio")),
            lambda v: v >= 1,
        )
    for width in AT_32:
        yield row(
            f"T = 2048, {width} bit: at least 0.87 of Triton",
            lambda m, w=width: at(m, 2048, w, "ratio"), lambda v: v >= 1 / 1.15,
        )  # fmt: skip
    for key, kernels in (("mean_layer_us", ""), ("mean_wide_layer_us", ", by the same kernels")):
        for tokens in ALL:
            yield row(
                f"planned mix of 3 bits, T = {tokens}: layer within 1 % of uniform widths' mean"
                f"{kernels}",
                lambda m, t=tokens, k=key: (
                    r["layer_us"] / r[k] for r in [by.get((m, t, "planned 3"), {})] if k in r
                ),
                lambda v: v <= 1.01,
            )


def peer_table(by: dict[Key, Record], model: str, counts: Sequence[int]) -> Iterator[str]:
    """T weights a second: experts (layers) beside dense matrices of the same size."""
    names = [name for name in PEERS if any((model, t, name) in by for t in counts)]
    if not names:
        return
    yield "T weights a second: layers of experts, and peers on a dense matrix of the same size"
    yield ""
    ours = ["bf16 triton", "4", "8"]
    body = []
    for t in counts:
        found = [by.get((model, t, name)) for name in (*ours, *names)]
        if found[len(ours)] is None:
            continue
        cells = [
            "" if r is None else f"{r['weights'] / r.get('layer_us', r['us']) / 1e6:.2f}"
            for r in found
        ]
        body.append([str(t), str(found[len(ours)]["rows"]), *cells])
    heads = ["experts, bf16", "experts, 4 bit", "experts, 8 bit", *names]
    yield from rows(["T", "rows of a peer", *heads], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    records = [r for path in parser.parse_args().files for r in json.loads(path.read_text())]
    print("\n".join([*marks(records), "", markdown(records)]))


if __name__ == "__main__":
    main()
