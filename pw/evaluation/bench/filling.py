"""Long contexts without the time it takes to compute them, and weights of exactly so many bytes.

A decode step reads the keys and values of its sequences whatever they are. So a benchmark of decode
steps may fill them with random numbers: prompts pass through admission, scheduler, planner and page
tables as always, and only the forward pass over them is left out. Their first tokens are random, so
that sequences go to different experts. What a prompt costs is measured elsewhere, on real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.engine.sequence import Chunk
from pw.errors import PwError

_OWNER = 1 << 40  # of ballast: no block, no sequence
_LESS = "raise --memory-budget, or lower --batch-size or --context"
_NOISE_BYTES = 64 << 20  # of random numbers, repeated over the pages


def fill(engine: Engine, prompts: list[list[int]], tokens: int) -> list[str]:
    """Let requests decode behind prompts that nobody computes; their names.

    Args:
        engine: An engine with nothing to do, without a prefix cache.
        prompts: Of the requests.
        tokens: That each will make.

    Raises:
        PwError: They do not fit at a time.
    """
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    names = [f"filled-{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, params)
    with _nothing_computed(engine, sum(map(len, prompts))):
        outputs = engine.step()
    if lacking := len(names) - sum(output.error is None for output in outputs):
        for name in names:
            engine.abort(name)
        raise PwError(f"{lacking} of {len(names)} contexts do not fit at a time", _LESS)
    _write_noise(engine)
    return names


@contextmanager
def _nothing_computed(engine: Engine, tokens: int) -> Iterator[None]:
    """Steps of up to so many prompt tokens that compute nothing and draw at random."""
    runner, scheduler = engine._parts.runner, engine._parts.scheduler
    skeleton = engine._parts.skeleton
    random = np.random.default_rng(0)

    def draw(chunks: list[Chunk]) -> tuple[Tensor, dict[Chunk, object]]:
        rows = sum(chunk.samples for chunk in chunks)
        logits = torch.zeros(rows, skeleton.vocab_size, device=skeleton.device)
        likeliest = torch.from_numpy(random.integers(skeleton.vocab_size, size=rows))
        logits[torch.arange(rows), likeliest] = 1.0
        return logits, {}

    steps, most = runner.steps, scheduler._max_tokens
    runner.steps, scheduler._max_tokens = None, tokens
    runner._run_packed = draw  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del runner._run_packed
        runner.steps, scheduler._max_tokens = steps, most


def _write_noise(engine: Engine) -> None:
    """Random numbers in all KV pages: planes may have left anything there, also NaN."""
    parts = engine._parts
    held = [
        page for sequence in parts.kv.sequences.values() for page in parts.kv.pages_of(sequence)
    ]
    pages = parts.arena.as_dtype(parts.skeleton.dtype)
    count = max(1, _NOISE_BYTES // parts.arena.page_bytes)
    same = torch.Generator(pages.device).manual_seed(0)  # in each engine: routing is then alike
    noise = torch.randn(count, pages.shape[1], generator=same, device=pages.device).to(pages.dtype)
    for ids in torch.split(torch.tensor(held, dtype=torch.int64, device=pages.device), count):
        pages.index_copy_(0, ids, noise[: len(ids)])


class Ballast:
    """Pages that a benchmark holds so that weights have the bytes it wants. They are charged to
    nobody: an engine with them is one with so much smaller a budget.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._pages = engine, list[int]()

    def leave(self, pages: int) -> None:
        """Hold so many that weights, KV and what is free have `pages` together.

        Planes are given up for it by plan.

        Raises:
            PwError: They cannot be.
        """
        pool, precision = self._engine._parts.pool, self._engine._parts.precision
        wanted = pool.num_pages - pages
        if wanted < 0:
            raise PwError(f"{pages} pages are asked for, the arena has {pool.num_pages}", _LESS)
        if (excess := len(self._pages) - wanted) > 0:
            pool.give_back(self._pages[-excess:], _OWNER)
            del self._pages[-excess:]
            return
        while (lacking := wanted - len(self._pages) - pool.free_count) > 0:
            if precision.release(lacking, "ballast") == 0:
                raise PwError(
                    f"weights and KV do not fit into {pages} pages: {lacking} too many",
                    "compare at the bytes of more bits, or lower --min-bits",
                )
        self._pages += pool.take(wanted - len(self._pages), _OWNER)
