"""Files from a stranger, damaged at random: each is read as it is meant, or refused in one line.

The counts of docs/reliability.md run by `make reliability`; coverage-guided runs over the same
checks are in `coverage_guided.py`.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from pw.errors import ModelError, PwError
from pw.models.header import TensorEntry, read_header
from pw.models.shards import INDEX, ShardIndex
from pw.store import Artifact
from support.mutations import damaged_bytes, damaged_tree, dump
from support.patience import allowed
from support.store import Sample
from tests.fuzz.checks import check_header, check_index, check_manifest, signed

FEW, MANY = 1000, 30_000
COUNTS = [FEW, pytest.param(MANY, marks=pytest.mark.figures)]
SECONDS, MEMORY = 1.0, 256 << 20  # of one case


@pytest.fixture(scope="module")
def tensors() -> bytes:
    """A good file: several dtypes, a scalar, an empty tensor."""
    return save(
        {
            "model.norm.weight": torch.zeros(3, dtype=torch.bfloat16),
            "experts.0.down_proj": torch.zeros(2, 5),
            "experts.1.down_proj": torch.zeros(2, 5, dtype=torch.float16),
            "scalar": torch.zeros((), dtype=torch.int64),
            "empty": torch.zeros(0, 7, dtype=torch.uint8),
        },
        {"format": "pt"},
    )


def within_bounds(case: Callable[[bytes], object], inputs: Iterator[bytes]) -> None:
    """Run all cases; none takes a second of CPU, all together no memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in inputs:
        begin = time.process_time()
        case(data)
        assert time.process_time() - begin < allowed(SECONDS), data[:500]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MEMORY


def damaged_files(good: bytes, count: int) -> Iterator[bytes]:
    """The header changed as a tree or as bytes, its length too; data kept or resized."""
    chance = random.Random(count)
    (length,) = struct.unpack("<Q", good[:8])
    header, data = good[8 : 8 + length], good[8 + length :]
    tree = json.loads(header)
    for _ in range(count):
        kind = chance.randrange(4)
        if kind == 0:
            yield damaged_bytes(good, chance)
            continue
        new = dump(damaged_tree(tree, chance)) if kind < 3 else damaged_bytes(header, chance)
        said = len(new) + (chance.choice([-8, -1, 1, 8, 1 << 40]) if chance.random() < 0.1 else 0)
        rest = data[: chance.randrange(len(data))] if chance.random() < 0.1 else data
        yield struct.pack("<Q", max(0, said)) + new + rest


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_headers(tensors: bytes, tmp_path: Path, count: int) -> None:
    file = tmp_path / "model.safetensors"
    accepted = [0]

    def case(data: bytes) -> None:
        accepted[0] += check_header(file, data)

    within_bounds(case, damaged_files(tensors, count))
    assert 0 < accepted[0] < count / 2


HEADERS: dict[str, dict[str, Any]] = {
    "negative offsets": {"a": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}},
    "reversed offsets": {"a": {"dtype": "U8", "shape": [4], "data_offsets": [8, 4]}},
    "a hole": {"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}},
    "an overlap": {
        "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        "b": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
    },
    "a product that overflows": {
        "a": {"dtype": "F32", "shape": [1 << 32, 1 << 32, 0, 4], "data_offsets": [0, 8]}
    },
    "an unknown dtype that says too little": {"a": {"dtype": "F99", "shape": [8]}},
    "a shape that is a text": {"a": {"dtype": "U8", "shape": "8", "data_offsets": [0, 8]}},
    "a boolean size": {"a": {"dtype": "U8", "shape": [True, 8], "data_offsets": [0, 8]}},
    "a float size": {"a": {"dtype": "U8", "shape": [8.0], "data_offsets": [0, 8]}},
    "an infinite offset": {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, float("inf")]}},
    "three offsets": {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 4, 8]}},
    "bytes of nobody": {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}},
    "a name with a line in it": {"a\nb": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}},
    "metadata that is no text": {"__metadata__": {"format": 1}},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_headers_that_lie(header: dict[str, Any], tmp_path: Path) -> None:
    text, file = dump(header), tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ModelError, match=r"model\.safetensors") as refused:
        read_header(file)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(7),
        bytes(8),
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 4) + b"\xff\xfe{}",
        struct.pack("<Q", 200_000) + b'{"a":' + b"[" * 199_995,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 81)
        + b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":'
        + b"{}" * 12,
    ],
)
def test_what_is_no_header(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        read_header(file)


def test_a_million_tensors_are_read_in_time(tmp_path: Path) -> None:
    """Checks must not make large checkpoints slow: 10 us a tensor, on a core of its own."""
    count = 100_000
    item = '"%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    text = "{" + ",".join(item % (n, n, n + 1) for n in range(count)) + "}"
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(count))
    begin = time.process_time()
    entries = read_header(file)
    assert time.process_time() - begin < allowed(3)
    assert entries["99999"] == TensorEntry(
        file, "U8", (1,), 8 + len(text) + 99_999, 8 + len(text) + 100_000
    )


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_indexes(tensors: bytes, tmp_path: Path, count: int) -> None:
    (tmp_path / "a.safetensors").write_bytes(tensors)
    names = ShardIndex.open(tmp_path).keys()
    good = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    chance = random.Random(count)

    def inputs() -> Iterator[bytes]:
        for _ in range(count):
            tree = chance.random() < 0.7
            yield dump(damaged_tree(good, chance)) if tree else damaged_bytes(dump(good), chance)

    within_bounds(lambda data: check_index(tmp_path, data), inputs())
    (tmp_path / INDEX).write_bytes(dump(good))
    assert ShardIndex.open(tmp_path).keys() == names


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzed")
    return Sample(folder).build(folder / "sample.pw").path


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_manifests(artifact: Path, count: int) -> None:
    """Most are signed anew, as an attacker would; what is taken is opened against the files."""
    good = (artifact / "manifest.json").read_bytes()
    tree = json.loads(good)
    chance = random.Random(count)

    def inputs() -> Iterator[bytes]:
        for _ in range(count):
            if chance.random() < 0.8:
                try:
                    yield signed(damaged_tree(tree, chance))
                except (ValueError, TypeError):
                    continue  # not canonical: nobody can sign it
            else:
                yield damaged_bytes(good, chance)

    try:
        within_bounds(lambda data: check_manifest(artifact, data), inputs())
    finally:
        (artifact / "manifest.json").write_bytes(good)
    assert Artifact.open(artifact).geometry.experts == 3


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.figures)])
def test_damaged_zarr_metadata(artifact: Path, count: int) -> None:
    """Arrays come back as they were written, or are refused in one line."""
    chance = random.Random(count)
    files = sorted(artifact.rglob("zarr.json"))
    for _ in range(count):
        file = chance.choice(files)
        good = file.read_bytes()
        tree = dump(damaged_tree(json.loads(good), chance))
        file.write_bytes(tree if chance.random() < 0.5 else damaged_bytes(good, chance))
        changed, message = file.read_bytes() != good, ""
        try:
            opened = Artifact.open(artifact)
            for stage in ("moments", "routing"):
                opened.table(stage)
        except PwError as refused:
            message = refused.message
        finally:
            file.write_bytes(good)
        assert changed or not message
        assert "\n" not in message
