"""Kernels compiled before they are launched, beside one another. Needs no GPU and no compiler."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

nvrtc = pytest.importorskip(
    "pw_kernels.nvrtc", reason="needs cuda-bindings, as torch's CUDA builds"
)
cuda_routing = pytest.importorskip("pw_kernels.cuda_routing")


class Driver:
    """As much of the driver as a launch asks for; counts launches."""

    def __init__(self) -> None:
        self.launches = 0
        self.seen: list[tuple[str, int]] = []  # what was asked for in which context
        self._thread = threading.local()

    @property
    def context(self) -> int:
        return getattr(self._thread, "context", 0)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, 100 + device

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, self.context

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        self._thread.context = context
        return (0,)

    def cuModuleLoadData(self, code: bytes) -> tuple[int, bytes]:
        self.seen.append(("load", self.context))
        return 0, code

    def cuModuleGetFunction(self, library: bytes, name: bytes) -> tuple[int, bytes]:
        return 0, name

    def CUlaunchConfig(self) -> Any:
        return SimpleNamespace()

    def cuLaunchKernelEx(self, *_: object) -> tuple[int]:
        self.launches += 1
        self.seen.append(("launch", self.context))
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "driver", driver)
    monkeypatch.setattr(nvrtc.torch.cuda, "init", lambda: None)
    nvrtc._context.cache_clear()
    monkeypatch.setattr(nvrtc.torch.cuda, "get_device_capability", lambda _: (9, 0))
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(nvrtc.torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(nvrtc.os, "sched_getaffinity", lambda _: range(2), raising=False)
    yield driver
    nvrtc._context.cache_clear()


def make(*numbers: int) -> list[Any]:
    return [nvrtc.Kernel("routing.cu", "route", {"NUMBER": number}, 0) for number in numbers]


def test_a_rehearsal_compiles_side_by_side_and_launches_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    together, compiled = threading.Barrier(2), []

    def compile_source(source: str, defines: dict[str, int], capability: int) -> bytes:
        together.wait(timeout=20)  # two at a time, or it breaks
        compiled.append((source, defines["NUMBER"], capability))
        return b"code"

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    kernels = make(1, 2, 3, 4)
    with nvrtc.Rehearsal() as rehearsal:
        for kernel in [*kernels, *kernels]:
            kernel.launch((1,), 32, 0)
    assert rehearsal.compiled == 4
    assert rehearsal.folder == tmp_path / "pw_kernels"
    assert sorted(compiled) == [("routing.cu", number, 90) for number in (1, 2, 3, 4)]
    assert driver.launches == 0
    monkeypatch.setattr(nvrtc, "compile_source", None)
    for kernel in kernels:
        kernel.launch((1,), 32, 0)
    assert driver.launches == 4
    with nvrtc.Rehearsal() as rehearsal:  # what is kept is loaded, not compiled
        make(1)[0].launch((1,), 32, 0)
    assert rehearsal.compiled == 0


def test_lists_of_groups_are_empty_in_a_rehearsal(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's grouped kernel runs there, and would follow what memory held to any address."""
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: b"code")
    monkeypatch.setattr(cuda_routing, "kernel", lambda *_: make(8)[0])
    monkeypatch.setattr(torch, "empty", lambda *size, **how: torch.full(size, 1 << 20, **how))
    ids, weights = torch.tensor([[0, 2], [1, 2]]), torch.ones(2, 2)
    zeros = torch.zeros(3, dtype=torch.int32)
    plain = SimpleNamespace(experts=3, bits=zeros, lut_offset=zeros, possible_widths=(0, 0))
    with nvrtc.Rehearsal():
        routed = cuda_routing.route(ids, weights, (plain, plain), 16, 0, None)
    assert driver.launches == 0
    assert all((work == -1).all() for work in routed.work)


def test_what_does_not_compile_says_so_at_its_launch(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_source(*_: object) -> bytes:
        raise ValueError("routing.cu does not compile")

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    (kernel,) = make(5)
    with nvrtc.Rehearsal():
        kernel.launch((1,), 32, 0)
    with pytest.raises(ValueError, match="does not compile"):
        kernel.launch((1,), 32, 0)


def test_other_threads_launch_during_a_rehearsal(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: b"code")
    (kernel,) = make(6)
    with nvrtc.Rehearsal():
        other = threading.Thread(target=lambda: kernel.launch((1,), 32, 0))
        other.start()
        other.join()
    assert driver.launches == 1


def test_a_kernel_of_another_device_is_loaded_and_launched_in_its_context(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: b"code")
    one, other = (nvrtc.Kernel("routing.cu", "route", {"NUMBER": 7}, device) for device in (0, 1))
    driver.cuCtxSetCurrent(100)  # as torch leaves it
    with nvrtc.Rehearsal():
        other.launch((1,), 32, 0)
    for kernel in (other, one, other):
        kernel.launch((1,), 32, 0)
        assert driver.context == 100
    assert driver.seen == [
        ("load", 101), ("launch", 101), ("load", 100), ("launch", 100), ("launch", 101),
    ]  # fmt: skip
