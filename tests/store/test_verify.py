"""Damage of every kind is found and named."""

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from pw.blocks import BlockKey, Module
from pw.errors import StaleStageError, StoreError
from pw.store import Artifact, Finding, verify
from pw.store.planes import crc
from pw_kernels.bitplane import lut_bytes, plane_bytes
from support.store import GEOMETRY, MAX_BITS, files_of, write_routing

MANY = pytest.mark.figures


def flip(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 1 << bit]))


def place(name: str, position: int) -> tuple[BlockKey | None, int | None, int | None]:
    """Block, plane and LUT width that own a byte of a payload file; worked out from the README."""
    if not name.startswith(("planes.zarr/", "luts.zarr/")) or name.endswith("zarr.json"):
        return None, None, None
    group, array, *rest = name.split("/")
    layer, module, *width = array.split(".")
    kind: Module = "gate_up" if module == "gate_up" else "down"
    shape = GEOMETRY.shape(kind)
    if group == "planes.zarr":
        plane = position // plane_bytes(shape.rows, shape.cols)
        inside = plane < MAX_BITS
        key = BlockKey(int(layer), int(rest[1]), kind)
        return (key, plane, None) if inside else (None, None, None)
    expert = position // lut_bytes(shape.rows, int(width[0]))
    inside = expert < GEOMETRY.experts
    return (BlockKey(int(layer), expert, kind), None, int(width[0])) if inside else (None,) * 3


def test_intact_artifact_has_no_findings(built: Artifact) -> None:
    assert verify(built) == []
    assert verify(built.path, payload=False) == []


@pytest.mark.parametrize("count", [2, pytest.param(30, marks=MANY)])
def test_every_flipped_bit_is_found_and_named(copy: Path, count: int) -> None:
    """`count` random bits of each file, and one of its first and last bytes."""
    chance, flipped = random.Random(0), 0
    for name, path in files_of(copy).items():
        size = path.stat().st_size
        positions = {0, size - 1, *(chance.randrange(size) for _ in range(count))}
        for position in positions:
            bit = chance.randrange(8)
            flip(path, position, bit)
            findings = verify(copy)
            flip(path, position, bit)
            assert [f.file for f in findings] == [name], (name, position, findings)
            found = findings[0]
            assert (found.block, found.plane, found.bits) == place(name, position)
            flipped += 1
    assert verify(copy) == []
    assert flipped >= 20 * count


def test_finding_reads_as_one_line() -> None:
    plane = Finding("planes.zarr/1.down/c/0/0/0/0", "checksum differs", BlockKey(1, 0, "down"), 3)
    assert str(plane) == (
        "planes.zarr/1.down/c/0/0/0/0: layer 1 expert 0 down plane 3 checksum differs"
    )
    lut = Finding("luts.zarr/1.down.2/c/0/0/0", "checksum differs", BlockKey(1, 0, "down"), bits=2)
    assert "layer 1 expert 0 down LUT of 2 bits" in str(lut)


CUTS = [0, 0.3, 0.9, -1]


@pytest.mark.parametrize(
    "keep", [*CUTS, *(pytest.param(n / 20, marks=MANY) for n in range(1, 20) if n not in (6, 18))]
)
def test_truncated_files_are_found_and_refused(copy: Path, keep: float) -> None:
    for name, path in files_of(copy).items():
        data = path.read_bytes()
        length = len(data) - 1 if keep < 0 else int(len(data) * keep)
        os.truncate(path, length)
        assert [f.file for f in verify(copy)] == [name]
        with pytest.raises(StoreError):
            Artifact.open(copy)
        path.write_bytes(data)


def test_deleted_files_are_found_and_refused(copy: Path) -> None:
    for name, path in files_of(copy).items():
        data = path.read_bytes()
        path.unlink()
        assert [f.file for f in verify(copy)] == [name]
        with pytest.raises(StoreError, match=r"missing|not an artifact"):
            Artifact.open(copy)
        path.write_bytes(data)


def test_foreign_and_longer_files_are_found(copy: Path) -> None:
    plane = copy / "planes.zarr/1.down/c/0/0/0/0"
    size = plane.stat().st_size
    plane.write_bytes(plane.read_bytes() + b"\0")
    (copy / "planes.zarr/1.down/c/9").write_text("x")
    assert [(f.file, f.problem) for f in verify(copy)] == [
        ("planes.zarr/1.down/c/0/0/0/0", f"{size + 1} bytes, expected {size}"),
        ("planes.zarr/1.down/c/9", "not in the manifest"),
    ]


