"""What every page of the arena holds, small enough to be drawn: for the live page and `pw top`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pw.engine.start.build import Parts
from pw.memory.pool import FREE, IDLE

# Planes 0 to 7, LUTs, pages of raises under way, KV, free, free but with prefixes of late prompts.
KINDS = "01234567LMKFC"
_LUT, _MOVING, _KV, _FREE, _CACHED = range(8, 13)
CELLS = 4096  # a picture needs no more


def page_map(parts: Parts, cells: int = CELLS) -> dict[str, Any]:
    """A picture of the arena, JSON-ready.

    Args:
        parts: Of an engine between two steps.
        cells: Most letters of the picture; larger arenas show runs of pages by what most hold.

    Returns:
        `pages` and `page_bytes` of the arena; `counts`: kind -> pages, exact; `cells`: a letter of
        KINDS for each run of `pages_per_cell` pages, in the order of their addresses.
    """
    labels = _labels(parts)
    counts = np.bincount(labels, minlength=len(KINDS)).tolist()
    per_cell = max(1, -(-len(labels) // cells))
    shown = labels if per_cell == 1 else _majority(labels, per_cell)
    return {
        "pages": len(labels),
        "page_bytes": parts.arena.page_bytes,
        "pages_per_cell": per_cell,
        "counts": dict(zip(KINDS, counts, strict=True)),
        "cells": "".join(KINDS[kind] for kind in shown.tolist()),
    }


def _labels(parts: Parts) -> NDArray[np.uint8]:
    """[P] the kind of each page."""
    owner = parts.pool.owner
    labels = np.full(len(owner), _KV, dtype=np.uint8)
    labels[owner == FREE] = _FREE
    labels[owner == IDLE] = _CACHED
    if parts.table is not None:
        parts.table.label_pages(labels, lut=_LUT, moving=_MOVING)
    return labels


def _majority(labels: NDArray[np.uint8], per_cell: int) -> NDArray[np.int64]:
    """[cells] the kind that most pages of each run have, the lowest of equals."""
    cells = -(-len(labels) // per_cell)
    votes = np.zeros((cells, len(KINDS)), dtype=np.int64)
    np.add.at(votes, (np.arange(len(labels)) // per_cell, labels), 1)
    winners: NDArray[np.int64] = votes.argmax(axis=1)
    return winners
