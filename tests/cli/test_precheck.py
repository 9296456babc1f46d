"""[F10] What can be told at once is: before torch is loaded, and before an engine is started."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pw import FORMAT_VERSION
from pw.cli.precheck import check_artifact, check_context, check_settings
from pw.config import EngineConfig, PrecisionPolicy
from pw.engine.request import BytesByClass, EngineStatus
from pw.errors import BudgetError, ConfigError, StoreError
from pw.store.manifest_reader import load
from support.patience import PATIENCE

DENSE = 1 << 40  # bytes; a file with nothing in it
TRY = """
import sys
from pw.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    print(stop.code, "torch" in sys.modules, "pw.serving.process.engine_process" in sys.modules)
"""


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """As much of one as is read before the engine starts."""
    folder = tmp_path / "a.pw"
    folder.mkdir()
    make(folder, FORMAT_VERSION)
    return folder


def make(folder: Path, version: int) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with (folder / "dense.safetensors").open("wb") as sparse:
        sparse.truncate(DENSE)
    write(folder, version)


def write(folder: Path, version: int) -> None:
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    files = {
        "tokenizer.json": {"bytes": 2, "sha256": digest},
        "dense.safetensors": {"bytes": DENSE, "sha256": "0"},  # too large to be read here
    }
    shape = {"rows": 64, "cols": 128}
    geometry = {"layers": [0, 1], "experts": 4, "gate_up": shape, "down": shape}
    manifest = {
        "format_version": version, "files": files, "geometry": geometry, "min_bits": 2,
        "max_bits": 6, "lut_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_whole_artifact_passes_and_so_does_what_only_the_engine_understands(
    artifact: Path,
) -> None:
    check_artifact(artifact, EngineConfig())
    for text in ("[]", "{", '{"files": 5}', '{"files": {"a": null}}', '{"format_version": "x"}'):
        (artifact / "manifest.json").write_text(text)
        check_artifact(artifact, EngineConfig())
    (artifact / "manifest.json").unlink()
    check_artifact(artifact, EngineConfig())


def test_a_newer_format_is_told_in_the_store_s_own_words(artifact: Path) -> None:
    write(artifact, FORMAT_VERSION + 1)
    with pytest.raises(StoreError, match="newer format") as early:
        check_artifact(artifact, EngineConfig())
    with pytest.raises(StoreError) as late:
        load(artifact / "manifest.json")
    assert (str(early.value), early.value.hint) == (str(late.value), late.value.hint)


def test_another_tokenizer_and_a_missing_one(artifact: Path) -> None:
    (artifact / "tokenizer.json").write_text("[]")
    with pytest.raises(StoreError, match=r"is damaged: .*tokenizer\.json"):
        check_artifact(artifact, EngineConfig())
    (artifact / "tokenizer.json").unlink()
    with pytest.raises(StoreError, match=r"is missing: .*tokenizer\.json"):
        check_artifact(artifact, EngineConfig())


def test_weights_that_are_cut_short_or_gone(artifact: Path) -> None:
    os.truncate(artifact / "dense.safetensors", DENSE - 1)
    with pytest.raises(StoreError, match=rf"has {DENSE - 1} bytes instead of {DENSE}"):
        check_artifact(artifact, EngineConfig())
    (artifact / "dense.safetensors").unlink()
    with pytest.raises(StoreError, match=r"is missing: .*dense\.safetensors"):
        check_artifact(artifact, EngineConfig())


def test_a_file_inside_a_folder_is_compared_and_none_outside_is_opened(artifact: Path) -> None:
    manifest = json.loads((artifact / "manifest.json").read_bytes())
    for name in ("/etc/hostname", "../tokenizer.json"):
        manifest["files"][name] = {"bytes": 2, "sha256": "0"}
    (artifact / "manifest.json").write_text(json.dumps(manifest))
    check_artifact(artifact, EngineConfig())
    (artifact / "planes.zarr").mkdir()
    (artifact / "planes.zarr" / "zarr.json").write_text("{}")
    manifest["files"]["planes.zarr/zarr.json"] = {"bytes": 2, "sha256": "0"}
    (artifact / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=r"planes\.zarr/zarr\.json`: SHA-256 differs"):
        check_artifact(artifact, EngineConfig())


@pytest.mark.parametrize(("policy", "bits"), [("adaptive", 2), ("static:4", 4)])
def test_a_budget_below_the_weights(artifact: Path, policy: str, bits: int) -> None:
    block = 64 * 128 * bits // 8 + 64 * 2**bits * 2
    least = DENSE + 2 * 4 * 2 * block
    chosen = PrecisionPolicy.parse(policy)
    check_artifact(artifact, EngineConfig(memory_budget=least, policy=chosen))
    with pytest.raises(BudgetError, match=f"experts at {bits} bits") as caught:
        check_artifact(artifact, EngineConfig(memory_budget=least - 1, policy=chosen))
    assert caught.value.hint.startswith("raise --memory-budget: workspace and KV come on top")


@pytest.mark.parametrize(
    ("settings", "error", "hint"),
    [
        ({"policy": "static:8"}, "policy `static:8` is not to be had", "--max-bits 8`"),
        (
            {"max_bits": 7},
            "--max-bits 7 is not to be had: the artifact has 2 to 6",
            "--max-bits 7`",
        ),
        ({"min_bits": 7}, "--min-bits is above --max-bits: 7, 6", "swap them"),
        ({"min_bits": 1}, "--min-bits 1 is not to be had", "choose 2 to 6"),
        ({"min_bits": 5, "max_bits": 3}, "--min-bits is above --max-bits: 5, 3", "swap them"),
    ],
)
def test_widths_that_the_artifact_does_not_have(
    artifact: Path, settings: dict[str, Any], error: str, hint: str
) -> None:
    policy = PrecisionPolicy.parse(settings.pop("policy", "adaptive"))
    config = EngineConfig(policy=policy, **settings)
    for check in (check_settings, check_artifact):
        with pytest.raises(ConfigError) as caught:
            check(artifact, config)
        assert error in caught.value.message
        assert hint in caught.value.hint


@pytest.mark.parametrize("policy", ["static:6", "static:2", "dense", "adaptive"])
def test_widths_that_it_has(artifact: Path, policy: str) -> None:
    check_settings(artifact, EngineConfig(policy=PrecisionPolicy.parse(policy)))
    check_settings(artifact, EngineConfig(min_bits=3, max_bits=6))


@pytest.mark.parametrize(
    ("policy", "beside"),
    [
        ("adaptive", "beside the experts at their least widths 1,200 tokens do"),
        ("static:4", "beside the experts at static:4 1,200 tokens do"),
        ("dense", "beside the experts, unquantized 1,200 tokens do"),
    ],
)
def test_a_context_that_does_not_fit_is_refused_with_the_numbers(policy: str, beside: str) -> None:
    started = EngineStatus(policy=policy, max_model_len=1200, bytes=BytesByClass(budget=24 << 20))
    check_context(None, started)
    check_context(1200, started)
    with pytest.raises(BudgetError) as caught:
        check_context(4096, started)
    assert caught.value.message == (
        "--max-model-len of 4,096 tokens does not fit in the memory budget of 24.00 MiB "
        f"(25,165,824 bytes): {beside}"
    )
    assert "lower it to 1200, raise --memory-budget" in caught.value.hint
    assert "`auto`" in caught.value.hint


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def test_mistakes_are_told_without_torch_and_without_an_engine(artifact: Path, taken: str) -> None:
    newer = artifact.with_name("newer.pw")
    newer.mkdir()
    make(newer, FORMAT_VERSION + 1)
    other = artifact.with_name("other.pw")
    other.mkdir()
    make(other, FORMAT_VERSION)
    (other / "tokenizer.json").write_text('{"another": 1}')
    for code, message, arguments in (
        (2, "cannot listen on 127.0.0.1:" + taken, (str(artifact), "--port", taken)),
        (2, "cannot read `none.pem`", (str(artifact), "--ssl-certfile", "none.pem")),
        (2, "--chat-template is no template", (str(artifact), "--chat-template", "none.jinja")),
        (2, "--api-key-file cannot be read", (str(artifact), "--api-key-file", "none")),
        (2, "--queue-timeout must be positive", (str(artifact), "--queue-timeout", "0")),
        (4, "memory budget of 1.00 MiB", (str(artifact), "--memory-budget", "1MiB")),
        (3, "artifact has a newer format", (str(newer),)),
        (3, "artifact file is damaged", (str(other),)),
        (3, "no such artifact", ("nowhere.pw",)),
    ):
        done = subprocess.run(
            [sys.executable, "-c", TRY, "serve", "--port", "0", *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        told = done.stderr.splitlines()
        assert done.stdout.split() == [str(code), "False", "False"], (arguments, done.stderr)
        assert told[0].startswith(f"error: {message}"), told
        assert len(told) == 1 or told[1].startswith("hint: "), told
