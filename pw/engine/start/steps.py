"""How many tokens a step may have where nobody has said so: as model and budget allow."""

from __future__ import annotations

import logging
from dataclasses import replace

from pw.config import LEAST_STEP_TOKENS, EngineConfig
from pw.engine.start.demand import demand_of
from pw.engine.start.sources import Loaded
from pw.errors import BudgetError
from pw.memory.budget import Demand, MemoryPlan, plan_memory

logger = logging.getLogger("pw.engine")


def settle_steps(
    loaded: Loaded, config: EngineConfig, budget: int
) -> tuple[EngineConfig, Demand, MemoryPlan]:
    """Divide a budget, with the longest steps that leave room for one sequence of the full length.

    Where no steps do, they are the shortest that are tried, for the longest context. A number of
    tokens that is given stays as it is.

    Returns:
        `config` with its tokens of a step, what is asked of the budget, and how it is divided.

    Raises:
        BudgetError: It is too small for any steps.
        ConfigError: See `demand_of`.
    """

    def plan(tokens: int) -> tuple[EngineConfig, Demand, MemoryPlan]:
        settled = replace(config, max_num_batched_tokens=tokens)
        demand = demand_of(loaded.source, loaded.skeleton, settled, loaded.dense)
        return settled, demand, plan_memory(budget, demand)

    *larger, least = sizes = step_sizes(loaded, config)
    for tokens in larger:
        try:
            planned = plan(tokens)
        except BudgetError:
            continue
        _, demand, memory = planned
        if memory.max_model_len == demand.max_model_len:
            break
    else:
        tokens, planned = least, plan(least)
    if tokens < sizes[0]:
        logger.info(
            "steps of up to %d tokens, not %d, for the memory budget's sake: "
            "--max-num-batched-tokens sets them",
            tokens,
            sizes[0],
        )
    return planned


def step_sizes(loaded: Loaded, config: EngineConfig) -> list[int]:
    """Tokens of a step at most: the numbers to try, largest first.

    Layers with a window keep what they see and the tokens of a step: where nobody has said so, a
    step is no longer than the shortest window.
    """
    sizes = [config.step_tokens(loaded.skeleton.device.type)]
    if config.max_num_batched_tokens is None:
        windows = [layer.window for layer in loaded.skeleton.kv.stored if layer.window is not None]
        sizes = [max(LEAST_STEP_TOKENS, min(sizes + windows))]
        while sizes[-1] > LEAST_STEP_TOKENS:
            sizes.append(max(LEAST_STEP_TOKENS, sizes[-1] // 2))
    return sizes
