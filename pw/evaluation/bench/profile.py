"""Where the device's time of a decode step goes: kernels by what they read, and the gaps between.

Each class of kernels has a floor of its own: the bytes that it has to read, over the speed of a
copy. Gaps and small kernels have none, they only take time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import DeviceType

from pw.evaluation.bench.floor import StepBytes

GAPS = "gaps"
SMALL = "small"
CLASSES = ("experts", "attention", "products", SMALL, GAPS)
_REPLAYS = 10
# Names that libraries give to matrix products begin or go on with these.
_PRODUCTS = ("product", "gemm", "gemv", "nvjet", "cutlass", "splitk", "xmma", "cublas")
_EXPERTS = ("experts", "expand", "route", "combine", "grouped_kernel", "combine_kernel",
            "route_kernel", "gate_up_kernel", "down_kernel")  # fmt: skip
_ATTENTION = ("attention", "attend", "attention_kernel", "merge_kernel")


class Run(NamedTuple):
    """A kernel, or a copy, as it ran; microseconds of one clock."""

    start: float
    end: float
    name: str
    stream: int = 0


def kernel_class(name: str) -> str:
    """What a kernel is for: one of `CLASSES`, but gaps."""
    plain = name.split("(")[0].lower()
    if plain in _EXPERTS:
        return "experts"
    if plain in _ATTENTION:
        return "attention"
    return "products" if any(word in plain for word in _PRODUCTS) else SMALL


def by_class(runs: Iterable[Run], replays: int) -> dict[str, float]:
    """Milliseconds of one of so many replays by class; they add up to all of its time.

    Launches of a stream take turns: one that begins before the one ahead of it has ended waits for
    that. While kernels of several streams run, each has its share of the time.
    """
    turns: list[tuple[float, int, str]] = []  # moment, one more or less, class
    ends = dict[int, float]()
    for run in sorted(runs):
        begin = max(run.start, ends.get(run.stream, run.start))
        if run.end > begin:
            name = kernel_class(run.name)
            turns += [(begin, 1, name), (run.end, -1, name)]
            ends[run.stream] = run.end
    found, running = dict.fromkeys(CLASSES, 0.0), Counter[str]()
    turns.sort()
    for (moment, change, name), (later, *_) in pairwise(turns):
        running[name] += change
        several, passed = running.total(), later - moment
        if not several:
            found[GAPS] += passed
            continue
        for each, count in running.items():
            found[each] += passed * count / several
    return {name: us / (1e3 * replays) for name, us in found.items()}


def kernel_milliseconds(run: Callable[[], Tensor]) -> dict[str, float]:
    """The same of a captured step, replayed back to back on what its last step left."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.inference_mode(), torch.profiler.profile(activities=activities) as seen:
        for _ in range(_REPLAYS):
            run()
        torch.cuda.synchronize()
    return by_class(
        (
            Run(
                event.time_range.start,
                event.time_range.end,
                event.name,
                event.device_resource_id,
            )
            for event in seen.events() or ()
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ),
        _REPLAYS,
    )


def class_floors(read: StepBytes, bandwidth: float) -> dict[str, float]:
    """Milliseconds that the bytes of each class take at the speed of a copy (bytes a second)."""
    sizes = {"experts": read.experts, "attention": read.kv, "products": read.dense}
    return {name: sizes.get(name, 0) / bandwidth * 1e3 for name in CLASSES}
