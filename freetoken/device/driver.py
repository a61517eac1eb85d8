"""CUDA's driver API and run-time compiler, as cuda.py uses them: errors by name, kernels from their source.

`cuda-bindings` is imported when a `Driver` is made, never by importing the package.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from freetoken.errors import DeviceError, UnsupportedError

LOST = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT", "CONTAINED", "CONTEXT_IS_DESTROYED", "DEINITIALIZED", "DEVICE_UNAVAILABLE", "ECC_UNCORRECTABLE",
        "EXTERNAL_DEVICE", "HARDWARE_STACK_ERROR", "ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "INVALID_ADDRESS_SPACE",
        "INVALID_PC", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "MISALIGNED_ADDRESS", "NVLINK_UNCORRECTABLE",
        "TENSOR_MEMORY_LEAK", "UNKNOWN",
    )
)  # fmt: skip
"""Errors after which every call of the process fails."""

RING = """
/* Count a bell up by 2, its lowest bit as asked, after all that this thread and what it depends on has written.
   By one thread: only the device writes to a bell, and one bell at a time. */
__device__ inline void ft_ring(unsigned int *bell, unsigned int answered) {
    unsigned int now;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(now) : "l"(bell) : "memory");
    asm volatile("st.release.sys.u32 [%0], %1;" :: "l"(bell), "r"((now & ~1u) + 2u + answered) : "memory");
}

/* Write an answer, or 0: it was taken. */
__device__ inline void ft_set(unsigned int *answer, unsigned int value) {
    asm volatile("st.release.sys.u32 [%0], %1;" :: "l"(answer), "r"(value) : "memory");
}
"""
"""CUDA C that every compiled kernel can use: what a device does with flags."""

KERNELS = """
extern "C" __global__ void ring(unsigned int *bell, unsigned int answered) { ft_ring(bell, answered); }
extern "C" __global__ void set(unsigned int *answer, unsigned int value) { ft_set(answer, value); }
"""


class Driver:
    """The driver's functions, called by name.

    Raises `UnsupportedError` where cuda-bindings or the driver is missing.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver, nvrtc
        except ImportError as error:
            raise UnsupportedError(
                f'a CUDA device needs the package cuda-bindings ({error}): pip install "freetoken[gpu]"',
                feature="cuda-bindings",
            ) from error
        self.api: Any = driver
        self.compiler: Any = nvrtc
        try:
            self.call("cuInit", 0)
        except RuntimeError as error:  # the bindings' own where there is no library, ours where it refuses
            raise UnsupportedError(
                f"CUDA's driver cannot be used ({error}): install one, or run on the CPU", feature="cuda"
            ) from error

    def call(self, function: str, *arguments: Any) -> Any:
        """What a function returns beside its code; raises `DeviceError` with the code's name."""
        code, *values = getattr(self.api, function)(*arguments)
        self.check(function, code)
        return values[0] if len(values) == 1 else values

    def check(self, operation: str, code: Any) -> None:
        """Raise `DeviceError` unless a code, of the driver or of the same number in the runtime, is success."""
        if int(code) == 0:
            return
        try:
            code = self.api.CUresult(int(code))
        except ValueError:
            raise DeviceError(f"{operation}: CUDA error {int(code)}", operation=operation) from None
        _, text = self.api.cuGetErrorString(code)
        lost = code.name in LOST
        raise DeviceError(
            f"{operation}: {code.name} ({text.decode() if text else 'unknown'})"
            + (": nothing more can be done on this device, restart the process" if lost else ""),
            operation=operation,
            lost=lost,
        )

    def is_done(self, stream: int) -> bool:
        """Whether a stream has nothing left to do. Does not hold the interpreter's lock, which torch's query does."""
        (code,) = self.api.cuStreamQuery(self.api.CUstream(stream))
        if code == self.api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self.check("cuStreamQuery", code)
        return True

    @contextlib.contextmanager
    def translated(self, operation: str) -> Iterator[None]:
        """Errors of torch's CUDA calls become `DeviceError`."""
        try:
            yield
        except torch.AcceleratorError as error:
            code = getattr(error, "error_code", None)
            if not code:
                raise DeviceError(f"{operation}: {error}", operation=operation) from error
            try:
                self.check(operation, code)
            except DeviceError as named:
                raise named from error

    def compile(self, source: str, architecture: str) -> Any:
        """A loaded module of CUDA C, which may use `RING`; raises `DeviceError` with the compiler's words."""
        program = self._compiler("nvrtcCreateProgram", (RING + source).encode(), b"freetoken.cu", 0, [], [])
        options = [f"--gpu-architecture={architecture}".encode()]
        try:
            self._compiler("nvrtcCompileProgram", program, len(options), options)
        except DeviceError as error:
            log = bytearray(self._compiler("nvrtcGetProgramLogSize", program))
            self.compiler.nvrtcGetProgramLog(program, log)
            raise DeviceError(
                f"{error}: {log.decode(errors='replace').strip(chr(0) + chr(10))}", operation="compile"
            ) from error
        code = bytearray(self._compiler("nvrtcGetCUBINSize", program))
        self._compiler("nvrtcGetCUBIN", program, code)
        self._compiler("nvrtcDestroyProgram", program)
        return self.call("cuModuleLoadData", bytes(code))

    def _compiler(self, function: str, *arguments: Any) -> Any:
        code, *values = getattr(self.compiler, function)(*arguments)
        if int(code) != 0:
            raise DeviceError(f"{function}: {code.name}", operation=function)
        return values[0] if values else None


class Kernel:
    """A kernel of a compiled module, put on torch's current stream by calling it."""

    def __init__(self, driver: Driver, module: Any, name: str, starts_early: bool = False) -> None:
        self._driver = driver
        self._function = driver.call("cuModuleGetFunction", module, name.encode())
        self.name = name
        self._shared = 0  # what a launch may say, once the driver has been told
        self._starts_early = starts_early
        if starts_early:
            self._early = driver.api.CUlaunchAttribute()
            self._early.id = driver.api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            self._early.value.programmaticStreamSerializationAllowed = 1

    def __call__(
        self,
        *arguments: Any,
        blocks: int | tuple[int, ...] = 1,
        threads: int = 1,
        shared: int = 0,
        early: bool = False,
    ) -> None:
        """Launch it; arguments: addresses as int, other values as ctypes.

        blocks: of a grid of up to three dimensions. shared: bytes of shared memory that the launch says. early: it may
        start while what is before it in the stream runs, and waits for that itself, where devices have it (sm_90).
        """
        types = tuple(ctypes.c_void_p if isinstance(value, int) else type(value) for value in arguments)
        x, y, z = (*((blocks,) if isinstance(blocks, int) else blocks), 1, 1)[:3]
        if shared > self._shared:
            attribute = self._driver.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._driver.call("cuFuncSetAttribute", self._function, attribute, shared)
            self._shared = shared
        stream = self._driver.api.CUstream(torch.cuda.current_stream().cuda_stream)
        if not (early and self._starts_early):
            self._driver.call(
                "cuLaunchKernel", self._function, x, y, z, threads, 1, 1, shared, stream, (arguments, types), 0
            )
            return
        config = self._driver.api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, stream
        config.attrs, config.numAttrs = [self._early], 1
        self._driver.call("cuLaunchKernelEx", config, self._function, (arguments, types), 0)
