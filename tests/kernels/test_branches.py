"""Launches that overlap where the branches of a captured step part and meet."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pw_kernels import products, step
from pw_kernels.step import Norm

branches = pytest.importorskip("pw_kernels.branches", reason="needs cuda-bindings")

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"


class Driver:
    """Stands in for the CUDA driver: streams have names, nodes are kernels or not."""

    CUgraphEdgeData = SimpleNamespace
    CUgraphNodeType = branches.driver.CUgraphNodeType
    CUgraphDependencyType = branches.driver.CUgraphDependencyType
    CUstreamCaptureStatus = branches.driver.CUstreamCaptureStatus
    CUstreamUpdateCaptureDependencies_flags = (
        branches.driver.CUstreamUpdateCaptureDependencies_flags
    )
    CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = branches.driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC

    def __init__(self, followed: dict[str, list[str]]) -> None:
        self.followed = followed
        self.updates: list[tuple[str, dict[str, bool]]] = []

    def cuStreamGetCaptureInfo(self, stream: str) -> tuple[Any, ...]:
        nodes = self.followed.get(stream)
        active = self.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        none = self.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return 0, none if nodes is None else active, 7, "graph", nodes, [], len(nodes or [])

    def cuGraphNodeGetType(self, node: str) -> tuple[Any, ...]:
        kinds = self.CUgraphNodeType
        kernel, copy = kinds.CU_GRAPH_NODE_TYPE_KERNEL, kinds.CU_GRAPH_NODE_TYPE_MEMCPY
        return 0, kernel if node.startswith("kernel") else copy

    def cuStreamUpdateCaptureDependencies(
        self, stream: str, nodes: list[str], edges: list[Any], count: int, flags: int
    ) -> tuple[Any, ...]:
        assert flags == 1  # in place of what it followed
        assert len(nodes) == len(edges) == count
        overlaps = [bool(vars(edge)) for edge in edges]
        self.updates.append((stream, dict(zip(nodes, overlaps, strict=True))))
        return (0,)


def stream(name: str) -> Any:
    return SimpleNamespace(cuda_stream=name, device=torch.device("cuda", 0))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernels_are_overlapped_and_copies_waited_for(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver({"main": ["kernel a", "copy b"], "new": []})
    monkeypatch.setattr(branches, "driver", driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for after in ("main", "new", "not captured"):
        branches.overlap_next(stream("side"), stream(after))
    expected = [("side", {"kernel a": True, "copy b": False})]
    assert driver.updates == (expected if capability[0] == 9 else [])


def test_an_error_of_the_driver_is_named() -> None:
    broken = branches.driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    with pytest.raises(RuntimeError, match="STREAM_CAPTURE_INVALIDATED"):
        branches._done((broken,))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET=0 and a GPU")
@pytest.mark.parametrize("overlapping", [True, False])
def test_branches_of_a_graph(overlapping: bool) -> None:
    """Both read what the launch before wrote, the one behind reads both, each replay anew."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

    x, weights = random(4, 2048), [random(2048, 2048) for _ in range(4)]
    norm, side = Norm(random(2048).abs() + 1, 1e-6), torch.cuda.Stream()

    def follow(one: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        one.wait_stream(other)
        if overlapping:
            branches.overlap_next(one, other if one is side else one)

    def chain() -> Tensor:
        y, main = x, torch.cuda.current_stream()
        for weight in weights:
            y = products.product(y, weight, add=(x,))
            follow(side, main)
            with torch.cuda.stream(side):
                first = products.product(y, weight, norm=norm)
            second = products.product(y, weight)
            follow(main, side)
            y = step.join(y, first, second, None)
        return y

    expected = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(50):
        x.mul_(-1)
        graph.replay()
        assert torch.equal(found, chain())
    assert torch.equal(found, expected)
