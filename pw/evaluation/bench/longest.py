"""The longest context that a policy admits within a budget."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pw.config import EngineConfig, PrecisionPolicy
from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.errors import BudgetError, ConfigError
from pw.evaluation.bench.faults import left_out
from pw.evaluation.bench.timing import collect, end, random_prompts


def longest_contexts(
    folder: Path, config: EngineConfig, policies: Sequence[str], answer: int = 8
) -> list[dict[str, Any]]:
    """The longest context that each policy admits within the budget of `config`, then served.

    A policy that cannot be has context 0 and, as `left_out`, why.
    """
    found: list[dict[str, Any]] = []
    for policy in policies:
        row: dict[str, Any] = {"policy": policy, "budget": config.memory_budget}
        try:
            engine = Engine.from_artifact(
                folder, replace(config, policy=PrecisionPolicy.parse(policy), max_num_seqs=1)
            )
        except (BudgetError, ConfigError, torch.OutOfMemoryError) as error:
            found.append(row | {"context": 0} | left_out(error))
            collect()
            continue
        length = engine.max_model_len
        bits = engine.status().mean_bits
        prompt = random_prompts(engine, 1, length - answer, seed=0)[0]
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        started = time.perf_counter()
        done = engine.generate([prompt], params)[0]
        status = engine.status()
        row |= {
            "context": length,
            "served": done.error is None and len(done.token_ids) == answer,
            "seconds": time.perf_counter() - started,
            "mean_bits_before": bits,
            "mean_bits_with_it": status.mean_bits,
            "bytes_over_budget": status.bytes_over_budget,
            "bytes": asdict(status.bytes),
        }
        found.append(row)
        end(engine)
        del engine
        collect()
    return found
