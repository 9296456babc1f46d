"""CUDA sources of `pw_kernels` compiled as C++, with headers of this folder in place of a GPU.

It shows what a kernel computes, not what it races with: for that there is compute-sanitizer.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pw_kernels.sources import cuda_text

SUPPORT = Path(__file__).parent
_COMMON = (  # of common.cuh
    "prmt", "lop3", "mad", "multiply", "to_half", "commit", "wait", "wait_for_earlier",
    "let_next_begin", "barrier_init", "barrier_arrive", "barrier_wait",
)  # fmt: skip
LOADS = (  # of loads.cuh, defined by products_on_cpu.h
    "load_written", "load_number", "load_float", "load_id", "ask", "copy_async",
)  # fmt: skip


@dataclass(frozen=True)
class CudaSource:
    """A .cu file, and what takes the place of its single instructions.

    Attributes:
        name: Of the file in pw_kernels.
        header: Of this folder.
        instructions: Functions that the header defines, beside those of common.cuh.
        runtime: The file of this folder that runs blocks.
    """

    name: str
    header: str
    instructions: Sequence[str]
    runtime: str = "cuda_on_cpu.cpp"

    def compile(self, folder: Path, call: str, defines: Mapping[str, int]) -> Any:
        """A library with `run(arguments, columns, rows, threads)`: a grid whose blocks `call`."""
        (folder / "kernel.cpp").write_text(self._as_cpp(call))
        library, text = folder / "kernel.so", _with_headers(self.runtime)
        known = {key: value for key, value in defines.items() if re.search(rf"\b{key}\b", text)}
        runtime = _object(self.runtime, tuple(sorted(known.items())))
        # To compile takes longer than to run, so nothing is made faster.
        _compile(
            defines, "-O0", "-shared", str(folder / "kernel.cpp"), str(runtime), "-o", str(library)
        )
        return ctypes.CDLL(str(library))

    def _as_cpp(self, call: str) -> str:
        """The source without single instructions and types, and with an entry that makes `call`."""
        source = cuda_text(self.name)
        source = re.sub(r"typedef unsigned .*;\n", "", source)
        for name in (*_COMMON, *self.instructions):
            source = _without(name, source)
        source = re.sub(r"extern __shared__ __align__\(\d+\)", 'extern "C"', source)
        entry = f'extern "C" void kernel(const void* all) {{ {call} }}'
        return f'#include "{self.header}"\n{source}\n{entry}\n'


def _compile(defines: Mapping[str, int], *words: str) -> None:
    options = ["-w", "-std=c++17", "-fPIC", "-fno-strict-aliasing", f"-I{SUPPORT}"]
    macros = [f"-D{key}={value}" for key, value in defines.items()]
    done = subprocess.run(["g++", *options, *macros, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


@cache
def _objects() -> TemporaryDirectory[str]:
    """A folder that is there as long as this process."""
    return TemporaryDirectory()


@cache
def _object(runtime: str, known: tuple[tuple[str, int], ...]) -> Path:
    """What runs blocks, compiled once in a process for all kernels that it knows alike."""
    made = Path(_objects().name) / f"{runtime}-{hash(known)}.o"
    _compile(dict(known), "-O1", "-c", str(SUPPORT / runtime), "-o", str(made))
    return made


@cache
def _with_headers(name: str) -> str:
    """A file of this folder, and those that it includes."""
    text = (SUPPORT / name).read_text()
    inner = [part for part in re.findall(r'#include "(.+)"', text) if (SUPPORT / part).exists()]
    return "".join([text, *map(_with_headers, inner)])


def _without(name: str, source: str) -> str:
    """The source without definitions of a function, which end in their line or at the margin."""
    kept, inside, found = [], False, False
    for line in source.split("\n"):
        if re.match(rf"(template <[^>]*> )?(DI|__device__) \w+ {name}\(", line):
            found, inside = True, line.count("{") > line.count("}")
        elif inside:
            inside = line != "}"
        else:
            kept.append(line)
    assert found, name
    return "\n".join(kept)
