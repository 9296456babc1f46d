"""Coverage-guided fuzzing of what is read from files: `make fuzz`, or by hand

    python tests/fuzz/coverage_guided.py header|index|manifest CORPUS -runs=100000

The checks are those of the seeded tests; atheris looks for inputs that reach new lines. Inputs that
it found worth keeping lie in CORPUS, one that breaks a check in `crash-...`.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["pw.models.header", "pw.models.shards", "pw.store"]):
    from support.store import Sample
    from tests.fuzz.checks import check_header, check_index, check_manifest, signed


def target(kind: str, folder: Path) -> Callable[[bytes], object]:
    """The check of one kind of file."""
    if kind == "header":
        return lambda data: check_header(folder / "model.safetensors", data)
    if kind == "index":
        (folder / "a.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        return lambda data: check_index(folder, data)
    artifact = Sample(folder).build(folder / "sample.pw").path

    def manifest(data: bytes) -> None:
        try:
            check_manifest(artifact, signed(json.loads(data)))
        except (ValueError, AttributeError, TypeError, RecursionError):
            check_manifest(artifact, data)  # nobody can sign it

    return manifest


def seeds(kind: str, folder: Path) -> list[bytes]:
    """Good files to begin with."""
    if kind == "header":
        text = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"x":"y"}}'
        return [struct.pack("<Q", len(text)) + text + bytes(8)]
    if kind == "index":
        return [b'{"metadata":{},"weight_map":{"a":"a.safetensors"}}']
    return [(folder / "sample.pw" / "manifest.json").read_bytes()]


def main() -> None:
    """Fuzz until the runs are done or a check breaks."""
    kind, corpus = sys.argv[1], Path(sys.argv[2])
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check = target(kind, folder)
        for number, seed in enumerate(seeds(kind, folder)):
            (corpus / f"seed{number}").write_bytes(seed)
        atheris.Setup([sys.argv[0], str(corpus), *sys.argv[3:]], check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
