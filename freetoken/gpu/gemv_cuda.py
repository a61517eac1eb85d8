"""Decode: the routes of units on the tensor cores, in CUDA C that is compiled when a layout is first used.

A record is read once for up to 8 routes. gemv.cu says how; tile_<name>.cuh, named by `Format.kernels`, has what is a
format's own. `gemv.TritonGemv` computes the same in plain fp32.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import re
from dataclasses import dataclass

import torch

from freetoken.device.cuda import CudaDevice
from freetoken.device.driver import Kernel
from freetoken.errors import UnsupportedError
from freetoken.executor import Activation
from freetoken.formats.base import TILE_ROWS
from freetoken.formats.record import RecordLayout
from freetoken.gpu.units import COLUMNS, Units

_X = {torch.bfloat16: "ft_bf16", torch.float16: "ft_f16", torch.float32: "float"}
_ACTIVATIONS = ("silu", "silu_limited", "swiglu_clamped")
_DIGITS = 3
"""Vectors that a vector of fp32 is taken apart into."""

_VECTOR_ROOM = 24 << 10
"""Bytes of shared memory for vectors. Routes that do not fit are multiplied in turn, by weights from the cache."""
_PIECE = 32
"""Weights of a row that are multiplied at once."""
_LANES = 256
"""Threads that prepare a row."""
_SUMS = TILE_ROWS * COLUMNS * 4
"""Bytes of a warp's sums of a tile."""
_LEAST = "sm_80"
"""The first architecture that has all instructions of device.cuh."""


@dataclass(frozen=True)
class Shape:
    """How kernels share out their work.

    warps: of a block. depth: stages of a warp's ring. tiles: of down at once. resident: blocks of a multiprocessor, and
    those that registers must do for. own: tokens up to which blocks prepare vectors for themselves. down_depth: that of
    down, if another. units: of a stage, if not as many as the format says.

    On an H200 (compared as `benchmarks/gpu_gemv.py --sweep` does; 2880/2880, 4, 8 and 16 units), us, mxfp4 and nvfp4:
    these 19.9, 34.9, 64.1 and 21.1, 37.3, 67.4; units=6 19.9, 35.8, 65.5 and 21.2, 37.9, 69.5; units=12 20.2, 34.3,
    85.1 and 21.8, 37.0, 90.6; depth=3 21.3, 36.0, 89.1 and 22.5, 38.4, 94.3; resident=4 23.2, 37.2, 84.5 and 25.5,
    39.9, 85.0; tiles=4 20.9, 38.6, 69.9 and 22.5, 40.6, 73.3; warps=8, resident=2 23.1, 38.1, 67.0 and 24.2, 40.9,
    73.2.
    """

    warps: int = 4
    depth: int = 2
    tiles: int = 2
    resident: int = 3
    own: int = 4
    down_depth: int | None = None
    units: int | None = None


DEFAULT = Shape()


@dataclass(frozen=True)
class _Kernels:
    """Compiled for a shape. stage: bytes of a stage of a tile. blocks: those that keep the device busy.

    least: bytes of shared memory that keep a multiprocessor from taking more than its share of them. With room for
    more, those that end first would take blocks of the next kernel that others had time for. The last two are for one
    vector at a time.
    """

    shape: Shape
    stage: int
    blocks: int
    least: int
    prepare_x: Kernel
    prepare_h: Kernel
    gate_up: Kernel
    down: Kernel
    gate_up_one: Kernel
    down_one: Kernel

    def grid(self, units: Units, groups: int) -> int:
        """Blocks for units of so many groups of tiles, at least one for each unit."""
        n = len(units.address)
        return max(n, min(self.blocks, n * groups))


