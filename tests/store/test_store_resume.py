"""A build that is killed, changed, contested or repeated."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pw
from pw.blocks import MODULES, BlockKey
from pw.errors import ModelError, PartialResultError, StaleStageError, StoreError
from pw.store import Artifact, ArtifactWriter, ModelRecord
from pw.store.files import WriteLock
from pw_kernels.bitplane import pack_planes, plane_bytes
from support import store_crash
from support.store import MAX_BITS, MODEL, SETTINGS, Sample, tree_hash


def test_killed_at_any_moment_it_resumes_to_the_same_bytes(built: Artifact, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, store_crash.__file__, str(tmp_path), "6", "2", "0"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    expected = tree_hash(built.path)
    assert result["whole"]["hash"] == expected
    assert len(result["runs"]) == 8
    for number, run in enumerate(result["runs"]):
        assert run["killed"] or run["at"][0] == "seconds", run
        assert run["resumed"]["hash"] == expected, run
        assert run["left"] == [f"{number}.pw"], run


def test_finished_blocks_are_not_written_again(sample: Sample, tmp_path: Path) -> None:
    with sample.open(tmp_path / "x.pw") as writer:
        needed = writer.bytes_needed()
        sample.write_blocks(writer, 1, "gate_up")
        assert writer.bytes_needed() < needed
    with sample.open(tmp_path / "x.pw") as writer:
        assert [(1, m) for m in MODULES if writer.done(1, m)] == [(1, "gate_up")]
        assert not writer.dense_done
        folder = tmp_path / "x.pw.partial/planes.zarr/1.gate_up"
        before = folder.stat().st_ino
        sample.write_blocks(writer, 1, "gate_up")
        assert folder.stat().st_ino == before


@pytest.mark.parametrize(
    ("changes", "old", "new", "name"),
    [
        ({"max_bits": 5}, "`4`", "`5`", "max_bits"),
        ({"lut_dtype": torch.float16}, "`bfloat16`", "`float16`", "lut_dtype"),
        (
            {"settings": {**SETTINGS, "calibration": {"dataset": "bundled", "nsamples": 8}}},
            "`4`",
            "`8`",
            "settings.calibration.nsamples",
        ),
        ({"settings": {**SETTINGS, "strict": True}}, "absent", "`True`", "settings.strict"),
        (
            {"model": ModelRecord("sample", "", "", "SampleMoe", {"model.safetensors": "1" * 64})},
            "`000000000000",
            "`111111111111",
            "model.files.model.safetensors",
        ),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_changed_settings_are_refused_with_both_values(
    sample: Sample,
    copy: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    old: str,
    new: str,
    name: str,
    finished: bool,
) -> None:
    path = copy if finished else tmp_path / "x.pw"
    if not finished:
        with sample.open(path) as writer:
            sample.write_blocks(writer, 2, "down")
    before = tree_hash(tmp_path)
    with pytest.raises(StaleStageError) as refusal:
        sample.open(path, **changes)
    assert f"{name} was {old}" in refusal.value.message
    assert f"now {new}" in refusal.value.message
    assert "--overwrite" in refusal.value.hint
    assert tree_hash(tmp_path) == before


def test_work_of_other_settings_that_has_done_nothing_is_in_nobodys_way(
    sample: Sample, tmp_path: Path, built: Artifact
) -> None:
    writer = sample.open(tmp_path / "x.pw", settings={"min_bits": 3})
    writer.write_dense(sample.dense_sources())  # a copy of what is there already
    writer.close()
    assert tree_hash(sample.build(tmp_path / "x.pw").path) == tree_hash(built.path)


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (ModelError("refused"), False),
        (PartialResultError("disk full"), True),
        (KeyboardInterrupt(), True),
        (ValueError("a bug"), True),
    ],
)
@pytest.mark.parametrize("work", [False, True])
def test_a_refusal_leaves_no_folder_without_work(
    sample: Sample, tmp_path: Path, error: BaseException, left: bool, work: bool
) -> None:
    def fail(writer: ArtifactWriter) -> None:
        if work:
            sample.write_blocks(writer, 1, "down")
        raise error

    with pytest.raises(type(error)), sample.open(tmp_path / "x.pw") as writer:
        fail(writer)
    assert (tmp_path / "x.pw.partial").exists() == (left or work)
    assert not (tmp_path / "x.pw.lock").exists()


def test_who_may_not_write_learns_it_before_the_work(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, before = Artifact.open(copy), tree_hash(copy)
    artifact.check_writable()
    with WriteLock(copy), pytest.raises(StoreError, match="is being written by process"):
        artifact.check_writable()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreError, match="this user may not write into"):
        artifact.check_writable()
    assert tree_hash(copy) == before
    assert not copy.with_name(f"{copy.name}.lock").exists()


@pytest.mark.parametrize("place", ["", ".", "..", "/"])
def test_an_output_without_a_name_is_refused(sample: Sample, place: str) -> None:
    with pytest.raises(StoreError, match="output has no name of its own"):
        sample.open(Path(place))


def test_an_output_inside_an_artifact_is_refused(sample: Sample, copy: Path) -> None:
    before = tree_hash(copy)
    with pytest.raises(StoreError, match="output lies inside an artifact"):
        sample.open(copy / "more" / "x.pw")
    assert tree_hash(copy) == before


def test_where_the_model_was_found_is_no_setting(sample: Sample, tmp_path: Path) -> None:
    sample.open(tmp_path / "x.pw").close()
    moved = ModelRecord("other", "elsewhere", "main", MODEL.architecture, MODEL.files)
    sample.open(tmp_path / "x.pw", model=moved).close()


def test_blocks_of_two_versions_do_not_mix(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sample.open(tmp_path / "x.pw") as writer:
        sample.write_blocks(writer, 2, "down")
    monkeypatch.setattr(pw, "__version__", "99.0")
    with pytest.raises(StaleStageError, match=r"tool_version was .* now `99.0`"):
        sample.open(tmp_path / "x.pw")


def test_finished_artifact_is_taken_as_it_is(sample: Sample, copy: Path) -> None:
    before = tree_hash(copy)
    with sample.open(copy) as writer:
        assert writer.complete
        assert writer.dense_done
        assert all(writer.done(layer, module) for layer, module in sample.codes)
    assert sample.build(copy).path == copy
    assert tree_hash(copy) == before


def test_overwrite_replaces_and_leaves_the_old_one_until_then(
    sample: Sample, copy: Path, built: Artifact
) -> None:
    changed = {**SETTINGS, "min_bits": 3}
    with sample.open(copy, overwrite=True, settings=changed) as writer:
        assert not writer.complete
        assert Artifact.open(copy).artifact_hash == built.artifact_hash
        for layer, module in sample.codes:
            sample.write_blocks(writer, layer, module)
        writer.write_dense(sample.dense_sources())
        artifact = writer.publish()
    assert artifact.manifest.stages["quantize"].settings == changed
    assert not artifact.has_table("moments")
    assert sorted(path.name for path in copy.parent.iterdir()) == [copy.name]


def test_two_writers_are_refused(sample: Sample, tmp_path: Path) -> None:
    path = tmp_path / "x.pw"
    with sample.open(path):
        with pytest.raises(StoreError, match=f"is being written by process {os.getpid()} on"):
            sample.open(path)
        lock = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        command = [sys.executable, "-c", lock, f"{path}.lock"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "BlockingIOError" in done.stderr  # another process is kept out too
    sample.open(path).close()
    assert not (tmp_path / "x.pw.lock").exists()


def test_lock_file_of_a_dead_process_is_no_lock(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "x.pw.lock").write_text("process 1 on elsewhere")
    sample.open(tmp_path / "x.pw").close()


def test_a_folder_that_is_no_artifact_is_left_alone(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "x.pw").mkdir()
    (tmp_path / "x.pw/precious").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(StoreError, match="not an artifact"):
            sample.open(tmp_path / "x.pw", overwrite=overwrite)
    assert (tmp_path / "x.pw/precious").read_text() == "mine"


def test_overwrite_resumes_its_own_work_and_drops_that_of_others(
    sample: Sample, copy: Path
) -> None:
    changed = {**SETTINGS, "min_bits": 3}
    with sample.open(copy, overwrite=True, settings=changed) as writer:
        sample.write_blocks(writer, 1, "down")
    with sample.open(copy, overwrite=True, settings=changed) as writer:
        assert writer.done(1, "down")
    with sample.open(copy, overwrite=True) as writer:
        assert not writer.done(1, "down")


@pytest.mark.parametrize("old_moved", [False, True])
def test_killed_while_taking_the_place_of_an_old_artifact(
    sample: Sample, built: Artifact, copy: Path, old_moved: bool
) -> None:
    (copy / "tokenizer.json").unlink()  # the old one differs
    shutil.copytree(built.path, copy.with_name(f"{copy.name}.partial"))
    if old_moved:
        copy.rename(copy.with_name(f"{copy.name}.old"))
    with sample.open(copy) as writer:
        assert writer.complete
    assert tree_hash(copy) == tree_hash(built.path)
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_damaged_work_is_done_again(sample: Sample, tmp_path: Path, built: Artifact) -> None:
    path = tmp_path / "x.pw"
    with sample.open(path) as writer:
        sample.write_blocks(writer, 1, "down")
        sample.write_blocks(writer, 2, "down")
    build = tmp_path / "x.pw.partial/.build"
    (build / "blocks/1.down.json").write_text("{")
    with sample.open(path) as writer:
        assert not writer.done(1, "down")
        assert writer.done(2, "down")
    (build / "draft.json").write_text("{")
    with pytest.raises(StoreError, match="damaged") as refusal:
        sample.open(path)
    assert "--overwrite" in refusal.value.hint
    assert tree_hash(sample.build(path, overwrite=True).path) == tree_hash(built.path)


def test_a_reader_of_a_replaced_artifact_never_gets_bytes_of_the_new_one(
    sample: Sample, copy: Path
) -> None:
    """[F12] What a server holds in memory stays; what it reads later is the old or is refused."""
    old, key = Artifact.open(copy), BlockKey(1, 0, "gate_up")
    size = plane_bytes(40, 130)
    before, now = np.empty(size, np.uint8), np.empty(size, np.uint8)
    old.read_planes(key, 0, 1, before)
    changed = {**SETTINGS, "min_bits": 3}
    with sample.open(copy, overwrite=True, settings=changed) as writer:
        old.read_planes(key, 0, 1, now)  # the old generation, until the new one is whole
        assert (now == before).all()
        for layer, module in sample.codes:
            writer.write_blocks(
                layer,
                module,
                pack_planes(sample.codes[layer, module] ^ 15, MAX_BITS),
                sample.luts[layer, module],
            )
        writer.write_dense(sample.dense_sources())
        writer.publish()
    with pytest.raises(StoreError, match=r"damaged plane: .*layer 1 expert 0 gate_up plane 0"):
        old.read_planes(key, 0, 1, now)
