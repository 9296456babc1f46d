"""A fake engine of any size whose memory moves, for the tests of the live page and to look at it.

python -m tests.serving.show_dashboard LAYERS EXPERTS PORT
"""

from __future__ import annotations

import asyncio
import functools
import math
import sys
import time
from typing import Any

import numpy as np
import uvicorn

from pw.engine.page_map import KINDS
from pw.engine.request import BytesByClass, EngineStatus
from pw.serving.app import create_app
from pw.serving.context import ServingConfig
from tests.serving.fakes import FakeEngine, WordTokenizer

PAGE = 16384
PLANES, LEAST = 6, 2
PAGES = (2, 1)  # of one plane of gate_up, of down
PERIOD = 150  # seconds from one squeeze to the next
LUT, KV, FREE = (KINDS.index(kind) for kind in "LKF")


def pressure(second: float) -> float:
    return max(0.0, math.sin(2 * math.pi * second / PERIOD)) ** 0.7


class MovingEngine(FakeEngine):
    """Planes go when KV comes, at a moment that `second` says. Every page is accounted for."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        dice = np.random.default_rng(0)
        self.second = 0.0
        self.mass = dice.dirichlet(np.ones(experts), layers)  # [L, E]
        self.worth = 0.6 + 0.35 * np.minimum(self.mass * experts, 2)[..., None]
        self.worth = self.worth + 0.3 * dice.random((layers, experts, 2))  # [L, E, 2]
        # Each block's place: a LUT, then the pages of its planes; after all blocks, spare pages.
        place = [[-1, *np.repeat(np.arange(PLANES), pages)] for pages in PAGES]
        planes = np.concatenate(place)
        self.plane = np.concatenate(
            [np.tile(planes, layers * experts), [PLANES] * layers * experts]
        )
        sizes = np.tile([len(each) for each in place], layers * experts)
        self.block = np.repeat(np.arange(len(sizes)), sizes)
        self.order = dice.permutation(len(self.plane))

    @functools.cache  # noqa: B019 - one engine a test
    def at(self, second: float) -> tuple[Any, Any]:
        """Bits [L, E, 2] and kinds [P] at a moment."""
        squeeze = (PLANES - LEAST) * pressure(second)
        bits = np.rint(PLANES + 0.4 - squeeze / self.worth).clip(LEAST, PLANES).astype(int)
        width = np.full(len(self.plane), LEAST)
        width[: len(self.block)] = bits.reshape(-1)[self.block]
        kinds = np.where(self.plane < 0, LUT, np.where(self.plane < width, self.plane, FREE))
        free = self.order[kinds[self.order] == FREE]
        kinds[free[: round(len(free) * (0.15 + 0.8 * pressure(second)))]] = KV
        return bits, kinds

    def status(self) -> EngineStatus:
        second = self.second
        bits, kinds = self.at(second)
        counts = np.bincount(kinds, minlength=len(KINDS)).tolist()
        planes = sum(counts[:PLANES])
        widths = np.bincount(bits.reshape(-1))
        running = round(24 * pressure(second))
        tokens = int(sum(300 * (0.3 + pressure(s)) for s in range(int(second))))
        plans = sum(pressure(s + 1) != pressure(s) for s in range(int(second)))
        reason = "kv_pressure" if pressure(second) > pressure(second - 1) else "headroom"
        dense = PAGE * len(kinds) // 4
        return EngineStatus(
            step=int(20 * second),
            policy="adaptive",
            running=running,
            waiting=max(0, running - 16),
            finished=int(second * 3),
            prompt_tokens=4 * tokens,
            generation_tokens=tokens,
            max_model_len=32768,
            page_bytes=PAGE,
            pages_total=len(kinds),
            pages_weights=planes + counts[LUT],
            pages_kv=counts[KV],
            pages_free=counts[FREE],
            mean_bits=bits.mean().item(),
            layer_bits=dict(enumerate(bits.mean((1, 2)).tolist())),
            blocks_by_bits={width: int(n) for width, n in enumerate(widths) if n},
            plans=plans,
            transitions=9 * plans,
            plans_by_trigger={reason: plans},
            plan_history=tuple(
                {"step": int(20 * second) - 20 * ago, "reason": reason, "moves": 9, "pages": 40,
                 "damage": 0.0003 / (1 + ago), "mean_bits": bits.mean().item()}
                for ago in reversed(range(min(plans, 12)))
            ),
            bytes=BytesByClass(
                planes=planes * PAGE,
                luts=counts[LUT] * PAGE,
                kv=counts[KV] * PAGE,
                free=counts[FREE] * PAGE,
                dense=dense,
                tables=dense // 40,
                workspace=dense // 6,
                budget=PAGE * len(kinds) + dense + dense // 40 + dense // 6,
            ),
        )  # fmt: skip

    async def precision_map(self) -> dict[str, Any]:
        bits, kinds = self.at(self.second)
        counts = np.bincount(kinds, minlength=len(KINDS))
        run = -(-len(kinds) // 4096)
        return {
            "layers": [
                {
                    "layer": layer,
                    "gate_up": bits[layer, :, 0].tolist(),
                    "down": bits[layer, :, 1].tolist(),
                    "mass": self.mass[layer].round(4).tolist(),
                }
                for layer in range(len(bits))
            ],
            "pages": {
                "pages": len(kinds),
                "page_bytes": PAGE,
                "pages_per_cell": run,
                "counts": dict(zip(KINDS, counts.tolist(), strict=True)),
                "cells": "".join(KINDS[kind] for kind in kinds[::run]),
            },
        }  # fmt: skip


def moving_app(engine: MovingEngine, *, seconds: int, keys: tuple[str, ...] = ()) -> Any:
    """An app that has served the engine for so many seconds."""
    app = create_app(engine, WordTokenizer(), ServingConfig(("Qwen1.5-MoE-A2.7B",), api_keys=keys))
    begin = time.time() - seconds
    for second in range(seconds + 1):
        engine.second = float(second)
        app.state.context.watch.timeline.record(engine.status(), begin + second, float(second))
    return app


if __name__ == "__main__":
    moving = MovingEngine(int(sys.argv[1]), int(sys.argv[2]))
    app = moving_app(moving, seconds=int(sys.argv[4]))
    asyncio.run(
        uvicorn.Server(uvicorn.Config(app, port=int(sys.argv[3]), log_level="warning")).serve()
    )
