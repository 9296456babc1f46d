"""The tables of docs/quality.md, one module each: `run(room)` measures, `tables(result)` prints."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pw.evaluation.lab.room import Room
from pw.evaluation.lab.studies import (
    ablation,
    bf16_equal,
    codebooks,
    dense_bits,
    engine_memory,
    equal_bytes,
    held_tables,
    memory,
    one_bit,
    pages,
    parts,
    prefix_reuse,
    shift,
    transitions,
)


class Study(NamedTuple):
    """How to measure and how to print."""

    run: Callable[[Room], dict[str, Any]]
    tables: Callable[[dict[str, Any]], str]


STUDIES = {
    "ablation": Study(ablation.run, ablation.tables),
    "bf16-equal": Study(bf16_equal.run, bf16_equal.tables),
    "codebooks": Study(codebooks.run, codebooks.tables),
    "dense-bits": Study(dense_bits.run, dense_bits.tables),
    "engine-memory": Study(engine_memory.run, engine_memory.tables),
    "equal-bytes": Study(equal_bytes.run, equal_bytes.tables),
    "held-tables": Study(held_tables.run, held_tables.tables),
    "memory": Study(memory.run, memory.tables),
    "one-bit": Study(one_bit.run, one_bit.tables),
    "pages": Study(pages.run, pages.tables),
    "parts": Study(parts.run, parts.tables),
    "prefix-reuse": Study(prefix_reuse.run, prefix_reuse.tables),
    "shift": Study(shift.run, shift.tables),
    "transitions": Study(transitions.run, transitions.tables),
}
