"""Launches of a captured step that begin while the last ones of another stream end.

What is launched on two streams is captured as two branches of a CUDA graph, and a launch where they
part or meet waits for those before it to end. Here it may begin as soon as all their blocks allow
it (programmatic dependent launch). So it has to wait itself for what they write, as everything does
that this package launches with `overlap`.

Needs `cuda-bindings`, and compute capability 9.0: before, launches wait as they do.
"""

from __future__ import annotations

from typing import Any

import torch
from cuda.bindings import driver  # type: ignore[import-not-found, import-untyped, unused-ignore]

_LEAST_CAPABILITY = 9


def _newest(name: str) -> Any:
    """A driver call with the data of edges: cuda-bindings 12 has it under a name of its own."""
    names = [f"{name}_v3", f"{name}_v2", name]
    return next(getattr(driver, each) for each in names if hasattr(driver, each))


def overlap_next(stream: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
    """In a capture, the next launch on a stream follows what another one has, and overlaps with it.

    Args:
        stream: It follows nothing else from here on, not even its own last launch.
        after: The stream itself: the launch follows what it followed already.
    """
    if torch.cuda.get_device_capability(stream.device)[0] < _LEAST_CAPABILITY:
        return
    if nodes := _last_of(after):
        flags = driver.CUstreamUpdateCaptureDependencies_flags
        update = _newest("cuStreamUpdateCaptureDependencies")
        replace = int(flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        _done(update(stream.cuda_stream, nodes, list(map(_edge, nodes)), len(nodes), replace))


def _last_of(stream: torch.cuda.Stream) -> list[Any]:
    """What the next launch on a stream would follow; nothing, if it is not captured."""
    status, *_, nodes, _, count = _done(_newest("cuStreamGetCaptureInfo")(stream.cuda_stream))
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return list(nodes[:count]) if status == active and count else []


def _edge(node: Any) -> Any:
    """From a node to the next: of a kernel, from where all its blocks allow it."""
    edge = driver.CUgraphEdgeData()
    (kind,) = _done(driver.cuGraphNodeGetType(node))
    if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        kinds = driver.CUgraphDependencyType
        edge.type = kinds.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        edge.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
    return edge


def _done(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a driver call gives, or an error that names its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status.name}")
    return tuple(values)
