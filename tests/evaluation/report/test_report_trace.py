import json
from pathlib import Path

import numpy as np
import pytest

from pw.engine import Engine
from pw.errors import ConfigError
from pw.evaluation.report.trace import read_timeline
from pw.store.artifact import Artifact
from support.engines import make_artifact, open_engine, random_prompt, tight_budget


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact("qwen2_moe", tmp_path_factory.mktemp("trace"), num_hidden_layers=1)[1]


def squeezed(artifact: Path, trace: Path) -> list[tuple[int, float, int, int]]:
    """Run a load that needs more KV than is free; (step, bits, weight pages, free pages) seen."""
    from pw.engine.request import SamplingParams

    engine: Engine = open_engine(
        artifact, memory_budget=tight_budget(artifact, kv_tokens=96), trace=trace
    )
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    for number in range(4):
        engine.add_request(f"r{number}", random_prompt(24, seed=number), params)
    seen = []
    while engine.has_work():
        engine.step()
        status = engine.status()
        if status.plan_history and status.plan_history[-1]["step"] == status.step - 1:
            seen.append(
                (status.step - 1, status.mean_bits, status.pages_weights, status.page_bytes)
            )
    engine.close()
    return seen


def test_a_trace_gives_the_widths_and_pages_that_the_engine_had(
    artifact: Path, tmp_path: Path
) -> None:
    seen = squeezed(artifact, tmp_path / "trace.jsonl")
    found = read_timeline(tmp_path / "trace.jsonl", Artifact.open(artifact))
    assert len(seen) > 2
    assert min(found.bits) < 5.9  # something was given up
    total = {w + k + f for w, k, f in zip(found.weights, found.kv, found.free, strict=True)}
    assert len(total) == 1  # the arena
    for step, bits, pages, page_bytes in seen:
        places = [place for place, at in enumerate(found.steps) if at == step]
        assert places
        assert found.bits[places[-1]] == pytest.approx(bits)
        assert found.weights[places[-1]] == pages * page_bytes
    assert np.all(np.diff(found.steps) >= 0)


def test_files_that_are_no_trace_of_this_artifact(artifact: Path, tmp_path: Path) -> None:
    opened, path = Artifact.open(artifact), tmp_path / "trace.jsonl"
    start = {
        "event": "start",
        "format": "pw-trace-1",
        "artifact": opened.artifact_hash,
        "pages": 10,
        "page_bytes": 4096,
        "bits": [2] * opened.geometry.blocks,
    }
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_timeline(path, opened)
    for content, message in (
        ("{", "not a precision trace"),
        (json.dumps({"event": "plan"}), "not a precision trace"),
        (json.dumps(start | {"format": "other"}), "not a precision trace"),
        (json.dumps(start | {"bits": [2]}), "not a precision trace"),
        (json.dumps(start | {"artifact": "0" * 64}), "with another artifact: .*000000000000, this"),
        (json.dumps(start), "nothing moved in the trace"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_timeline(path, opened)
