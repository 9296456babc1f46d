"""AIPerf, which succeeds GenAI-Perf, as its users call it: both endpoints, streamed, no errors.

What it depends on does not go with the other clients: it has a virtual environment of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pw.models.resolve import resolve_model

AIPERF = shutil.which("aiperf")
REQUESTS, TOKENS = 6, 8


@pytest.mark.skipif(AIPERF is None, reason="no aiperf on PATH")
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_run(url: str, tmp_path: Path, endpoint: str) -> None:
    done = subprocess.run(
        [
            str(AIPERF), "profile", "--model", "tiny", "--url", url,
            "--endpoint-type", endpoint, "--streaming",
            "--tokenizer", str(resolve_model("tiny")),
            "--request-count", str(REQUESTS), "--concurrency", "2",
            "--synthetic-input-tokens-mean", "16", "--output-tokens-mean", str(TOKENS),
            "--extra-inputs", "ignore_eos:true", "--no-gpu-telemetry", "--ui", "none",
            "--output-artifact-dir", str(tmp_path),
        ],
        # It takes a folder for a name of the hub where it is told to stay offline.
        env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_bytes())
    assert (report["request_count"]["avg"], report["error_summary"]) == (REQUESTS, [])
    usage = report["usage_completion_tokens"]  # from the usage chunk
    assert (usage["min"], usage["max"]) == (TOKENS, TOKENS)
    assert report["time_to_first_token"]["min"] > 0
