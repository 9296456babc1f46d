"""How a memory budget is divided: dense weights, workspace and tables first, the rest is arena.

Everything is charged: what no line of this plan names may not be allocated in a step.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pw.blocks import MODULES, ExpertGeometry
from pw.config import format_bytes, format_exactly
from pw.errors import BudgetError
from pw.memory.arena import choose_page_bytes
from pw.memory.kv_layout import group_shapes, peak_pages, token_bytes
from pw.memory.layout import BlockLayout, choose_base_bits
from pw.models.geometry import KvGeometry
from pw_kernels.bitplane import padded_cols, padded_rows

SCORED_ROWS = 64  # rows of prompt logits that are made and normalised at a time

# Tensors of each kind alive at once, counted generously; tests measure real steps against them.
_HIDDEN_COPIES = 12  # [T, H] in a decoder layer
_MODULE_COPIES = 3  # [T, outputs] of a module's linear maps
_OBSERVED_COPIES = 3  # [T, H] and [T, I] shown to prompt statistics
_LOGIT_COPIES = 3  # [rows, V]: of the rows that sample, and of prompt tokens that are scored
_SAMPLING_COPIES = 16  # [V] for each row that is sampled at a time
_PLACE_COPIES = 4  # [layers, T] int64
_SMALL_THINGS = 1 << 16


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each class, and the shape of the arena."""

    budget: int
    dense: int
    experts_dense: int  # policy dense only
    workspace: int
    tables: int
    page_bytes: int
    num_pages: int
    layouts: tuple[BlockLayout, BlockLayout]
    max_model_len: int  # tokens of the longest sequence that fits alone at the least widths

    @property
    def arena(self) -> int:
        """Bytes of the arena."""
        return self.num_pages * self.page_bytes


@dataclass(frozen=True)
class Demand:
    """What the parts of an engine ask of the budget."""

    geometry: ExpertGeometry
    kv: KvGeometry
    kv_dtype: torch.dtype
    dense: int  # bytes of weights that are never quantized
    experts_dense: int  # bytes of unquantized experts; their planes are then not loaded
    workspace: int  # scratch of a step, whatever the length of its sequences
    # ... and with so many tokens in the longest sequence: steps, too, are short where it is
    context_scratch: Callable[[int], int]
    least_bits: NDArray[np.int64]  # [n] narrowest widths that the policy can reach, by block index
    most_bits: NDArray[np.int64]  # [n] widest
    stored_bits: tuple[int, int]  # least and most bits in the artifact
    max_model_len: int
    max_num_seqs: int
    chunk_tokens: int  # tokens of one step at most
    page_bytes: int | None = None
    table_bytes: int | None = None  # of LUTs that rows share, see `pw.memory.layout`


