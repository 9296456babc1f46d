"""The arena on a GPU: prefixes, windows, squeezes and bytes as the driver sees them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.config import EngineConfig, PrecisionPolicy
from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.models.stand_in import write_folder
from support.engines import make_artifact, open_engine, random_prompt, tight_budget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WHERE: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral", "gemma4_text"])
def test_found_prefixes_give_the_answers_of_computed_ones(kind: str, tmp_path: Path) -> None:
    _, artifact = make_artifact(kind, tmp_path)
    prompt = random_prompt(120, 1)
    plain = open_engine(artifact, "static:4", enable_prefix_caching=False, **WHERE)
    cached = open_engine(artifact, "static:4", **WHERE)
    cached.generate([[*prompt[:96], 5]], GREEDY)
    expected, found = plain.generate([prompt], GREEDY)[0], cached.generate([prompt], GREEDY)[0]
    assert cached.status().prefix_cache_hits == 96
    assert found.token_ids == expected.token_ids
    got, wanted = (torch.tensor([e.logprob for e in c.logprobs]) for c in (found, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    cached.check_integrity()


def used_as_others_see_it() -> int:
    """MiB in use on the device, read by a process of its own.

    Raises:
        OSError, CalledProcessError, ValueError: There is no `nvidia-smi`, or it does not tell.
    """
    device = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = ["nvidia-smi", device, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.skipif(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1",
    reason="the driver sees the bytes of tests that run beside it",
)
def test_the_driver_sees_no_byte_come_or_go_while_planes_do(tmp_path: Path) -> None:
    """[H11, L2] After the start nothing is allocated on the device, whatever the pages hold."""
    _, artifact = make_artifact("qwen2_moe", tmp_path, num_attention_heads=2)
    usual: dict[str, Any] = {"device": "cuda"}  # its own dtype: fp32 takes minutes to compile
    budget = tight_budget(artifact, kv_tokens=80, **usual)
    engine = open_engine(artifact, memory_budget=budget, planner_low_watermark=0.01, **usual)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def cycle(seed: int) -> None:
        engine.generate([random_prompt(150, 7 * seed + i) for i in range(5)], params)
        for _ in range(2000):
            if not engine.idle_turn():
                break
        engine.check_integrity()

    for seed in range(3):
        cycle(seed)
    torch.cuda.synchronize()
    free, before = torch.cuda.mem_get_info()[0], engine.status()
    used = used_as_others_see_it()
    for seed in range(3, 23):
        cycle(seed)
    torch.cuda.synchronize()
    after = engine.status()
    assert after.transitions > before.transitions + 100
    assert torch.cuda.mem_get_info()[0] == free
    assert used_as_others_see_it() == used
    assert (after.pages_free, after.mean_bits) == (before.pages_free, before.mean_bits)
    assert after.bytes_over_budget == 0


@pytest.mark.parametrize("policy", ["adaptive", "static:3", "dense"])
def test_dummy_weights_are_made_on_the_device(policy: str, tmp_path: Path) -> None:
    settings = {
        "model_type": "qwen2_moe", "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 900,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128,
        "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 128, "max_position_embeddings": 512,
    }  # fmt: skip
    config = tmp_path / "small.json"
    config.write_text(json.dumps(settings))
    write_folder(config, tmp_path / "model", {})
    engine = Engine.from_artifact(
        tmp_path / "model",
        EngineConfig(
            memory_budget=1 << 28,
            policy=PrecisionPolicy.parse(policy),
            device="cuda",
            load_format="dummy",
        ),
    )
    answers = engine.generate([random_prompt(40, seed) for seed in range(3)], GREEDY)
    assert [len(answer.token_ids) for answer in answers] == [12] * 3
    engine.check_integrity()
