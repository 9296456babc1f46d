"""Names of models: bundled, folders, hub ids; no network for what is local."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pw.errors import ModelError
from pw.models.resolve import asset, resolve_model


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


def test_a_hub_id_that_is_not_cached_is_refused_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        resolve_model("nobody/nothing@main")
    assert "not in the local cache" in caught.value.message
    assert "`nobody/nothing`" in caught.value.message


@pytest.mark.parametrize("name", ["calibration.jsonl", "heldout.jsonl"])
def test_bundled_text_is_mixed_and_small(name: str) -> None:
    lines = asset(name).read_text("utf-8").splitlines()
    documents = [json.loads(line) for line in lines]
    assert len({document["source"] for document in documents}) >= 9
    assert 200_000 < sum(len(document["text"]) for document in documents) < 350_000
    with pytest.raises(ModelError, match="bundled file is missing"):
        asset("nothing")