def plan_memory(budget: int, demand: Demand) -> MemoryPlan:
    """Divide a budget.

    Raises:
        BudgetError: One sequence of a single page beside the weights at their least widths does
            not fit.
    """
    layouts = block_layouts(demand)
    page = layouts[0].page_bytes
    paged = demand.experts_dense == 0
    least = _weight_pages(layouts, demand.least_bits) if paged else 0
    most = _weight_pages(layouts, demand.most_bits) if paged else 0
    fixed = demand.dense + demand.experts_dense
    weight_table = _weight_table_bytes(demand.geometry, layouts) if paged else 0

    def needed(length: int) -> int:
        """Bytes with which a sequence of this length fits alone at the least widths."""
        pages = least + _kv_pages(demand, page, length)
        tables = weight_table + _kv_table_bytes(demand, page, length)
        return fixed + _workspace(demand, length) + tables + pages * page

    if needed(2) > budget:
        raise BudgetError(
            f"memory budget of {format_exactly(budget)} is too small: "
            f"{format_exactly(needed(2))} are the least (dense {format_bytes(fixed)}, "
            f"workspace {format_bytes(_workspace(demand, 2))}, experts at their least widths "
            f"{format_bytes(least * page)}, tables and KV the rest)",
            "raise --memory-budget, or lower --max-num-batched-tokens and --max-num-seqs",
        )
    length = 2 + bisect.bisect_right(range(3, demand.max_model_len + 1), budget, key=needed)
    tables = weight_table + _kv_table_bytes(demand, page, length)
    useful = most + demand.max_num_seqs * _kv_pages(demand, page, length)
    workspace = _workspace(demand, length)
    num_pages = min(useful, (budget - fixed - workspace - tables) // page)
    return MemoryPlan(
        budget=budget,
        dense=demand.dense,
        experts_dense=demand.experts_dense,
        workspace=workspace,
        tables=tables,
        page_bytes=page,
        num_pages=num_pages,
        layouts=layouts,
        max_model_len=length,
    )


def sampled_rows(device: torch.device) -> int:
    """Rows of logits sampled at a time: one on a CPU, as many as pay for the launches on a GPU."""
    return 16 if device.type == "cuda" else 1


def workspace_bytes(
    geometry: ExpertGeometry,
    kv: KvGeometry,
    *,
    tokens: int,
    sequences: int,
    vocabulary: int,
    widest: int,
    itemsize: int,
    sampled: int = 1,
) -> int:
    """Scratch of one step but for what grows with the context; more than was ever measured.

    Args:
        geometry: Of the routed experts.
        kv: Keys and values of all layers.
        tokens: Tokens of a step at most.
        sequences: Sequences of a step at most.
        vocabulary: Columns of the logits.
        widest: Most outputs of the dense linear maps of one module.
        itemsize: Bytes of an activation.
        sampled: Sequences sampled at a time; see `sampled_rows`.
    """
    hidden, inner = geometry.gate_up.cols, geometry.down.cols
    attention = max(
        (layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in kv.layers), default=0
    )
    routed = padded_rows(geometry.gate_up.rows) + padded_cols(inner) + padded_rows(hidden)
    fp32 = geometry.top_k * routed + padded_cols(hidden) + _OBSERVED_COPIES * (hidden + inner)
    typed = _HIDDEN_COPIES * hidden + _MODULE_COPIES * (widest + attention)
    places = 8 * (_PLACE_COPIES * len(kv.stored) + 16)  # slots and positions
    logits = _LOGIT_COPIES * (sequences + min(tokens, SCORED_ROWS)) + _SAMPLING_COPIES * sampled
    decoded = geometry.gate_up.weights + geometry.down.weights
    per_token = typed * itemsize + fp32 * 4 + places
    return tokens * per_token + (logits * vocabulary + decoded) * 4 + _SMALL_THINGS


def block_layouts(demand: Demand) -> tuple[BlockLayout, BlockLayout]:
    """Page size and page layout of both modules."""
    return layouts_of(
        demand.geometry,
        demand.kv,
        demand.kv_dtype,
        demand.stored_bits,
        demand.page_bytes,
        demand.table_bytes,
    )


def layouts_of(
    geometry: ExpertGeometry,
    kv_geometry: KvGeometry,
    kv_dtype: torch.dtype,
    stored_bits: tuple[int, int],
    page_bytes: int | None = None,
    table_bytes: int | None = None,
) -> tuple[BlockLayout, BlockLayout]:
    """Page size (the one of least padding if None) and page layout of both modules."""
    shapes = [geometry.shape(module) for module in MODULES]
    low, high = stored_bits
    base = choose_base_bits(shapes, low, high, table_bytes)
    kv = [token_bytes(layer, kv_dtype) for layer in kv_geometry.stored]
    page = page_bytes
    if page is None:
        drafts = [BlockLayout(shape, low, high, base, 1, table_bytes) for shape in shapes]
        regions = [(size, 1) for draft in drafts for size in draft.regions()]
        page = choose_page_bytes(regions, kv)
    elif any(size > page for size in kv):
        raise BudgetError(f"a page of {page} bytes does not hold one token: {max(kv)} bytes")
    gate_up, down = (BlockLayout(shape, low, high, base, page, table_bytes) for shape in shapes)
    return gate_up, down


def _weight_pages(layouts: tuple[BlockLayout, BlockLayout], bits: NDArray[np.int64]) -> int:
    """Pages of all blocks at their widths [n]."""
    return sum(
        count * layout.resident_pages(width)
        for module, layout in enumerate(layouts)
        for width, count in enumerate(np.bincount(bits[module :: len(MODULES)]).tolist())
        if count
    )


def _kv_pages(demand: Demand, page: int, tokens: int) -> int:
    """Most pages that a sequence of this length holds at once."""
    return peak_pages(group_shapes(demand.kv, demand.kv_dtype, page), tokens, demand.chunk_tokens)


def _workspace(demand: Demand, tokens: int) -> int:
    return demand.workspace + demand.context_scratch(tokens)


def _kv_table_bytes(demand: Demand, page: int, tokens: int) -> int:
    """Block tables, a column for each page ever held, and the copy of them that a step reads."""
    groups = group_shapes(demand.kv, demand.kv_dtype, page)
    columns = sum(len(group.layers) * group.blocks(tokens) for group in groups)
    return 2 * demand.max_num_seqs * columns * 4


def _weight_table_bytes(geometry: ExpertGeometry, layouts: tuple[BlockLayout, BlockLayout]) -> int:
    pairs = len(geometry.layers) * geometry.experts
    per_block = [2 + lay.max_bits * lay.plane_pages + lay.max_lut_pages for lay in layouts]
    return pairs * sum(per_block) * 4
