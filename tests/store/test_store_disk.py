"""A disk that is full or fails leaves one clear line and a folder that resumes."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pw.errors import PartialResultError
from pw.store import Artifact, verify
from support.store import Sample, tree_hash, write_routing

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_stops_and_resumes(
    tiny_disk: Path, sample: Sample, built: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(240 << 10))
    with pytest.raises(PartialResultError, match=r"[\d,]+ bytes\) needed, .* free"):
        sample.build(tiny_disk / "x.pw")  # refused before work: the estimate does not fit
    free = shutil.disk_usage(tiny_disk).free
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 0, 1 << 40))
    with pytest.raises(PartialResultError, match="disk full while writing") as stop:
        sample.build(tiny_disk / "x.pw")  # the estimate was wrong: stopped on the way
    monkeypatch.undo()
    assert "resumes" in stop.value.hint
    assert stop.value.exit_code == 5
    assert shutil.disk_usage(tiny_disk).free < free
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(tiny_disk)], check=True)
    assert tree_hash(sample.build(tiny_disk / "x.pw").path) == tree_hash(built.path)


def failing(name: str, error: OSError, after: int) -> Callable[..., Any]:
    """`os.<name>` that raises from its call number `after` on."""
    real, calls = getattr(os, name), iter(range(10**6))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= after:
            raise error
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("after", [0, 1, 5, 12, 30, 43, 55])
def test_failed_write_at_any_stage_resumes(
    sample: Sample, built: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    path = tmp_path / "x.pw"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing("write", NO_SPACE, after))
        with pytest.raises(PartialResultError, match=r"disk full while writing .* bytes\) needed"):
            sample.build(path)
    assert tree_hash(sample.build(path).path) == tree_hash(built.path)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("operation", ["fsync", "rename"])
def test_failing_disk_is_one_line(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, code: int
) -> None:
    with sample.open(tmp_path / "x.pw") as writer:
        monkeypatch.setattr(os, operation, failing(operation, OSError(code, os.strerror(code)), 0))
        with pytest.raises(PartialResultError, match=os.strerror(code)):
            sample.write_blocks(writer, 1, "down")
        assert not writer.done(1, "down")


def test_full_disk_while_adding_a_table_leaves_the_artifact_as_it_was(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, before = Artifact.open(copy), tree_hash(copy)
    with monkeypatch.context() as patch:
        patch.setattr("pw.store.tables.fsync_tree", failing("fsync", NO_SPACE, 0))
        with pytest.raises(PartialResultError, match=r"\(24 bytes\) needed"):
            write_routing(artifact, mass=0.25, overwrite=True)
    assert artifact.table("routing").arrays["mass"][0, 0] == 0.5
    shutil.rmtree(copy / ".routing.zarr.tmp")
    assert tree_hash(copy) == before
    write_routing(artifact, mass=0.25, overwrite=True)
    assert verify(copy) == []
