"""Compile CUDA C++ at run time and launch it on torch's stream: NVRTC, no toolkit. Knows no kernel.

Needs `cuda-bindings`, which torch's CUDA builds depend on. A kernel is compiled for the device in
hand at its first launch, or beforehand and beside others in a `Rehearsal`; machine code is kept in
`$XDG_CACHE_HOME/pw_kernels` (`~/.cache/pw_kernels`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc  # type: ignore[import-not-found, import-untyped, unused-ignore]

from pw_kernels.sources import cuda_text

Define = int | str
_DEFAULT_SHARED_BYTES = 48 * 1024  # more must be asked for
_MOST_THREADS = 16  # that compile at a time
_thread = threading.local()


class Kernel:
    """One compiled `extern "C"` kernel on one device.

    Args:
        source: Name of a .cu file of this package.
        name: The kernel in it.
        defines: Macros, in any order.
        device: CUDA device index.
    """

    def __init__(self, source: str, name: str, defines: Mapping[str, Define], device: int) -> None:
        self._device, self._name = device, name
        major, minor = torch.cuda.get_device_capability(device)
        self._what = (source, defines, 10 * major + minor)
        self._overlaps = major >= 9
        self._shared = _DEFAULT_SHARED_BYTES
        self._function: Any = None
        self._loading = threading.Lock()

    @property
    def kept(self) -> bool:
        """Whether its machine code lies in the user's cache."""
        return _cache_path(*self._what).exists()

    def load(self) -> Any:
        """Compile it, if nobody has yet, and bring it onto the device; the driver's handle.

        Raises:
            ValueError: It does not compile; the message is the compiler's.
        """
        with self._loading:
            if self._function is None:
                code, name = machine_code(*self._what), self._name.encode()
                with _current(self._device):
                    self._library = _check(driver.cuModuleLoadData(code))
                    self._function = _check(driver.cuModuleGetFunction(self._library, name))
        return self._function

    def attribute(self, name: str) -> int:
        """A `CU_FUNC_ATTRIBUTE_` of the kernel, such as NUM_REGS or LOCAL_SIZE_BYTES."""
        what = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(_check(driver.cuFuncGetAttribute(what, self.load())))

    def launch(
        self,
        grid: Sequence[int],
        threads: int,
        shared_bytes: int,
        *arguments: Any,
        overlap: bool = False,
    ) -> None:
        """Launch on torch's current stream; in a `Rehearsal` of this thread, launch nothing.

        Args:
            grid: Blocks in x, y, and z if given.
            threads: Threads of a block.
            shared_bytes: Dynamic shared memory of a block.
            arguments: ctypes values in the kernel's order; structures are passed by value.
            overlap: Let it begin before the launch before it has ended (programmatic dependent
                launch), as soon as all blocks of that one allow it; the kernel itself waits for
                what it reads. Without effect before compute capability 9.0.
        """
        rehearsal = _rehearsal()
        if rehearsal is not None:
            rehearsal.note(self)
            return
        function = self.load() if self._function is None else self._function
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        if overlap and self._overlaps:
            config.attrs, config.numAttrs = [_overlap()], 1
        with _current(self._device):
            if shared_bytes > self._shared:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(driver.cuFuncSetAttribute(function, limit, shared_bytes))
                self._shared = shared_bytes
            _check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


class Rehearsal:
    """Finds out which kernels will be launched, and compiles them side by side.

    While it is entered, kernels that its thread launches do not run: each is handed to a pool of
    threads, which compile and load it. What such kernels would have written is whatever memory
    held, so lists that other kernels follow to addresses are made empty (`rehearsing`). Leaving it
    waits for all. One that does not compile says so when it is launched.

    Attributes:
        compiled: Kernels that were not in the user's cache.
        folder: That cache.
    """

    def __init__(self) -> None:
        self.compiled, self.folder = 0, cache_folder()
        self._noted: set[Kernel] = set()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._pool = ThreadPoolExecutor(min(_MOST_THREADS, cores or 1), "pw-nvrtc")

    def note(self, kernel: Kernel) -> None:
        """Have a kernel compiled that would be launched here."""
        if kernel not in self._noted:
            self._noted.add(kernel)
            self.compiled += not kernel.kept
            self._pool.submit(kernel.load)

    def __enter__(self) -> Rehearsal:
        _thread.rehearsal = self
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        _thread.rehearsal = None
        self._pool.shutdown(cancel_futures=error is not None)