class CudaGemv:
    """Both products of one shard's experts for the routes of units. Holds no tensor.

    dtype: that of x. With float32 results are as exact as fp32 sums are; else activations are rounded to 11 bits before
    both products, to 8 with bf16 weights. Weights are exact always. Raises `DeviceError` where the compiler refuses.
    """

    def __init__(
        self,
        device: CudaDevice,
        layout: RecordLayout,
        activation: Activation,
        dtype: torch.dtype = torch.bfloat16,
        shape: Shape = DEFAULT,
    ) -> None:
        if dtype not in _X:
            raise TypeError(f"x is to be {dtype}, expected one of {', '.join(map(str, _X))}")
        if not self.runs_on(device):
            raise UnsupportedError(
                f"{device.name} is {device.architecture}, older than {_LEAST}: use TritonGemv",
                feature="CudaGemv",
                available=device.architecture,
            )
        self.layout, self.dtype = layout, dtype
        self._digits = _DIGITS if dtype == torch.float32 else 1
        self._k = 1  # a guess for `down` of how many routes a unit has; results do not depend on it
        self._numbers = ctypes.c_float(activation.alpha), ctypes.c_float(activation.limit)
        source = _source(layout, activation, dtype, shape)
        stage = (shape.units or _constant(source, "STAGE_UNITS")) * _constant(source, "UNIT")
        kernels = device.compile(source, "prepare_x", "prepare_h", "gate_up", "down", "gate_up_one", "down_one")
        blocks, least = device.multiprocessors * shape.resident, device.shared_memory // (shape.resident + 1)
        self._kernels = _Kernels(shape, stage, blocks, least, *kernels)

    @staticmethod
    def runs_on(device: CudaDevice) -> bool:
        """Whether a device has all that the kernels use."""
        return int(device.architecture[3:]) >= int(_LEAST[3:])

    def gate_up(
        self, x: torch.Tensor, units: Units, k: int, out: torch.Tensor, offset: int = 0, early: bool = False
    ) -> None:
        """Write the hidden values of each route of `units` to its row of `out`, and no other row.

        x: (B, H) of the dtype. k: routes of a token; route r is of token r // k. out: (B * k, I) float32, after biases,
        globals and activation. offset: bytes from a unit's address to this shard's record. early: what is before this
        in the stream is one kernel, and this may be launched before that has ended.
        """
        _check(x, "x", self.layout.hidden, self.dtype)
        _check(out, "out", self.layout.intermediate, torch.float32)
        self._k = k
        kernels = self._kernels
        shape = kernels.shape
        prepared = None if len(x) <= shape.own else self._prepare(kernels.prepare_x, x, early)
        columns, shared = self._room(kernels, self.layout.hidden, len(x), 2 * shape.warps, shape.depth)
        run = kernels.gate_up_one if columns == 1 else kernels.gate_up
        run(
            x.data_ptr(),
            0 if prepared is None else prepared.data_ptr(),
            ctypes.c_int(len(x)),
            units.address.data_ptr(),
            ctypes.c_int(len(units.address)),
            units.route.data_ptr(),
            out.data_ptr(),
            ctypes.c_uint(k),
            ctypes.c_longlong(offset),
            ctypes.c_int(columns),
            ctypes.c_int(kernels.blocks),
            *self._numbers,
            blocks=kernels.grid(units, self.layout.gate_tiles),
            threads=32 * shape.warps,
            shared=shared,
            early=early or prepared is not None,
        )

    def down(self, h: torch.Tensor, units: Units, out: torch.Tensor, offset: int = 0) -> None:
        """Write the output of each route of `units` to its row of `out`: bias and global applied, unweighted.

        h: (B * k, I) float32, as `gate_up` wrote it. out: (B * k, H) float32. Records are read while what comes before
        this in the stream still runs: they and `units` are from before that.
        """
        _check(h, "h", self.layout.intermediate, torch.float32)
        _check(out, "out", self.layout.hidden, torch.float32)
        tokens = len(h) // self._k
        kernels = self._kernels
        shape = kernels.shape
        prepared = None if tokens <= shape.own else self._prepare(kernels.prepare_h, h, early=True)
        columns, shared = self._room(
            kernels, self.layout.intermediate, tokens, shape.tiles * shape.warps, shape.down_depth or shape.depth
        )
        run = kernels.down_one if columns == 1 else kernels.down
        run(
            h.data_ptr(),
            0 if prepared is None else prepared.data_ptr(),
            ctypes.c_int(len(h)),
            units.address.data_ptr(),
            ctypes.c_int(len(units.address)),
            units.route.data_ptr(),
            out.data_ptr(),
            ctypes.c_longlong(offset),
            ctypes.c_int(columns),
            ctypes.c_int(kernels.blocks),
            blocks=kernels.grid(units, -(-self.layout.down_tiles // shape.tiles)),
            threads=32 * shape.warps,
            shared=shared,
            early=True,
        )

    def _prepare(self, kernel: Kernel, rows: torch.Tensor, early: bool) -> torch.Tensor:
        """Vectors of rows, then a word for each row. The order of the stream keeps them until they were read."""
        nbytes = len(rows) * (self._digits * self._vector_bytes(rows.shape[1]) + 4)
        prepared = rows.new_empty(nbytes, dtype=torch.uint8)
        kernel(rows.data_ptr(), prepared.data_ptr(), blocks=len(rows), threads=_LANES, early=early)
        return prepared

    def _vector_bytes(self, k: int) -> int:
        width = self.layout.format.block if self.layout.format.ragged else _PIECE
        return -(-k // width) * width * 2

    def _room(self, kernels: _Kernels, k: int, tokens: int, rings: int, depth: int) -> tuple[int, int]:
        """How many vectors of k values are multiplied at once, and bytes of shared memory of a block."""
        vectors = self._vector_bytes(k) * self._digits
        routes = max(1, min(tokens, COLUMNS // self._digits, _VECTOR_ROOM // vectors))
        return routes * self._digits, max(kernels.least, routes * vectors + rings * (depth * kernels.stage + _SUMS))


def _source(layout: RecordLayout, activation: Activation, dtype: torch.dtype, shape: Shape) -> str:
    """All of the kernels' source, for one layout."""
    constants = {
        "HIDDEN": layout.hidden,
        "INTERMEDIATE": layout.intermediate,
        "HIDDEN_TILE": layout.format.tile_bytes(layout.hidden),
        "INTERMEDIATE_TILE": layout.format.tile_bytes(layout.intermediate),
        "LANES": _LANES,
        "HAS_BIAS": int(layout.bias),
        "ACTIVATION": _ACTIVATIONS.index(activation.kind),
        "EXACT": int(dtype == torch.float32),
        "WARPS": shape.warps,
        "DEPTH": shape.depth,
        "TILES": shape.tiles,
        "DOWN_DEPTH": shape.down_depth or shape.depth,
        "WANTED_UNITS": shape.units or 0,
        "RESIDENT": shape.resident,
        **{name.upper(): offset for name, (offset, _) in layout.sections.items()},
    }
    head = "".join(f"enum {{ FT_{name} = {value} }};\n" for name, value in constants.items())
    folder = importlib.resources.files(__package__)
    files = "device.cuh", "tile.cuh", f"tile_{layout.format.kernels}.cuh", "gemv.cu"
    return f"{head}#define FT_X {_X[dtype]}\n" + "".join((folder / name).read_text(encoding="utf-8") for name in files)


def _constant(source: str, name: str) -> int:
    """A number of tile_<name>.cuh."""
    found = re.search(rf"FT_{name} = (\d+)", source)
    assert found, f"no FT_{name} among the constants of a tile"
    return int(found[1])


def _check(tensor: torch.Tensor, name: str, width: int, dtype: torch.dtype) -> None:
    """Raise ValueError or TypeError unless a tensor is contiguous, (.., width) and of the dtype."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, expected {dtype}")
    if tensor.dim() != 2 or tensor.shape[1] != width or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} with strides {tensor.stride()}, expected (.., {width}), contiguous"
        )
