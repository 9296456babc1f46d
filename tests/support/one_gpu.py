"""Tokens of requests on one GPU, by calls: `python -m support.one_gpu ARTIFACT`, JSON on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pw.engine import Engine
from pw.engine.request import SamplingParams
from support.engines import open_engine, random_prompt

WHERE: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 4}
LENGTHS = (45, 1, 17, 30, 2, 64, 9)


def answers(engine: Engine) -> list[list[int]]:
    """Tokens of greedy and sampled requests that end at different times."""
    params = [
        SamplingParams(
            temperature=0.8 * (seed % 2), seed=seed, max_tokens=6 + 5 * (seed % 4), ignore_eos=True
        )
        for seed in range(len(LENGTHS))
    ]
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    done = engine.generate(prompts, params)
    engine.check_integrity()
    assert [one.error for one in done] == [None] * len(done)
    return [list(one.token_ids) for one in done]


if __name__ == "__main__":
    one = open_engine(Path(sys.argv[1]), "static:4", enforce_eager=True, **WHERE)
    print(json.dumps(answers(one)))