def rehearsing() -> bool:
    """Whether kernels of this module that are launched now will not run."""
    return _rehearsal() is not None


def _rehearsal() -> Rehearsal | None:
    entered: Rehearsal | None = getattr(_thread, "rehearsal", None)
    return entered


@cache
def _overlap() -> Any:
    attribute = driver.CUlaunchAttribute()
    names = driver.CUlaunchAttributeID
    attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


@cache
def kernel(source: str, name: str, defines: tuple[tuple[str, Define], ...], device: int) -> Kernel:
    """The kernel with these macros, one object for all who ask."""
    return Kernel(source, name, dict(defines), device)


@cache
def device_attribute(name: str, device: int) -> int:
    """A `CU_DEVICE_ATTRIBUTE_` of a device."""
    what = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(_check(driver.cuDeviceGetAttribute(what, device)))


def index_of(device: torch.device) -> int:
    """Its CUDA device index: the current one where it names none."""
    return torch.cuda.current_device() if device.index is None else device.index


def reserved_shared_bytes(device: int) -> int:
    """Shared memory of each block that the driver keeps; dynamic shared memory begins after it."""
    return device_attribute("RESERVED_SHARED_MEMORY_PER_BLOCK", device)


def shared_bytes(device: int) -> int:
    """Shared memory that one block may have."""
    return device_attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", device)


def cache_folder() -> Path:
    """Where machine code is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pw_kernels"


def _cache_path(source: str, defines: Mapping[str, Define], capability: int) -> Path:
    what = (cuda_text(source), sorted(defines.items()), capability, _check(nvrtc.nvrtcVersion()))
    return cache_folder() / f"{hashlib.sha256(repr(what).encode()).hexdigest()}.cubin"


def machine_code(source: str, defines: Mapping[str, Define], capability: int) -> bytes:
    """As `compile_source`, from the user's cache where it was compiled before."""
    path = _cache_path(source, defines, capability)
    try:
        return path.read_bytes()
    except OSError:
        code = compile_source(source, defines, capability)
    with suppress(OSError):  # a cache that cannot be written costs time alone
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{threading.get_native_id()}")
        part.write_bytes(code)
        part.replace(path)
    return code


def compile_source(source: str, defines: Mapping[str, Define], capability: int) -> bytes:
    """Compile a .cu file of this package.

    Args:
        source: Its name.
        defines: Macros.
        capability: Compute capability times ten, such as 90.

    Returns:
        Machine code (a cubin).

    Raises:
        ValueError: It does not compile; the message is the compiler's.
    """
    program = _check(
        nvrtc.nvrtcCreateProgram(cuda_text(source).encode(), source.encode(), 0, [], [])
    )
    own = "a" if capability == 90 else ""  # with the instructions that later devices lack
    options = [f"--gpu-architecture=sm_{capability}{own}", "-std=c++17", "-default-device"]
    options += [f"-D{key}={value}" for key, value in defines.items()]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(_check(nvrtc.nvrtcGetProgramLogSize(program)))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        message = log.rstrip(b"\0").decode(errors="replace").strip()
        raise ValueError(f"{source} does not compile: {message}")
    code = bytes(_check(nvrtc.nvrtcGetCUBINSize(program)))
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    _check(nvrtc.nvrtcDestroyProgram(program))
    return code


@contextmanager
def _current(device: int) -> Iterator[None]:
    """Inside, a device's primary context is current in this thread, as in torch's own calls.

    Torch makes another current whenever it works on another device, so it is looked up each time.
    """
    own, before = _context(device), _check(driver.cuCtxGetCurrent())
    if int(before) == int(own):
        yield
        return
    _check(driver.cuCtxSetCurrent(own))
    try:
        yield
    finally:
        if int(before):
            _check(driver.cuCtxSetCurrent(before))


@cache
def _context(device: int) -> Any:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return _check(driver.cuDevicePrimaryCtxRetain(device))


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a driver or NVRTC call, or an error that names its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status.name}")
    return (values[0] if len(values) == 1 else values) if values else None
