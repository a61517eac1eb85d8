"""A device that compiles CUDA C with the C++ compiler of this machine, and runs it here (`cuda_twin.h`)."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.resources
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from freetoken.device.base import Flag

COMPILER = shutil.which("g++")
_HARDWARE = [("freetoken.gpu", "device.cuh"), ("freetoken.device", "handoff.cuh")]
"""What the twin has in its own way."""
_TWIN = Path(__file__).with_suffix(".h")
_COMMAND = [COMPILER or "g++", "-std=c++20", "-O1", "-w", "-fPIC"]
_LAUNCH = """
extern "C" void twin_{name}(void **at, const int *grid, int threads, int shared) {{
    ft_launch({name}, at, grid, threads, shared);
}}
"""


class TwinDevice:
    """What `CudaGemv` and `Handoff` need of a `CudaDevice`. folder: where compiled kernels go."""

    name = "a twin"
    architecture = "sm_80"
    multiprocessors = 2
    shared_memory = 96 << 10

    def __init__(self, folder: Path) -> None:
        """Compiles the twin's header once for all kernels: it is found there, as what g++ made of it."""
        self._folder = folder
        subprocess.run([*_COMMAND, "-x", "c++-header", _TWIN, "-o", folder / f"{_TWIN.name}.gch"], check=True)

    def pointer(self, memory: torch.Tensor | Flag) -> int:
        return memory.address if isinstance(memory, Flag) else memory.data_ptr()

    def compile(self, source: str, *names: str) -> list[TwinKernel]:
        hardware = [(importlib.resources.files(p) / name).read_text(encoding="utf-8") for p, name in _HARDWARE]
        mine = next(text for text in hardware if text in source)
        text = f'#include "{_TWIN.name}"\n' + source.replace(mine, "")
        text += "".join(_LAUNCH.format(name=name) for name in names)
        place = self._folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        library = place.with_suffix(".so")
        if not library.exists():
            place.with_suffix(".cpp").write_text(text)
            subprocess.run(
                [*_COMMAND, "-shared", "-I", _TWIN.parent, place.with_suffix(".cpp"), "-o", library], check=True
            )
        loaded = ctypes.CDLL(str(library))
        return [TwinKernel(loaded[f"twin_{name}"]) for name in names]


class TwinKernel:
    """A kernel, called as `driver.Kernel` is."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(
        self,
        *arguments: Any,
        blocks: int | tuple[int, ...] = 1,
        threads: int = 1,
        shared: int = 0,
        early: bool = False,
    ) -> None:
        values = [ctypes.c_void_p(value) if isinstance(value, int) else value for value in arguments]
        at = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        x, y = (*((blocks,) if isinstance(blocks, int) else blocks), 1)[:2]
        self._function(at, (ctypes.c_int * 2)(x, y), threads, shared)