def test_swapped_planes_of_one_block_are_both_named(copy: Path) -> None:
    path = copy / "planes.zarr/2.gate_up/c/1/0/0/0"
    size = plane_bytes(40, 130)
    data = path.read_bytes()
    planes = [data[p * size : (p + 1) * size] for p in (2, 1, 0, 3)]
    path.write_bytes(b"".join(planes) + data[4 * size :])
    assert [(f.block, f.plane) for f in verify(copy)] == [
        (BlockKey(2, 1, "gate_up"), 0),
        (BlockKey(2, 1, "gate_up"), 2),
    ]


def test_swapped_files_of_equal_size_are_both_named(copy: Path, tmp_path: Path) -> None:
    first, second = (copy / f"planes.zarr/{layer}.down/c/2/0/0/0" for layer in (1, 2))
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    found = {(f.block, f.plane) for f in verify(copy)}
    assert found == {(BlockKey(n, 2, "down"), p) for n in (1, 2) for p in range(MAX_BITS)}


def test_checksum_depends_on_the_place() -> None:
    data = bytes(range(64))
    key = BlockKey(1, 2, "down")
    places = [(key, "plane0"), (key, "plane1"), (BlockKey(12, 2, "down"), "plane0")]
    assert len({crc(data, *place) for place in places}) == 3


def test_damage_is_found_when_it_is_read(copy: Path) -> None:
    artifact, key = Artifact.open(copy), BlockKey(1, 1, "gate_up")
    size = plane_bytes(40, 130)
    flip(copy / "planes.zarr/1.gate_up/c/1/0/0/0", 2 * size + 5, 3)
    out = np.empty(MAX_BITS * size, np.uint8)
    artifact.read_planes(key, 0, 2, out[: 2 * size])
    with pytest.raises(StoreError, match=r"damaged plane: .*layer 1 expert 1 gate_up plane 2"):
        artifact.read_planes(key, 0, MAX_BITS, out)
    artifact.read_planes(key, 0, MAX_BITS, out, check=False)
    flip(copy / "luts.zarr/1.gate_up.3/c/0/0/0", lut_bytes(40, 3), 0)
    artifact.lut(BlockKey(1, 0, "gate_up"), 3)
    with pytest.raises(StoreError, match=r"damaged LUT: .*layer 1 expert 1 gate_up 3 bits"):
        artifact.lut(key, 3)
    flip(copy / "moments.zarr/gate_up/c/0/0/0", 9, 1)
    with pytest.raises(StoreError, match=r"damaged: .*moments.zarr/gate_up/c/0/0/0"):
        artifact.table("moments")


def test_file_that_shrinks_under_a_reader_is_an_error(copy: Path) -> None:
    artifact = Artifact.open(copy)
    os.truncate(copy / "planes.zarr/1.down/c/0/0/0/0", 100)
    out = np.empty(plane_bytes(37, 20), np.uint8)
    with pytest.raises(StoreError, match="too short"):
        artifact.read_planes(BlockKey(1, 0, "down"), 0, 1, out)


def test_stage_made_from_replaced_input_is_found(copy: Path) -> None:
    artifact = Artifact.open(copy)
    artifact.write_table(
        "residuals", {"r2": np.ones(2)}, {}, {"alpha": 1.0}, artifact.digests("routing"), {}
    )
    assert verify(copy) == []
    write_routing(artifact, mass=0.25, overwrite=True)
    assert ["stage residuals was made from another routing" in f.problem for f in verify(copy)] == [
        True
    ]
    with pytest.raises(StaleStageError, match=r"residuals of .* was made from another routing"):
        artifact.table("residuals")


@pytest.mark.parametrize("folder", [False, True])
def test_symlinks_are_refused(copy: Path, tmp_path: Path, folder: bool) -> None:
    victim = copy / ("planes.zarr/1.down" if folder else "tokenizer.json")
    outside = tmp_path / "outside"
    shutil.move(victim, outside)
    victim.symlink_to(outside)
    with pytest.raises(StoreError, match="is a symlink"):
        Artifact.open(copy)
    assert "is a symlink" in verify(copy)[0].problem


def test_pipe_in_place_of_a_file_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    os.mkfifo(copy / "tokenizer.json")
    with pytest.raises(StoreError, match="not a plain file"):
        Artifact.open(copy)
