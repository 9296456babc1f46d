"""What goes into an artifact comes out of it, bit for bit, and zarr reads the same."""

from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import load_file

from pw.blocks import MODULES, BlockKey
from pw.errors import StoreError
from pw.store import Artifact, verify
from pw_kernels.bitplane import padded_rows, plane_bytes, unpack_planes
from support.store import GEOMETRY, MAX_BITS, MIN_BITS, WIDTHS, Sample, tree_hash


def read_planes(artifact: Artifact, key: BlockKey, first: int, count: int) -> np.ndarray:
    shape = GEOMETRY.shape(key.module)
    out = np.empty((count, plane_bytes(shape.rows, shape.cols)), np.uint8)
    artifact.read_planes(key, first, count, out.data.cast("B"))
    return out


def test_opened_artifact_states_what_was_written(built: Artifact, sample: Sample) -> None:
    artifact = Artifact.open(str(built.path))
    assert artifact.geometry == GEOMETRY
    assert (artifact.min_bits, artifact.max_bits) == (MIN_BITS, MAX_BITS)
    assert artifact.lut_dtype == torch.bfloat16
    assert artifact.manifest.model.architecture == "SampleMoe"
    assert artifact.manifest.stages["quantize"].report == {"blocks": GEOMETRY.blocks}
    assert (artifact.path / "config.json").read_bytes() == (
        sample.source / "config.json"
    ).read_bytes()


@pytest.mark.parametrize("bits", range(1, MAX_BITS + 1))
def test_first_planes_are_the_codes_at_that_width(
    built: Artifact, sample: Sample, bits: int
) -> None:
    for key in GEOMETRY.keys():
        shape = GEOMETRY.shape(key.module)
        words = torch.from_numpy(read_planes(built, key, 0, bits).view(np.int32))
        codes = unpack_planes(words.reshape(bits, -1, 128), shape.rows, shape.cols)
        expected = sample.codes[key.layer, key.module][key.expert] >> (MAX_BITS - bits)
        assert torch.equal(codes, expected), key


def test_any_run_of_planes_is_a_slice_of_all(built: Artifact) -> None:
    key = BlockKey(2, 1, "gate_up")
    whole = read_planes(built, key, 0, MAX_BITS)
    for first in range(MAX_BITS):
        for count in range(1, MAX_BITS - first + 1):
            part = read_planes(built, key, first, count)
            assert np.array_equal(part, whole[first : first + count])


def test_luts_come_back_padded_with_zero_rows(built: Artifact, sample: Sample) -> None:
    for key in GEOMETRY.keys():
        rows = GEOMETRY.shape(key.module).rows
        for bits in WIDTHS:
            lut = built.lut(key, bits)
            assert lut.shape == (padded_rows(rows), 1 << bits)
            assert lut.dtype == torch.bfloat16
            expected = sample.luts[key.layer, key.module][bits][key.expert]
            assert torch.equal(lut[:rows], expected)
            assert not lut[rows:].any()


def test_dense_tensors_are_byte_equal(built: Artifact, sample: Sample) -> None:
    stored = load_file(built.dense_file)
    assert stored.keys() == sample.dense.keys()
    for name, tensor in sample.dense.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name], tensor)


def test_zarr_reads_the_payload_that_bypassed_it(built: Artifact, sample: Sample) -> None:
    for layer in GEOMETRY.layers:
        for module in MODULES:
            array = zarr.open_array(built.path / f"planes.zarr/{layer}.{module}", mode="r")
            planes = np.asarray(array[:])
            for expert in range(GEOMETRY.experts):
                own = read_planes(built, BlockKey(layer, expert, module), 0, MAX_BITS)
                assert np.array_equal(planes[expert].view(np.uint8).reshape(own.shape), own)
            for bits in WIDTHS:
                array = zarr.open_array(built.path / f"luts.zarr/{layer}.{module}.{bits}", mode="r")
                assert array.attrs["dtype"] == "bfloat16"
                rows = GEOMETRY.shape(module).rows
                expected = sample.luts[layer, module][bits].view(torch.uint16).numpy()
                assert np.array_equal(array[:, :rows], expected)


def test_writing_twice_gives_the_same_bytes(
    built: Artifact, sample: Sample, tmp_path: Path
) -> None:
    again = sample.build(tmp_path / "again.pw")
    assert tree_hash(again.path) == tree_hash(built.path)
    assert again.artifact_hash == built.artifact_hash
    assert verify(again) == []
    assert [path.name for path in tmp_path.iterdir()] == ["again.pw"]


def test_reads_that_make_no_sense_are_bugs(built: Artifact) -> None:
    key = BlockKey(1, 0, "down")
    out = np.empty(plane_bytes(37, 20), np.uint8)
    for first, count in ((-1, 1), (0, 0), (MAX_BITS, 1), (0, MAX_BITS + 1)):
        with pytest.raises(ValueError, match="planes"):
            built.read_planes(key, first, count, out)
    for absent in (BlockKey(0, 0, "down"), BlockKey(1, 3, "down"), BlockKey(1, -1, "down")):
        with pytest.raises(ValueError, match="no such block"):
            built.read_planes(absent, 0, 1, out)
    with pytest.raises(ValueError, match="out has"):
        built.read_planes(key, 0, 2, out)
    with pytest.raises(ValueError, match="no LUT of 8 bits"):
        built.read_lut(key, 8, out)


def test_writer_refuses_arrays_of_another_shape(sample: Sample, tmp_path: Path) -> None:
    with sample.open(tmp_path / "x.pw") as writer:
        planes = torch.zeros((3, MAX_BITS, 4, 128), dtype=torch.int32)
        luts = sample.luts[1, "gate_up"]
        for wrong in (planes[:2], planes[:, :3], planes[:, :, :3], planes.long()):
            with pytest.raises(ValueError, match="planes"):
                writer.write_blocks(1, "gate_up", wrong, luts)
        with pytest.raises(ValueError, match="widths"):
            writer.write_blocks(1, "gate_up", planes, {2: luts[2]})
        with pytest.raises(ValueError, match="LUT"):
            writer.write_blocks(1, "gate_up", planes, {**luts, 3: luts[3].half()})
        with pytest.raises(ValueError, match="LUT"):
            writer.write_blocks(1, "gate_up", planes, {**luts, 3: luts[3][:, :39]})
        assert not writer.done(1, "gate_up")


def test_publish_refuses_an_incomplete_artifact(sample: Sample, tmp_path: Path) -> None:
    with sample.open(tmp_path / "x.pw") as writer:
        sample.write_blocks(writer, 1, "gate_up")
        with pytest.raises(StoreError, match=r"expected blocks of 4 .* found 1; .* layer 1 down"):
            writer.publish()
    with sample.open(tmp_path / "x.pw") as writer:
        for layer, module in sample.codes:
            sample.write_blocks(writer, layer, module)
        with pytest.raises(StoreError, match="no dense weights"):
            writer.publish()
    with pytest.raises(StoreError, match="still being built") as refusal:
        Artifact.open(tmp_path / "x.pw")
    assert "resumes" in refusal.value.hint
