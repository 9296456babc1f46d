"""A manifest is input from a stranger: it is right, or it is refused in one line."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pw.errors import StoreError
from pw.store import Artifact, verify
from pw.store.files import replace_file
from pw.store.manifest import canonical_json, differences, plain, sha256_json, to_bytes
from pw.store.manifest_reader import from_bytes

HERE = Path("manifest.json")


def sign(body: dict[str, Any]) -> bytes:
    """A manifest whose own digest is right, as an attacker would make it."""
    body.pop("digest", None)
    return canonical_json({**body, "digest": sha256_json(body)})


@pytest.fixture
def body(built: Artifact) -> dict[str, Any]:
    return dict(json.loads((built.path / "manifest.json").read_bytes()))


def test_reading_and_writing_are_inverse(built: Artifact) -> None:
    data = (built.path / "manifest.json").read_bytes()
    assert to_bytes(from_bytes(data, HERE)) == data


def test_newer_format_is_refused_first(body: dict[str, Any], copy: Path) -> None:
    newer = {"format_version": 2, "something": "else"}
    replace_file(copy / "manifest.json", sign(newer))
    with pytest.raises(StoreError, match=r"newer format: .* version 2, .* up to 1") as refusal:
        Artifact.open(copy)
    assert "upgrade" in refusal.value.hint
    assert "newer format" in verify(copy)[0].problem


def test_other_layout_is_refused(body: dict[str, Any]) -> None:
    body["layout"] = "tile16x64"
    with pytest.raises(StoreError, match=r"another plane layout: .*`tile16x64`"):
        from_bytes(sign(body), HERE)


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of the field at a dotted path."""

    def change(body: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for name in parents:
            body = body[name]
        body[last] = value

    return change


HOSTILE = [
    put("extra", 1),
    put("format_version", True),
    put("format_version", 0),
    put("format_version", "1"),
    put("lut_dtype", "float32"),
    put("min_bits", 1),
    put("min_bits", 5),
    put("max_bits", 9),
    put("max_bits", 4.0),
    put("max_bits", 1 << 70),
    put("geometry", []),
    put("geometry/experts", 1 << 40),
    put("geometry/experts", -1),
    put("geometry/top_k", 4),
    put("geometry/layers", []),
    put("geometry/layers", [2, 1]),
    put("geometry/layers", [1, 1]),
    put("geometry/layers", [-1]),
    put("geometry/layers", list(range(5000))),
    put("geometry/layers", "12"),
    put("geometry/gate_up/rows", 0),
    put("geometry/gate_up/cols", 1 << 62),
    put("geometry/gate_up/depth", 1),
    put("model/name", 3),
    put("model/name", "x" * 5000),
    put("model/files", {"a": "zz"}),
    put("files", {"../evil": {"bytes": 1, "sha256": "0" * 64}}),
    put("files", {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}),
    put("files", {"a//b": {"bytes": 1, "sha256": "0" * 64}}),
    put("files", {"a": {"bytes": -1, "sha256": "0" * 64}}),
    put("files", {"a": {"bytes": 1, "sha256": "0" * 63}}),
    put("files", {"a": {"bytes": 1, "sha256": "F" * 64}}),
    put("blocks/9.down", {}),
    put("blocks/1.down/planes", "00"),
    put("blocks/1.down/planes", "x" * 96),
    put("blocks/1.down/luts", {}),
    put("stages/quantize/settings", 7),
    put("stages/quantize/outputs", {"x": 7}),
    put("stages", {"../x": {}}),
]


@pytest.mark.parametrize("change", HOSTILE)
def test_hostile_manifest_is_refused_in_one_line(
    body: dict[str, Any], change: Callable[[dict[str, Any]], None]
) -> None:
    change(body)
    with pytest.raises(StoreError) as refusal:
        from_bytes(sign(body), HERE)
    assert "\n" not in refusal.value.message
    assert "manifest.json" in refusal.value.message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"format_version": 1}',
        b'{"format_version": 1, "a": NaN}',
        b'{"format_version": 1' + b"0" * 5000 + b"}",
        b'{"format_version": 1, "format_version": 1}',
        b'{"format_version": 1, "x": "\\ud800"}',
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="manifest"):
        from_bytes(data, HERE)


def test_random_damage_never_passes(built: Artifact) -> None:
    data = (built.path / "manifest.json").read_bytes()
    chance = random.Random(0)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(data))] = chance.randrange(256)
        if damaged != data:
            with pytest.raises(StoreError):
                from_bytes(bytes(damaged), HERE)


def test_signed_manifest_that_lacks_blocks_or_files_is_refused(
    body: dict[str, Any], copy: Path
) -> None:
    del body["blocks"]["2.down"]
    replace_file(copy / "manifest.json", sign(body))
    with pytest.raises(StoreError, match="no checksums of layer 2 down"):
        Artifact.open(copy)
    del body["files"]["dense.safetensors"]
    replace_file(copy / "manifest.json", sign(body))
    with pytest.raises(StoreError, match=r"no record of `dense.safetensors`"):
        Artifact.open(copy)


def test_signed_sizes_are_held_against_the_files(body: dict[str, Any], copy: Path) -> None:
    body["geometry"]["gate_up"]["rows"] = 1 << 20
    replace_file(copy / "manifest.json", sign(body))
    with pytest.raises(StoreError, match="wrong size"):
        Artifact.open(copy)


def test_huge_manifest_is_refused_unread(copy: Path) -> None:
    with open(copy / "manifest.json", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match="too large"):
        Artifact.open(copy)


def test_differences_name_every_field() -> None:
    old = {"a": 1, "b": {"c": [1], "d": 2}, "e": None}
    new = {"a": 1, "b": {"c": [2], "f": 3}, "e": None}
    assert differences(old, new) == [("b.c", [1], [2]), ("b.d", 2, None), ("b.f", None, 3)]


def test_plain_refuses_what_json_cannot_hold() -> None:
    assert plain({"x": (1, float("inf")), "p": Path("a")}) == {"x": [1, None], "p": "a"}
    with pytest.raises(TypeError, match="set"):
        plain({"x": {1}})
