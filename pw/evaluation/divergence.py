"""How far a policy's next-token distribution is from the unquantized model's, token by token.

KL(dense || policy) over the whole vocabulary, in nats. The dense model runs first; its
log-probabilities wait in a temporary file, so that no two models have to be in memory at once.
They are kept as float16, which alone gives 2e-7 to 2e-6 nats a token (4,096 random logits of
standard deviation 5 to 1); 6 bits on the bundled model give 6e-4.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pw.errors import PwError

_ROWS = 64  # positions whose log-probabilities are in memory at a time
_SPARE = 1 << 30  # bytes of disk that stay free


class Reference:
    """Log-probabilities of the dense model for every scored token, in a file that is deleted.

    Args:
        chunks: Number of chunks.
        tokens: Scored tokens of each.
        folder: Where the file is put; None = the system's temporary folder.
    """

    def __init__(self, chunks: int, tokens: int, folder: Path | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pw-eval-", dir=folder))
        self._written = np.zeros((chunks, tokens), dtype=bool)
        self._values: NDArray[np.float16] | None = None  # [chunks, tokens, V], on disk

    def __enter__(self) -> Reference:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Delete the file."""
        self._values = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def keep(self, chunk: int, first: int, logits: Tensor) -> None:
        """Keep the dense model's logits [n, V] of scored tokens `first` and on.

        Raises:
            PwError: The disk has no room for all of them.
        """
        if self._values is None:
            self._values = self._allocate(logits.shape[1])
        for start in range(0, len(logits), _ROWS):
            part = logits[start : start + _ROWS].float().log_softmax(-1)
            rows = slice(first + start, first + start + len(part))
            self._values[chunk, rows] = part.to(torch.float16).cpu().numpy()
            self._written[chunk, rows] = True

    def divergence(self, chunk: int, first: int, logits: Tensor) -> NDArray[np.float64]:
        """KL [n] of logits [n, V] of scored tokens `first` and on from what was kept.

        Raises:
            ValueError: Nothing was kept for one of them.
        """
        if self._values is None or not self._written[chunk, first : first + len(logits)].all():
            raise ValueError(f"no reference for all tokens from {first} on of chunk {chunk}")
        found = []
        for start in range(0, len(logits), _ROWS):
            part = logits[start : start + _ROWS].float().log_softmax(-1)
            kept = self._values[chunk, first + start : first + start + len(part)]
            dense = torch.from_numpy(np.array(kept)).to(part.device).float().log_softmax(-1)
            found.append((dense.exp() * (dense - part)).sum(-1).double().cpu().numpy())
        return np.concatenate(found)

    def _allocate(self, vocabulary: int) -> NDArray[np.float16]:
        shape = (*self._written.shape, vocabulary)
        size, free = 2 * math.prod(shape), shutil.disk_usage(self._folder).free
        if size + _SPARE > free:
            raise PwError(
                f"the divergence from the dense model takes {size:,} bytes of disk, "
                f"{free:,} are free: `{self._folder.parent}`",
                "score fewer chunks (--max-chunks), name another folder (TMPDIR), or --no-kl",
            )
        return np.memmap(self._folder / "logprobs.f16", np.float16, "w+", shape=shape)
