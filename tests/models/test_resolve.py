"""Names of models: bundled, folders, hub ids; no network for what is local."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from pw.errors import ModelError
from pw.models.resolve import asset, download, pinned, resolve_model


def test_local_names(tmp_path: Path) -> None:
    assert (resolve_model("tiny") / "model.safetensors").is_file()
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["no-such-model", "./no/folder", "/no/folder", "a/b/c", "", "../x"]
)
def test_names_that_are_nothing_are_refused_without_asking_the_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert caught.value.message == f"no such model: `{name}`"


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="a model is a folder"):
        resolve_model(str(file))


COMMIT = "5f" * 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache as huggingface_hub lays it out, with one snapshot; asking a network fails."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "create_connection", asked)
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    folder = tmp_path / "models--owner--Some-MoE"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_a_hub_id_is_found_in_the_local_cache(revision: str, cache: Path) -> None:
    name = f"owner/Some-MoE{revision}"
    found = resolve_model(name)
    assert found == cache / "snapshots" / COMMIT
    assert pinned(name, found) == f"owner/Some-MoE@{COMMIT}"
    assert resolve_model(pinned(name, found)) == found


@pytest.mark.parametrize("name", ["nobody/nothing", "owner/Some-MoE@other"])
def test_a_hub_id_that_is_not_cached_is_refused_without_asking_the_network(
    name: str, cache: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert caught.value.message == f"model is not in the local cache: `{name}`"
    assert f"`pw calibrate {name} --download`" in caught.value.hint


def test_a_download_names_what_it_wants_and_keeps_to_the_revision(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[tuple[str, Any]] = []

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.append((repository, options))
        return str(cache / "snapshots" / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert download(f"owner/Some-MoE@{COMMIT}").name == COMMIT
    ((repository, options),) = asked
    assert (repository, options["revision"]) == ("owner/Some-MoE", COMMIT)
    assert not options["local_files_only"]
    assert "*.safetensors" in options["allow_patterns"]
    assert not {"*.bin", "*.py", "*.pt"} & set(options["allow_patterns"])
    assert download("tiny") == resolve_model("tiny")
    assert download(str(cache)) == cache
    assert len(asked) == 1


def test_a_download_without_a_network_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="hub cannot be reached for `nobody/nothing`"):
        download("nobody/nothing")


@pytest.mark.parametrize("name", ["calibration.jsonl", "heldout.jsonl"])
def test_bundled_text_is_mixed_and_small(name: str) -> None:
    lines = asset(name).read_text("utf-8").splitlines()
    documents = [json.loads(line) for line in lines]
    assert len({document["source"] for document in documents}) >= 9
    assert 200_000 < sum(len(document["text"]) for document in documents) < 350_000
    with pytest.raises(ModelError, match="bundled file is missing"):
        asset("nothing")
