"""Planes and LUTs on disk: zarr shards written whole and read with one `preadv`. Knows no stages.

Axes: E experts, B planes, N rows (padded to tiles), b width. zarr makes the metadata; the payload
bypasses it, because a shard is nothing but its chunks and a trailer, and zarr takes a millisecond
per chunk where the disk takes microseconds.

    planes.zarr/<layer>.<module>/c/<expert>/0/0/0   plane 0 | ... | plane B-1 | trailer
    luts.zarr/<layer>.<module>.<b>/c/0/0/0          LUT of expert 0 | ... | expert E-1 | trailer
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pw.blocks import MODULES, BlockKey, ExpertGeometry, Module
from pw.store.files import fsync_file, write_file
from pw.store.manifest import BlocksKey, BlockSums, Manifest, blocks_name
from pw_kernels.bitplane import TILE_WORDS, lut_bytes, padded_rows, plane_bytes, tile_count

PLANES = "planes.zarr"
LUTS = "luts.zarr"

_WRITERS = 8  # threads that overlap the waits of fsync


def crc(data: Any, key: BlockKey, part: str) -> int:
    """CRC-32C of `data` (a C-contiguous array or bytes), seeded with the place it belongs to.

    Two chunks of equal size that change places are thereby found out.
    """
    place = f"{key.layer}.{key.module}.{key.expert}.{part}".encode()
    return int(google_crc32c.extend(google_crc32c.value(place), data))


def plane_part(plane: int) -> str:
    """Name of a plane in its checksum key."""
    return f"plane{plane}"


def lut_part(bits: int) -> str:
    """Name of a LUT in its checksum key."""
    return f"lut{bits}"


def shard_trailer(count: int, chunk_bytes: int) -> bytes:
    """Index of a zarr shard of `count` chunks in order: (offset, bytes) pairs and a CRC-32C."""
    pairs = ((i * chunk_bytes, chunk_bytes) for i in range(count))
    index = struct.pack(f"<{2 * count}Q", *(value for pair in pairs for value in pair))
    return index + struct.pack("<I", google_crc32c.value(index))


@dataclass(frozen=True)
class Shard:
    """A file of `count` equal chunks with a trailer.

    Attributes:
        name: Path relative to the artifact.
        chunks: For each chunk its block, and its plane (planes) or width (LUTs).
    """

    name: str
    chunk_bytes: int
    chunks: tuple[tuple[BlockKey, int], ...]

    @property
    def file_bytes(self) -> int:
        """Exact size of the file."""
        return len(self.chunks) * (self.chunk_bytes + 16) + 4


class PayloadLayout:
    """Names and sizes of all payload files of an artifact."""

    def __init__(self, manifest: Manifest) -> None:
        self.geometry: ExpertGeometry = manifest.geometry
        self.widths = manifest.widths
        self.planes = manifest.max_bits
        self.lut_dtype: torch.dtype = getattr(torch, manifest.lut_dtype)
        self.plane_bytes: dict[Module, int] = {}
        self.lut_bytes: dict[tuple[Module, int], int] = {}
        for module in MODULES:
            shape = self.geometry.shape(module)
            self.plane_bytes[module] = plane_bytes(shape.rows, shape.cols)
            for bits in self.widths:
                self.lut_bytes[module, bits] = lut_bytes(shape.rows, bits)

    def blocks(self) -> list[BlocksKey]:
        """Every (layer, module) in order."""
        return [(layer, module) for layer in self.geometry.layers for module in MODULES]

    def plane_shard(self, layer: int, module: Module, expert: int) -> Shard:
        """The file of all planes of one block."""
        key = BlockKey(layer, expert, module)
        return Shard(
            f"{PLANES}/{blocks_name(layer, module)}/c/{expert}/0/0/0",
            self.plane_bytes[module],
            tuple((key, plane) for plane in range(self.planes)),
        )

    def lut_shard(self, layer: int, module: Module, bits: int) -> Shard:
        """The file of the LUTs of one width of all experts."""
        experts = range(self.geometry.experts)
        return Shard(
            f"{LUTS}/{blocks_name(layer, module)}.{bits}/c/0/0/0",
            self.lut_bytes[module, bits],
            tuple((BlockKey(layer, expert, module), bits) for expert in experts),
        )

    def shards(self, layer: int, module: Module) -> list[Shard]:
        """All payload files of one (layer, module)."""
        experts = range(self.geometry.experts)
        planes = [self.plane_shard(layer, module, expert) for expert in experts]
        return planes + [self.lut_shard(layer, module, bits) for bits in self.widths]

    def payload_bytes(self, module: Module) -> int:
        """Bytes of planes and LUTs of one (layer, module), trailers left out."""
        luts = sum(self.lut_bytes[module, bits] for bits in self.widths)
        return self.geometry.experts * (self.planes * self.plane_bytes[module] + luts)

    def metadata_names(self) -> set[str]:
        """Every `zarr.json` of the payload."""
        names = {f"{PLANES}/zarr.json", f"{LUTS}/zarr.json"}
        for layer, module in self.blocks():
            name = blocks_name(layer, module)
            names.add(f"{PLANES}/{name}/zarr.json")
            names.update(f"{LUTS}/{name}.{bits}/zarr.json" for bits in self.widths)
        return names


def plane_words(layout: PayloadLayout, module: Module, planes: Tensor) -> NDArray[np.uint32]:
    """Planes [E, B, tiles, 128] int32 of one (layer, module) as words on the host, checked.

    Raises:
        ValueError: Wrong shape or dtype.
    """
    shape = layout.geometry.shape(module)
    tiles = tile_count(shape.rows, shape.cols)
    expected = (layout.geometry.experts, layout.planes, tiles, TILE_WORDS)
    if tuple(planes.shape) != expected or planes.dtype != torch.int32:
        raise ValueError(f"planes {tuple(planes.shape)} {planes.dtype}, need {expected} int32")
    return planes.cpu().contiguous().numpy().view(np.uint32)


def lut_words(
    layout: PayloadLayout, module: Module, luts: Mapping[int, Tensor]
) -> dict[int, NDArray[np.uint16]]:
    """LUTs [E, N or N padded, 2^b] by width as 16-bit words, rows padded with zeros.

    Raises:
        ValueError: Wrong widths, shapes or dtype.
    """
    rows, experts = layout.geometry.shape(module).rows, layout.geometry.experts
    if sorted(luts) != list(layout.widths):
        raise ValueError(f"LUT widths {sorted(luts)}, need {list(layout.widths)}")
    words = {}
    for bits in layout.widths:
        table = luts[bits]
        allowed = [(experts, n, 1 << bits) for n in (rows, padded_rows(rows))]
        if tuple(table.shape) not in allowed or table.dtype != layout.lut_dtype:
            found = f"{tuple(table.shape)} {table.dtype}"
            raise ValueError(f"LUT {found}, need {allowed[0]} {layout.lut_dtype}")
        padding = allowed[1][1] - table.shape[1]
        padded = functional.pad(table.cpu(), (0, 0, 0, padding)) if padding else table.cpu()
        words[bits] = padded.contiguous().view(torch.int16).numpy().view(np.uint16)
    return words


def write_groups(root: Path) -> None:
    """Make the two empty zarr groups, or find them as an earlier run left them."""
    for group in (PLANES, LUTS):
        zarr.open_group(str(root / group), mode="a", zarr_format=3)


def write_arrays(
    stage: Path,  # empty folder, mirrors the artifact
    layout: PayloadLayout,
    layer: int,
    module: Module,
    planes: NDArray[np.uint32],  # [E, B, tiles, 128]
    luts: Mapping[int, NDArray[np.uint16]],  # width -> [E, N padded, 2^b], kernel order
) -> BlockSums:
    """Write the arrays of one (layer, module) below `stage`; return their checksums."""
    name = blocks_name(layer, module)
    shape = layout.geometry.shape(module)
    tiles, experts = tile_count(shape.rows, shape.cols), layout.geometry.experts
    _describe_array(
        stage / PLANES / name, "uint32", (experts, layout.planes, tiles, TILE_WORDS), varying=2
    )
    jobs: list[tuple[Shard, NDArray[Any], Callable[[int], str]]] = [
        (layout.plane_shard(layer, module, expert), planes[expert], plane_part)
        for expert in range(experts)
    ]
    entry = str(layout.lut_dtype).removeprefix("torch.")  # zarr has no word for bfloat16
    for bits, table in luts.items():
        folder = stage / LUTS / f"{name}.{bits}"
        shape_of_table = (experts, padded_rows(shape.rows), 1 << bits)
        _describe_array(folder, "uint16", shape_of_table, varying=1, attributes={"dtype": entry})
        jobs.append((layout.lut_shard(layer, module, bits), table, lut_part))
    with ThreadPoolExecutor(_WRITERS) as pool:
        sums = list(pool.map(lambda job: _write_shard(stage, *job), jobs))
    return BlockSums(
        planes=np.array(sums[:experts], np.uint32),
        luts={b: np.array(s, np.uint32) for b, s in zip(luts, sums[experts:], strict=True)},
    )


def _write_shard(
    stage: Path, shard: Shard, chunks: NDArray[Any], part: Callable[[int], str]
) -> list[int]:
    path = stage / shard.name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, chunks, shard_trailer(len(shard.chunks), shard.chunk_bytes))
    return [crc(chunks[i], key, part(number)) for i, (key, number) in enumerate(shard.chunks)]


def _describe_array(
    folder: Path,
    dtype: str,
    shape: tuple[int, ...],
    varying: int,
    attributes: dict[str, Any] | None = None,
) -> None:
    """Let zarr write the metadata of an array.

    A chunk has extent 1 on the first `varying` axes, and a shard holds all chunks along the last
    of these: with more than one varying axis in a shard zarr would store them in Morton order.
    """
    zarr.create_array(
        str(folder),
        shape=shape,
        chunks=(1,) * varying + shape[varying:],
        shards=(1,) * (varying - 1) + shape[varying - 1 :],
        dtype=dtype,
        compressors=None,
        fill_value=0,
        attributes=attributes,
        config={"write_empty_chunks": True},
    )
    fsync_file(folder / "zarr.json")
