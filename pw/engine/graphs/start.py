"""Makes the steps of a new engine ready: kernels compiled side by side, then graphs captured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from pw.engine.experts import RoutedExperts
from pw.engine.graphs.capture import Capture, MakeGraph, Step
from pw.engine.graphs.decode import DecodeSteps
from pw.engine.graphs.prompts import rehearse_prompts
from pw.memory.kv_cache import KvCache
from pw.models.skeleton import Skeleton
from pw_kernels.dispatch import rehearsal

logger = logging.getLogger("pw.engine")

_SIZES_AN_OCTAVE = 4  # of prompts that are tried: kernels are chosen by shapes


def capture_steps(
    skeleton: Skeleton,
    experts: RoutedExperts,
    kv: KvCache,
    most: int,
    new_capture: Callable[[torch.device], MakeGraph] = Capture,
) -> DecodeSteps | None:
    """Capture the decode steps of a model on a GPU; None, and a warning, where it cannot be.

    Args:
        skeleton: The model, with `experts` bound.
        experts: What its experts modules call.
        kv: The cache.
        most: Sequences of a step at most.
        new_capture: Makes what captures a step.
    """
    try:
        _compile(skeleton, experts, kv, most)
        started = time.monotonic()
        steps = DecodeSteps(skeleton, experts, kv, most, new_capture(skeleton.device))
    except Exception as error:  # whatever a model does that a graph cannot hold
        logger.warning(
            "decode runs without CUDA graphs, slower: %s: %s", type(error).__name__, error
        )
        if skeleton.device.type == "cuda":
            torch.cuda.synchronize(skeleton.device)  # a device that is lost says so here
        return None
    logger.info(
        "captured decode graphs for batches of %s in %.1f s",
        ", ".join(map(str, steps.sizes)),
        time.monotonic() - started,
    )
    return steps


def _compile(skeleton: Skeleton, experts: RoutedExperts, kv: KvCache, most: int) -> None:
    """Go through decode steps of up to `most` sequences, prompts, and experts of prompts of all
    lengths.

    What is compiled at run time is compiled by several threads at a time; the other kernels run,
    on padding, and are compiled by that.
    """
    started = time.monotonic()
    with rehearsal(skeleton.device) as kernels:
        DecodeSteps(skeleton, experts, kv, most, _once)
        _rehearse(skeleton, experts, kv)
    if kernels is not None and kernels.compiled:
        logger.info(
            "compiled %d kernels in %.1f s, kept in %s",
            kernels.compiled,
            time.monotonic() - started,
            kernels.folder,
        )


def _rehearse(skeleton: Skeleton, experts: RoutedExperts, kv: KvCache) -> None:
    """Go through prompts. An error is told, and left to the first prompt that comes."""
    try:
        rehearse_prompts(skeleton, experts, kv)
        for tokens in prompt_sizes(kv.chunk_tokens):
            experts.rehearse(tokens, skeleton.dtype)
    except Exception as error:  # whatever a model does, or has no memory for
        logger.warning(
            "what prompts need is not all compiled yet: %s: %s", type(error).__name__, error
        )
        if skeleton.device.type == "cuda":
            torch.cuda.synchronize(skeleton.device)  # a device that is lost says so here


def prompt_sizes(most: int) -> list[int]:
    """Numbers of tokens up to `most`, each a fifth more than the one before, and `most`."""
    sizes = {round(2 ** (power / _SIZES_AN_OCTAVE)) for power in range(64 * _SIZES_AN_OCTAVE)}
    return sorted({size for size in sizes if size < most} | {most})


def _once(step: Step) -> Step:
    step()
    return step
