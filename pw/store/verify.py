"""Checks every byte of an artifact and names what is wrong. Changes nothing.

Each byte belongs to exactly one check: planes and LUTs to their keyed CRC-32C, shard trailers to
the one value they can have, every other file to its SHA-256, the manifest to its own digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pw.blocks import BlockKey
from pw.errors import StoreError
from pw.store.artifact import Artifact, expected_sizes
from pw.store.files import open_regular, read_exact, sha256_file, tree_sizes
from pw.store.manifest import MANIFEST, BlockSums, Manifest
from pw.store.manifest_reader import load
from pw.store.planes import PLANES, PayloadLayout, Shard, crc, lut_part, plane_part, shard_trailer
from pw.store.tables import stale_inputs


@dataclass(frozen=True)
class Finding:
    """One fault of an artifact.

    Attributes:
        file: Path relative to the artifact.
        problem: What is wrong with it, in a few words.
        block: The block it belongs to, if any.
        plane: Which plane of the block, for a plane.
        bits: Which width, for a LUT.
    """

    file: str
    problem: str
    block: BlockKey | None = None
    plane: int | None = None
    bits: int | None = None

    def __str__(self) -> str:
        where = [f"{self.file}:"]
        if self.block is not None:
            where.append(str(self.block))
        if self.plane is not None:
            where.append(f"plane {self.plane}")
        if self.bits is not None:
            where.append(f"LUT of {self.bits} bits")
        return " ".join([*where, self.problem])


def verify(artifact: Artifact | str | Path, *, payload: bool = True) -> list[Finding]:
    """Find every damaged, missing or foreign byte of an artifact.

    Args:
        artifact: A folder, or an artifact opened earlier; the disk is read again either way.
        payload: Also read planes and LUTs. Without it only their sizes are checked, which suits a
            reader that checks each plane as it loads it.

    Returns:
        The faults in the order of their files; empty when there is none.
    """
    root = artifact.path if isinstance(artifact, Artifact) else Path(artifact)
    try:
        manifest = load(root / MANIFEST)
        expected = expected_sizes(manifest, root)
        found = tree_sizes(root)
    except StoreError as error:
        return [Finding(MANIFEST, error.message)]
    findings = [*_wrong_sizes(expected, found), *_stale_stages(manifest)]
    bad = {finding.file for finding in findings}
    for name, record in manifest.files.items():
        if name not in bad and sha256_file(root / name) != record.sha256:
            findings.append(Finding(name, "SHA-256 differs"))
    if payload:
        findings += _damaged_payload(root, manifest, bad)
    return sorted(findings, key=lambda f: (f.file, f.plane or 0))


def _wrong_sizes(expected: dict[str, int], found: dict[str, int]) -> Iterator[Finding]:
    for name, size in expected.items():
        if name not in found:
            yield Finding(name, "missing")
        elif found[name] != size:
            yield Finding(name, f"{found[name]} bytes, expected {size}")
    for name in sorted(found.keys() - expected.keys() - {MANIFEST}):
        yield Finding(name, "not in the manifest")


def _stale_stages(manifest: Manifest) -> Iterator[Finding]:
    for stage in manifest.stages:
        for name, old, new in stale_inputs(manifest, stage):
            problem = f"stage {stage} was made from another {name}: {old[:12]}, now {new[:12]}"
            yield Finding(MANIFEST, problem)


def _damaged_payload(root: Path, manifest: Manifest, skip: set[str]) -> Iterator[Finding]:
    layout = PayloadLayout(manifest)
    for layer, module in layout.blocks():
        sums = manifest.blocks[layer, module]
        for shard in layout.shards(layer, module):
            if shard.name not in skip:
                yield from _check_shard(root, shard, sums)


def _check_shard(root: Path, shard: Shard, sums: BlockSums) -> Iterator[Finding]:
    is_plane = shard.name.startswith(PLANES)
    path = root / shard.name
    chunk = np.empty(shard.chunk_bytes, np.uint8)
    trailer = bytearray(shard.file_bytes - len(shard.chunks) * shard.chunk_bytes)
    with open_regular(path) as descriptor:
        for i, (key, number) in enumerate(shard.chunks):
            read_exact(descriptor, chunk.data, i * shard.chunk_bytes, path)
            part = plane_part(number) if is_plane else lut_part(number)
            stored = sums.planes[key.expert, number] if is_plane else sums.luts[number][key.expert]
            if crc(chunk, key, part) != stored:
                place = {"plane": number} if is_plane else {"bits": number}
                yield Finding(shard.name, "checksum differs", key, **place)
        read_exact(descriptor, memoryview(trailer), len(shard.chunks) * shard.chunk_bytes, path)
    if trailer != shard_trailer(len(shard.chunks), shard.chunk_bytes):
        yield Finding(shard.name, "shard index differs")
