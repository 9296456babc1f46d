"""One device allocation cut into equal pages, and the choice of the page size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

MIN_PAGE_BYTES = 4096
MAX_PAGE_BYTES = 1 << 21
STAGING_BYTES = 4 << 20  # on a GPU: of the buffer through which `Arena.write` goes
MAX_PAGE_TOKENS = 64  # of the widest layer: a sequence leaves half a page of each layer empty
_TOLERATED_PADDING = 0.02  # of the bytes stored: larger pages are cheaper to keep books on


class Arena:
    """The pages themselves.

    Attributes:
        pages: [P, page_bytes] uint8, the only allocation that planes, LUTs and KV live in.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        if page_bytes < MIN_PAGE_BYTES or page_bytes & (page_bytes - 1):
            raise ValueError(
                f"page_bytes must be a power of two from {MIN_PAGE_BYTES}: {page_bytes}"
            )
        self.page_bytes = page_bytes
        if device.type == "cpu":
            # The operating system gives zeroed memory when it is first touched: a roomy budget
            # costs what is used of it.
            self.pages = torch.from_numpy(np.zeros((num_pages, page_bytes), dtype=np.uint8))
            self._staging = None
        else:
            self.pages = torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)
            size = (max(1, STAGING_BYTES // page_bytes), page_bytes)
            self._staging = torch.empty(size, dtype=torch.uint8, device=device)

    @property
    def num_pages(self) -> int:
        """P."""
        return self.pages.shape[0]

    def as_dtype(self, dtype: torch.dtype) -> Tensor:
        """The arena seen as [P, page_bytes / itemsize] of another dtype; the same memory."""
        return self.pages.view(dtype)

    def write(self, page_ids: list[int], data: Tensor) -> None:
        """Fill pages, whole, in order on the current stream. Waits for nothing if `data` is pinned.

        Args:
            page_ids: Pages to fill, each once.
            data: [len(page_ids), page_bytes] uint8, on the host or the device.
        """
        self.write_all([(page_ids, data)])

    def write_all(self, parts: Sequence[tuple[list[int], Tensor]]) -> None:
        """As `write` of each part, with fewer launches: small ones go through the buffer together.

        No page may be in two of them.
        """
        if self._staging is None:
            for page_ids, part in parts:
                self.pages.index_copy_(0, torch.tensor(page_ids, dtype=torch.int64), part)
            return
        ids = [page for page_ids, _ in parts for page in page_ids]
        if not ids:
            return
        index, step = torch.tensor(ids, pin_memory=True), len(self._staging)
        done = filled = 0  # pages that lie in place, and in the buffer
        for _, part in parts:
            start = 0
            while start < len(part):
                count = min(len(part) - start, step - filled)
                staged = self._staging[filled : filled + count]
                staged.copy_(part[start : start + count], non_blocking=True)
                start, filled = start + count, filled + count
                if filled == step or done + filled == len(ids):
                    self._put(index[done : done + filled])
                    done, filled = done + filled, 0

    def _put(self, page_ids: Tensor) -> None:
        """Bring what the buffer holds into its pages [n] int64, pinned."""
        assert self._staging is not None
        index = page_ids.to(self.pages.device, non_blocking=True)
        staged = self._staging[: len(page_ids)].view(torch.int64)
        self.as_dtype(torch.int64).index_copy_(0, index, staged)


def pages_for(num_bytes: int, page_bytes: int) -> int:
    """Whole pages that hold `num_bytes`."""
    return -(-num_bytes // page_bytes)


def choose_page_bytes(regions: Iterable[tuple[int, int]], kv_token_bytes: Iterable[int]) -> int:
    """The largest page size whose padding is within 2 % of the stored bytes of the least.

    Unless a page would then hold many tokens, which short sequences would not fill.

    Args:
        regions: (bytes, how many) of the regions that fill whole pages: planes and LUTs.
        kv_token_bytes: Bytes that one token needs in each layer; a page holds at least one token.
    """
    regions = list(regions)
    kv = [size for size in kv_token_bytes if size > 0]
    stored = sum(size * count for size, count in regions) or 1
    candidates = []
    page, largest = MIN_PAGE_BYTES, MAX_PAGE_BYTES
    if kv:
        largest = min(largest, max(MIN_PAGE_BYTES, MAX_PAGE_TOKENS * max(kv)))
    while page <= largest:
        if all(size <= page for size in kv):
            padding = sum((pages_for(s, page) * page - s) * count for s, count in regions) / stored
            padding += max((1 - (page // size) * size / page for size in kv), default=0.0)
            candidates.append((page, padding))
        page *= 2
    if not candidates:
        raise ValueError(f"one token of one layer needs more than {MAX_PAGE_BYTES} bytes")
    least = min(padding for _, padding in candidates)
    return max(page for page, padding in candidates if padding <= least + _TOLERATED_PADDING)
