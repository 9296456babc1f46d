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

import pytest

from pw import FORMAT_VERSION
from pw.cli.precheck import check_artifact
from pw.errors import StoreError
from pw.store.manifest_reader import load
from support.patience import PATIENCE

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
    (folder / "tokenizer.json").write_text("{}")
    write(folder, FORMAT_VERSION)
    return folder


def write(folder: Path, version: int) -> None:
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    files = {
        "tokenizer.json": {"bytes": 2, "sha256": digest},
        "dense.safetensors": {"bytes": 1 << 40, "sha256": "0"},  # left to the engine
        "planes.zarr/zarr.json": {"bytes": 10, "sha256": "0"},
    }
    manifest = {"format_version": version, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_whole_artifact_passes_and_so_does_what_only_the_engine_understands(
    artifact: Path,
) -> None:
    check_artifact(artifact)
    for text in ("[]", "{", '{"files": 5}', '{"files": {"a": null}}', '{"format_version": "x"}'):
        (artifact / "manifest.json").write_text(text)
        check_artifact(artifact)
    (artifact / "manifest.json").unlink()
    check_artifact(artifact)


def test_a_newer_format_is_told_in_the_store_s_own_words(artifact: Path) -> None:
    write(artifact, FORMAT_VERSION + 1)
    with pytest.raises(StoreError, match="newer format") as early:
        check_artifact(artifact)
    with pytest.raises(StoreError) as late:
        load(artifact / "manifest.json")
    assert (str(early.value), early.value.hint) == (str(late.value), late.value.hint)


def test_another_tokenizer_and_a_missing_one(artifact: Path) -> None:
    (artifact / "tokenizer.json").write_text("[]")
    with pytest.raises(StoreError, match=r"is damaged: .*tokenizer\.json"):
        check_artifact(artifact)
    (artifact / "tokenizer.json").unlink()
    with pytest.raises(StoreError, match=r"is missing: .*tokenizer\.json"):
        check_artifact(artifact)


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def test_mistakes_are_told_without_torch_and_without_an_engine(artifact: Path, taken: str) -> None:
    newer = artifact.with_name("newer.pw")
    newer.mkdir()
    (newer / "tokenizer.json").write_text("{}")
    write(newer, FORMAT_VERSION + 1)
    other = artifact.with_name("other.pw")
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    write(other, FORMAT_VERSION)
    (other / "tokenizer.json").write_text('{"another": 1}')
    for code, message, arguments in (
        (2, "cannot listen on 127.0.0.1:" + taken, (str(artifact), "--port", taken)),
        (2, "cannot read `none.pem`", (str(artifact), "--ssl-certfile", "none.pem")),
        (2, "--chat-template is no template", (str(artifact), "--chat-template", "none.jinja")),
        (2, "--api-key-file cannot be read", (str(artifact), "--api-key-file", "none")),
        (2, "--queue-timeout must be positive", (str(artifact), "--queue-timeout", "0")),
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
