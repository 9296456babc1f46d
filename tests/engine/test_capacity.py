"""L5: what a bit and a token cost, computed from public shapes and measured in an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pw.blocks import ExpertGeometry
from pw.config import EngineConfig, PlannerConfig, PrecisionPolicy
from pw.engine import Engine
from pw.memory.budget import layouts_of
from pw.memory.kv_layout import group_shapes, peak_pages
from pw.models.architecture import Architecture
from pw.models.stand_in import write_folder

CONFIGS = Path(__file__).parents[2] / "pipelines" / "recipes" / "configs"
GIB = 1 << 30
# One plane of all routed experts in GiB, KV bytes of a token in bf16 (BACKEND section 1).
REAL = {
    "qwen1.5-moe-a2.7b": (1.45, 196_608),
    "mixtral-8x7b": (5.25, 131_072),
    "gemma-4-26b-a4b": (2.65, 225_280),
    "qwen3-30b-a3b": (3.375, 98_304),
}


def bytes_at(geometry: ExpertGeometry, bits: int, base: int) -> int:
    """Bytes of all blocks at a width, from their shapes alone: planes, resident LUTs, its LUT."""
    total = 0
    for shape in (geometry.gate_up, geometry.down):
        luts = sum(2 << width for width in range(2, base + 1))
        luts += (2 << bits) if bits > base else 0
        total += shape.rows * shape.cols * bits // 8 + shape.rows * luts
    return total * geometry.experts * len(geometry.layers)


@pytest.mark.parametrize("name", REAL)
def test_a_bit_and_a_token_cost_what_the_shapes_say(name: str, tmp_path: Path) -> None:
    write_folder(CONFIGS / f"{name}.json", tmp_path, {"vocab_size": 300})
    found = Architecture.load(tmp_path)
    geometry, kv = found.geometry, found.probe.kv
    plane, token = REAL[name]
    assert geometry.weights / 8 / GIB == pytest.approx(plane, rel=0.01)
    assert kv.bytes_per_token(torch.bfloat16) == token

    layouts = layouts_of(geometry, kv, torch.bfloat16, (2, 8), None)
    page, base = layouts[0].page_bytes, layouts[0].base_bits
    blocks = geometry.blocks // 2
    for bits in range(3, 9):
        pages = sum(lay.resident_pages(bits) - lay.resident_pages(bits - 1) for lay in layouts)
        freed = blocks * pages * page
        computed = bytes_at(geometry, bits, base) - bytes_at(geometry, bits - 1, base)
        # Planes of Gemma 4 end in the middle of a tile and of a page: 704 is 5.5 tiles of 128.
        assert freed == pytest.approx(computed, rel=0.12 if name.startswith("gemma") else 0.01)

    shapes = group_shapes(kv, torch.bfloat16, page)
    full = [shape for shape in shapes if shape.window is None]
    length = 8192
    bytes_full = sum(layer.width * 2 for shape in full for layer in shape.layers) * length
    assert peak_pages(full, length, 512) * page == pytest.approx(bytes_full, rel=0.01)
    if name.startswith("gemma"):  # 25 of 30 layers see 1,024 tokens
        everything = token * length
        assert peak_pages(shapes, length, 512) * page < 0.4 * everything


def open_real_blocks(folder: Path, policy: str) -> Engine:
    """Blocks and heads of Qwen1.5-MoE-A2.7B, few of them."""
    overrides: dict[str, Any] = {
        "num_hidden_layers": 1, "num_experts": 4, "vocab_size": 300,
        "shared_expert_intermediate_size": 64,
    }  # fmt: skip
    write_folder(CONFIGS / "qwen1.5-moe-a2.7b.json", folder, overrides)
    config = EngineConfig(
        memory_budget=1 << 30,
        policy=PrecisionPolicy.parse(policy),
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
        max_num_seqs=2,
        max_num_batched_tokens=64,
        planner=PlannerConfig(residual="off"),
    )
    return Engine.from_artifact(folder, config)


def test_measured_bytes_are_within_a_percent_of_computed_ones(tmp_path: Path) -> None:
    engine = open_real_blocks(tmp_path, "adaptive")
    parts, status = engine._parts, engine.status()
    assert parts.table is not None
    geometry, base = parts.skeleton.geometry, parts.memory.layouts[0].base_bits
    held = {8: status.bytes.planes + status.bytes.luts}
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 2048
    for bits in (7, 6, 5, 4, 3, 2):
        free = engine.status().pages_free
        for index in range(geometry.blocks):
            parts.table.reduce(index, bits)
        engine.check_integrity()
        now = engine.status()
        held[bits] = now.bytes.planes + now.bytes.luts
        # Pages given up are pages that KV can have at once.
        assert (now.pages_free - free) * now.page_bytes == held[bits + 1] - held[bits]
    for bits, measured in held.items():
        computed = bytes_at(geometry, bits, base)
        assert computed <= measured <= 1.02 * computed  # the padding that a page size may cost
        if bits > 2:
            freed = computed - bytes_at(geometry, bits - 1, base)
            assert measured - held[bits - 1] == pytest.approx(freed, rel=0.01)

    sequence = parts.kv.open()
    parts.kv.grow(sequence, 1024)
    kv = engine.status().bytes.kv
    parts.kv.close(sequence)
    assert kv == pytest.approx(1024 * 196_608 / 24, rel=0.01)
