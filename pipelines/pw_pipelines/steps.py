"""The layers of a reading that are done, and memory given back between them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from pw.models.dense import ExpertObserver
from pw_pipelines.savepoint import Savepoint


def trim() -> None:
    """Give freed memory back to the system, where the C library can.

    Tensors of some megabytes come and go by the thousand and leave holes; layer upon layer they
    add up to gigabytes that are nobody's.
    """
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)


class Steps:
    """Counts the layers that are done; with a savepoint, goes on from it and saves after each."""

    def __init__(self, savepoint: Savepoint | None, observers: Sequence[ExpertObserver]) -> None:
        different = {id(observer): observer for observer in observers}
        self._observers = list(different.values())
        self._savepoint, self._count = savepoint, 0
        self._done, tensors = (0, {}) if savepoint is None else savepoint.open()
        for name, tensor in self._measured().items() if self._done else ():
            tensor.copy_(tensors[name])

    def skip(self) -> bool:
        """Whether the next step is done already; counts it if so."""
        if self._count >= self._done:
            return False
        self._count += 1
        return True

    def finish(self) -> None:
        """Record a step."""
        trim()
        self._count += 1
        if self._savepoint is not None:
            self._savepoint.save(self._count, self._measured())

    def _measured(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": tensor
            for index, observer in enumerate(self._observers)
            for name, tensor in observer.state().items()
        }
