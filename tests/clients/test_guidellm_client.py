"""guidellm as its users call it: a short run of synthetic text, all requests successful."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pw.models.resolve import resolve_model

pytest.importorskip("guidellm")

REQUESTS, TOKENS = 6, 8


@pytest.mark.parametrize("profile", ["kind=synchronous", "kind=concurrent,streams=3"])
def test_a_run(url: str, tmp_path: Path, profile: str) -> None:
    command = shutil.which("guidellm", path=str(Path(sys.executable).parent)) or "guidellm"
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            command, "run", "--disable-console",
            "--backend", f"kind=openai_http,target={url}",
            "--profile", profile,
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={TOKENS}",
            "--tokenizer", f"kind=hf_auto,model={resolve_model('tiny')}",
            "--output", f"kind=json,path={report}",
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (benchmark,) = json.loads(report.read_bytes())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (REQUESTS, [])
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == TOKENS  # from the usage chunk
        assert request["info"]["timings"]["first_token_iteration"]
