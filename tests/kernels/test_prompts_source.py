"""The source of the MoE for prompts, run on a CPU: decoders, rings of copies, images and sums.

As `test_cuda_source.py`, with `support/prompts_on_cpu.h` in place of the warpgroup matrix unit.
"""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

from pw_kernels import reference, testing
from pw_kernels.pages import WeightPages
from support.cuda_source import CudaSource

PAGE_BYTES = 4096
WIDTHS = [2, 3, 4, 5, 6, 7, 8]
TOKENS, TOP_K = 30, 3
ROOMS = {1: 227 << 10, 2: 113 << 10}  # of each of so many blocks: `cuda_prompts.shared_bytes`
SOURCE = CudaSource("prompts.cu", "prompts_on_cpu.h", [  # defined by the headers of support
    "barriers_ready", "barrier_expect", "copy_bulk", "copy_line", "lines_commit", "lines_wait",
    "meet", "unit_fence", "unit_commit", "unit_wait", "unit_multiply", "entry", "line", "exp2_near",
    "reciprocal",
], "prompts_on_cpu.cpp")  # fmt: skip

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Arguments(ctypes.Structure):
    """`Arguments` of prompts.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "x", "arena", "plane_pages", "lut_pages", "bias", "weights", "work", "slots", "out"
        )),
        ("slot_count", ctypes.c_int),
        ("groups", ctypes.c_int),
    )  # fmt: skip


def image(rows: torch.Tensor) -> torch.Tensor:
    """Slots [.., K] as the matrix unit reads them: [K / 64, .., 64], as prompts.cu describes it."""
    count, cols = rows.shape
    chunks = -(-cols // 64)
    padded = torch.nn.functional.pad(rows, (0, chunks * 64 - cols))
    # of 32 columns: c, q, pair -> q, c, pair
    units = padded.view(count, chunks, 2, 4, 4, 2).transpose(3, 4).reshape(count, chunks, 8, 8)
    out = torch.empty(chunks, count, 8, 8, dtype=rows.dtype)
    for n in range(count):
        for unit in range(8):
            out[:, n, unit ^ (n & 7)] = units[n, :, unit]
    return out.view(chunks, count, 64)


def inputs(
    rows: int, cols: int, slots_of_group: int
) -> tuple[torch.Tensor, WeightPages, dict[str, int], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arena, blocks of each width, constants, experts of the slots [S], work list, groups."""
    pages = 60 * len(WIDTHS) + 3 * rows * cols * len(WIDTHS) // PAGE_BYTES
    arena = testing.ScatteredArena(pages, PAGE_BYTES)
    placed = testing.random_blocks(arena, rows, cols, WIDTHS)
    constants = {
        "FLOAT16": 0, "KIND": 0, "BIAS": 1, "LOW": 2, "HIGH": 8,
        "SLOTS": slots_of_group, "ROOM": ROOMS[1], "BLOCKS": 1, "ROWS": rows, "COLS": cols,
        "ROW_TILES": -(-rows // 32), "COL_TILES": -(-cols // 128), "TOP_K": TOP_K,
        "PLANES": placed.plane_pages.shape[1], "PP": placed.plane_pages.shape[2],
        "LP": placed.lut_pages.shape[1], "PAGE_SHIFT": PAGE_BYTES.bit_length() - 1,
    }  # fmt: skip
    ids = torch.stack([torch.randperm(len(WIDTHS))[:TOP_K] for _ in range(TOKENS)]).flatten()
    groups, work = [], []
    for expert, width in enumerate(WIDTHS):
        for part in (ids == expert).nonzero().flatten().split(slots_of_group):
            places = torch.full((slots_of_group,), len(ids), dtype=torch.int32)
            places[: len(part)] = part
            work.append([len(groups), expert, width, int(placed.lut_offset[expert])])
            groups.append(places)
    work.append([0, -1, 0, 0])  # a group that is not needed
    slots = torch.stack([*groups, groups[0]])
    return arena.data, placed, constants, ids, torch.tensor(work, dtype=torch.int32), slots


@pytest.mark.parametrize(
    ("warpgroups", "slots_of_group", "blocks"), [(2, 32, 1), (3, 16, 1), (2, 32, 2)]
)
@pytest.mark.parametrize(
    ("gated", "shape"),
    [(True, (192, 264)), (True, (256, 384)), (False, (160, 392)), (False, (264, 128))],
)
def test_every_width(
    tmp_path: Path,
    gated: bool,
    shape: tuple[int, int],
    warpgroups: int,
    slots_of_group: int,
    blocks: int,
) -> None:
    rows, cols = shape
    arena, placed, constants, ids, work, slots = inputs(rows, cols, slots_of_group)
    count = len(ids)
    x = torch.randn(count, cols).bfloat16()
    padded = torch.cat([x, torch.full((1, cols), torch.nan).bfloat16()])  # unused: anything
    source = torch.stack([image(padded[group.long()]) for group in slots])
    width = rows // 2 if gated else rows
    chunks = -(-width // 64)
    weights, bias = torch.rand(count), torch.randn(len(WIDTHS), rows)
    if gated:
        out = torch.full((len(slots), chunks, slots.shape[1], 64), torch.nan).bfloat16()
    else:
        out = torch.full((count, rows), torch.nan)
    tensors = (
        source, arena, placed.plane_pages, placed.lut_pages, bias, weights, work, slots, out
    )  # fmt: skip
    arguments = Arguments(*(tensor.data_ptr() for tensor in tensors), count, len(slots))
    constants |= {"GATED": int(gated), "GROUPS_OF_WARPS": warpgroups}
    constants |= {"BLOCKS": blocks, "ROOM": ROOMS[blocks]}
    if gated and warpgroups == 2 and blocks == 1:
        constants["HIGH"] = 7  # groups of a wider block, which cannot be, are passed over
    library = SOURCE.compile(tmp_path, "experts(*(const Arguments*)all);", constants)
    row_blocks = -(-(2 * chunks if gated else -(-rows // 64)) // warpgroups)
    library.run(ctypes.byref(arguments), row_blocks, len(slots), 128 * warpgroups)
    run = torch.tensor([width <= constants["HIGH"] for width in WIDTHS])
    want = torch.empty(count, rows)
    for slot, expert in enumerate(ids.tolist()):
        matrix = reference.decode_block(arena, placed, expert, torch.bfloat16)
        want[slot] = matrix @ x[slot].float() + bias[expert]
    if gated:
        want = (silu(want[:, : rows // 2]) * want[:, rows // 2 :]).bfloat16()
        for number, group in enumerate(slots):
            used = group[group < count].long()
            got, expected = out[number, :, : len(used)], image(want[used])
            if work[number, 1] < 0 or work[number, 2] > constants["HIGH"]:
                assert got.isnan().all()
                continue
            assert (got - expected).float().norm() <= 2e-3 * expected.float().norm()
    else:
        want *= weights[:, None]
        assert out[~run[ids]].isnan().all()
        assert (out - want)[run[ids]].norm() <= 1e-6 * want.norm()


def test_images_of_the_inputs(tmp_path: Path) -> None:
    cols, slots_of_group = 200, 32
    _, _, constants, ids, _, slots = inputs(64, cols, slots_of_group)
    x = torch.randn(TOKENS, cols).bfloat16()
    chunks = -(-cols // 64)
    out = torch.full((len(slots), chunks, slots_of_group, 64), torch.nan).bfloat16()
    where = ", ".join(
        f"({kind}*){tensor.data_ptr()}ull"
        for kind, tensor in (("const uint4", x), ("const int", slots), ("uint4", out))
    )
    constants |= {"GATED": 1, "LOW": 1, "HIGH": 0, "GROUPS_OF_WARPS": 2}
    call = f"arrange({where}, {len(ids)}, {len(slots)});"
    library = SOURCE.compile(tmp_path, call, constants)
    library.run(None, -(-len(slots) * slots_of_group * 8 * chunks // 1024), 1, 256)
    for number, group in enumerate(slots):
        used = group[group < len(ids)].long()
        assert torch.equal(out[number, :, : len(used)], image(x[used // TOP_K]))
        assert out[number, :, len(used) :].isnan().all()
