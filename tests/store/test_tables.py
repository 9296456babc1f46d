"""Tables come back as they went in, are refused when stale, and never lie about being whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pw.errors import StaleStageError, StoreError
from pw.store import Artifact, describe, verify
from pw.store.files import WriteLock, replace_file
from pw.store.manifest import canonical_json, sha256_json
from pw.store.tables import file_records
from support.store import Sample, tree_hash, write_routing


def test_arrays_and_attributes_come_back(built: Artifact, sample: Sample) -> None:
    table = built.table("moments")
    assert table.arrays.keys() == sample.moments.keys()
    for name, array in sample.moments.items():
        assert table.arrays[name].dtype == array.dtype
        assert np.array_equal(table.arrays[name], array)
    assert table.attrs == {"unit": "x^2"}
    assert built.table("routing").attrs == {"prompts": ["a", "b"]}
    assert built.manifest.stages["moments"].report == {"skipped": None}


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 2), (2, 0, 4), (2, 3, 1, 2)])
def test_any_shape_and_type(copy: Path, dtype: str, shape: tuple[int, ...]) -> None:
    values = (np.arange(np.prod(shape)) % 2).reshape(shape).astype(dtype)
    artifact = Artifact.open(copy)
    artifact.write_table("residuals", {"values": values}, {}, {}, {}, {})
    stored = Artifact.open(copy).table("residuals").arrays["values"]
    assert stored.dtype == values.dtype
    assert stored.shape == values.shape
    assert np.array_equal(stored, values)
    assert verify(copy) == []


def test_nan_is_kept_in_arrays(copy: Path) -> None:
    values = np.array([1.0, np.nan, -np.inf], np.float32)
    artifact = Artifact.open(copy)
    artifact.write_table("residuals", {"values": values}, {}, {}, {}, {})
    stored = artifact.table("residuals").arrays["values"]
    assert np.array_equal(stored.view(np.int32), values.view(np.int32))


def test_absent_table_has_a_hint(built: Artifact) -> None:
    assert not built.has_table("residuals")
    with pytest.raises(StoreError, match="has no residuals") as refusal:
        built.table("residuals")
    assert refusal.value.hint
    with pytest.raises(ValueError, match="unknown table"):
        built.has_table("residual")


def test_same_settings_again_change_nothing(copy: Path) -> None:
    before = tree_hash(copy)
    artifact = Artifact.open(copy)
    assert artifact.table_done("routing", {"seed": 0}, artifact.digests("quantize"))
    write_routing(artifact, mass=0.75)
    assert tree_hash(copy) == before


def test_other_settings_or_inputs_are_refused_with_both_values(copy: Path) -> None:
    artifact, before = Artifact.open(copy), tree_hash(copy)
    with pytest.raises(StaleStageError, match=r"routing of .* seed was `0`, now `1`") as refusal:
        write_routing(artifact, settings={"seed": 1})
    assert "--overwrite" in refusal.value.hint
    with pytest.raises(StaleStageError, match=r"inputs.quantize was `[0-9a-f]{12}.*now `0000"):
        artifact.table_done("routing", {"seed": 0}, {"quantize": "0" * 64})
    assert tree_hash(copy) == before


def test_overwrite_replaces_the_table_and_gives_the_same_bytes_back(copy: Path) -> None:
    artifact, before = Artifact.open(copy), tree_hash(copy)
    write_routing(artifact, mass=0.25, overwrite=True, settings={"seed": 1})
    assert artifact.table("routing").arrays["mass"][0, 0] == 0.25
    assert Artifact.open(copy).manifest.stages["routing"].settings == {"seed": 1}
    assert verify(copy) == []
    write_routing(artifact, overwrite=True)
    assert tree_hash(copy) == before


def test_table_is_refused_while_another_writes(copy: Path) -> None:
    with WriteLock(copy), pytest.raises(StoreError, match="being written by"):
        write_routing(Artifact.open(copy), overwrite=True)


def test_writers_of_two_tables_keep_both(copy: Path) -> None:
    first, second = Artifact.open(copy), Artifact.open(copy)
    first.write_table("residuals", {"a": np.ones(1)}, {}, {}, {}, {})
    second.write_table("sensitivity", {"b": np.ones(1)}, {}, {}, {}, {})
    stages = Artifact.open(copy).manifest.stages
    assert stages.keys() == {"quantize", "moments", "routing", "residuals", "sensitivity"}
    assert verify(copy) == []


def test_arrays_of_objects_and_odd_names_are_bugs(copy: Path) -> None:
    artifact = Artifact.open(copy)
    for arrays in ({"x": np.array([None])}, {"x": np.array(["s"])}, {"../x": np.ones(1)}):
        with pytest.raises(ValueError, match="not a table array"):
            artifact.write_table("residuals", arrays, {}, {}, {}, {})
    assert not artifact.has_table("residuals")


def forge(folder: Path, name: str, **changes: Any) -> None:
    """Change the metadata of a table's array and sign everything anew, as an attacker would."""
    path = folder / name / "zarr.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    body = json.loads((folder / "manifest.json").read_bytes())
    group = folder / name.split("/")[0]
    for file, record in file_records(folder, group).items():
        body["files"][file] = {"bytes": record.bytes, "sha256": record.sha256}
    body.pop("digest")
    replace_file(folder / "manifest.json", canonical_json({**body, "digest": sha256_json(body)}))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [1 << 40, 1 << 10]},
        {"shape": [2, 4]},
        {"shape": [-1]},
        {"shape": "big"},
        {"data_type": "float64"},
        {"data_type": "variable_length_utf8", "fill_value": ""},
        {"data_type": "no such type"},
        {"fill_value": "x"},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 3]}}},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}]},
        {"codecs": [{"name": "no such codec"}]},
        {"node_type": "group"},
        {"zarr_format": 2},
    ],
)
@pytest.mark.filterwarnings("ignore")  # zarr may warn of what we refuse
def test_forged_metadata_is_refused_before_memory_is_taken(
    copy: Path, changes: dict[str, Any]
) -> None:
    forge(copy, "routing.zarr/mass", **changes)
    with pytest.raises(StoreError):
        Artifact.open(copy).table("routing")


def test_description_adds_up(built: Artifact) -> None:
    told = describe(built)
    size = sum(path.stat().st_size for path in built.path.rglob("*") if path.is_file())
    assert told["bytes"]["total"] == size
    assert sum(v for k, v in told["bytes"].items() if k != "total") == size
    # 12 blocks: gate_up 64 x 256 padded, down 64 x 128 padded; planes of 2048 and 1024 bytes
    assert told["widths"]["3"]["planes"] == 6 * 3 * (2048 + 1024)
    assert told["widths"]["3"]["luts"] == 6 * 2 * 64 * 8 * 2
    assert told["widths"]["3"]["weight_bits"] == 8 * told["widths"]["3"]["total"] / (
        6 * (40 * 130 + 37 * 20)
    )
    assert told["coverage"]["dead"] == {"experts": 1, "per_layer": [0, 1]}
    assert told["coverage"]["thin"] == {"experts": 1, "per_layer": [1, 0]}
    assert told["coverage"]["ok"] == {"experts": 4, "per_layer": [2, 2]}
    json.dumps(told, allow_nan=False)
