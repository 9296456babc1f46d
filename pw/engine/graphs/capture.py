"""Two ways to run a step of fixed shape: call it, or replay it from a captured CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[], Tensor]
"""Reads and writes fixed addresses; gives its result, which the next run may overwrite."""
MakeGraph = Callable[[Step], Step]

_WARM_UPS = 2  # kernels are compiled and tuned, libraries take their workspaces


def eager(step: Step) -> Step:
    """Run a step by calling it."""
    return step


class Capture:
    """Captures steps; all of them share one pool of memory, largest first costs least of it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Capture a step. Its first runs, in here, must do no harm.

        Raises:
            RuntimeError: Something in it cannot be captured.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                step()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on: only what this one does is looked at.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = step()
        return _Replay(graph, step, result)


class _Replay:
    """Replays a graph, and keeps alive what the graph reads: whatever the captured step holds."""

    def __init__(self, graph: torch.cuda.CUDAGraph, step: Step, result: Tensor) -> None:
        self._graph, self._step, self._result = graph, step, result

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._result
