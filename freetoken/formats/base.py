"""What a format is: how codes and scales stand for weights, and how a matrix of them is laid out in tiles.

A `Matrix` is the row-major form in which checkpoints and the NumPy references speak; `Format.pack` permutes it
into the tiles that every kernel reads. Tiles (design D1): 16 rows, one row per 32-bit lane; per block of the input
dimension 16 scales, then lines of 64 bytes holding 4 consecutive source bytes of each of the 16 rows.

    tile = blocks; block = [16 scales][line][line]...; line = [row 0: 4 bytes][row 1: 4 bytes]...[row 15: 4 bytes]

In a format whose width need not be a multiple of its block, the last block is shorter: its scales and fewer lines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import FormatError

TILE_ROWS = 16
LINE_BYTES = 64
LANE_BYTES = 4
Scales = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]
ScaleBlock = tuple[int, int]
"""Weights (rows, columns) that share a scale in a checkpoint, as its config declares; 0 stands for all of them."""
_STRIP_WEIGHTS = 1 << 16
"""Weights that are quantized together: the temporaries of NumPy then stay in the second level cache."""


@dataclass(frozen=True)
class Matrix:
    """One weight matrix (N, K) in a format, row-major.

    codes: (N, K * bits / 8) uint8, 4-bit codes with the low nibble at even k. scales: (N, ceil(K / block)) in the
    format's scale type as raw bits (uint8, uint16 or uint32), or None. global_scale: one fp32 factor as the checkpoint
    gives it, by which values are multiplied or, with `divides`, divided.
    """

    format: Format
    codes: NDArray[np.uint8]
    scales: Scales | None = None
    global_scale: float = 1.0
    divides: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): rows and input width in weights."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.format.bits

    def dequantize(self) -> NDArray[np.float32]:
        """(N, K) float32: the values these codes stand for, rounded only where fp32 cannot hold them."""
        return self.format.dequantize32(self)

    def rows(self, start: int, stop: int) -> Matrix:
        """The matrix of rows [start, stop)."""
        scales = None if self.scales is None else self.scales[start:stop]
        return replace(self, codes=self.codes[start:stop], scales=scales)

    def columns(self, start: int, stop: int) -> Matrix:
        """The matrix of input columns [start, stop): multiples of the format's block, or `stop` the end."""
        block, bits = self.format.block, self.format.bits
        if start % block or (stop % block and stop != self.shape[1]):
            raise FormatError(
                f"{self.format.name}: columns {start}:{stop} cut a block of {block}",
                format=self.format.name,
                shape=self.shape,
            )
        scales = None if self.scales is None else self.scales[:, start // block : -(-stop // block)]
        return replace(self, codes=self.codes[:, start * bits // 8 : stop * bits // 8], scales=scales)


@dataclass(frozen=True)
class Spelling:
    """The tensors in which checkpoints write one matrix of a format.

    tensors: role -> (suffix of the tensor name, accepted safetensors dtypes); roles are "codes", "scales", "global".
    divides: the global scale is a divisor. optional: further suffixes that may stand beside these and are not used.
    """

    name: str
    tensors: dict[str, tuple[str, tuple[str, ...]]]
    divides: bool = False
    optional: tuple[str, ...] = ()


class Format(ABC):
    """One way of holding weights. Subclasses are single instances named `FORMAT` in `formats/<name>.py`."""

    name: ClassVar[str]
    bits: ClassVar[int]
    """Bits per code."""
    block: ClassVar[int]
    """Weights along K that share a scale (for a format without scales: the weights of one line)."""
    scale_dtype: ClassVar[type[np.uint8] | type[np.uint16] | type[np.uint32] | None]
    keeps_scales: ClassVar[bool] = True
    """Whether a `Matrix` has the very scales that checkpoints give, one for a row and block."""
    ragged: ClassVar[bool] = False
    """Whether the last block along K may be shorter than the others, by whole lines."""
    row_group: ClassVar[int] = 1
    """Rows that quantize wants at once because they share scales."""
    code_alarm: ClassVar[int] = 0
    """A code that has all these bits is no number; 0 where every code is one."""
    scale_alarms: ClassVar[tuple[int, ...]] = ()
    """The same of scales: having all bits of one of these, a scale may be wrong, and `find_bad` decides."""
    kernels: ClassVar[str]
    """Whose kernels read it: `freetoken.kernels._tile_<kernels>` on a CPU, `freetoken.gpu.tile_<kernels>` on a GPU.
    Formats of one layout share them."""
    spellings: ClassVar[tuple[Spelling, ...]]

    @property
    def line_k(self) -> int:
        """Weights of one row in a 64-byte line."""
        return LANE_BYTES * 8 // self.bits

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale."""
        return 0 if self.scale_dtype is None else np.dtype(self.scale_dtype).itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one tile: 16 scales and its lines."""
        return self._bytes_of(self.block)

    @property
    def width_step(self) -> int:
        """Input widths are multiples of this."""
        return self.line_k if self.ragged else self.block

    def _bytes_of(self, weights: int) -> int:
        return TILE_ROWS * self.scale_bytes + LINE_BYTES * (weights // self.line_k)

    def n_blocks(self, k: int) -> int:
        """Blocks of a row of k weights, the last of which may be ragged."""
        return -(-k // self.block)

    @property
    def granule(self) -> int:
        """The intermediate dimension may be cut into shards at multiples of this."""
        return max(TILE_ROWS, self.block)

    def check_width(self, k: int, what: str) -> None:
        """Raise `FormatError` unless an input dimension of k weights can be held."""
        if k <= 0 or k % self.width_step:
            step = f"the {self.line_k} weights of a line" if self.ragged else f"the format's block of {self.block}"
            raise FormatError(
                f"{self.name}: {what} is {k}, which is not a multiple of {step}; "
                "choose another expert format (bf16 takes any even width)",
                format=self.name,
            )

    def quantize(self, weights: NDArray[np.float32]) -> Matrix:
        """Nearest matrix of this format to float32 weights (N, K) of a width that it holds."""
        return self.quantize_strips(weights.shape, lambda start, stop: weights[start:stop])

    def quantize_strips(self, shape: tuple[int, ...], strip: Callable[[int, int], NDArray[np.float32]]) -> Matrix:
        """As `quantize`, of rows that `strip(start, stop)` makes when they are wanted, (stop - start, K) float32.

        Working memory is a strip, however large the matrix. A format with a global scale asks for every row twice.
        """
        n, k = shape
        self.check_width(k, "the input dimension")
        step = self.strip_rows(k)
        edges = [(start, min(start + step, n)) for start in range(0, n, step)]
        factor = self.choose_global(lambda: max((float(np.abs(strip(*e)).max(initial=0)) for e in edges), default=0.0))
        codes = np.empty((n, k * self.bits // 8), np.uint8)
        scales: Any = None if self.scale_dtype is None else np.empty((n, self.n_blocks(k)), self.scale_dtype)
        for start, stop in edges:
            codes[start:stop], row_scales = self.quantize_rows(strip(start, stop), factor)
            if scales is not None:
                scales[start:stop] = row_scales
        return Matrix(self, codes, scales, float(factor))

    def strip_rows(self, k: int) -> int:
        """Rows of k weights that are quantized together."""
        return max(1, _STRIP_WEIGHTS // k // self.row_group) * self.row_group

    def choose_global(self, largest: Callable[[], float]) -> np.float32:
        """The factor for a matrix whose largest magnitude `largest()` finds; 1 for a format without one."""
        return np.float32(1)

    @abstractmethod
    def quantize_rows(
        self, weights: NDArray[np.float32], factor: np.float32
    ) -> tuple[NDArray[np.uint8], Scales | None]:
        """Codes (N, K * bits / 8) and scales (N, ceil(K / block)) of float32 rows, given the matrix's global factor.

        All rows of the matrix, or a multiple of `row_group` of them.
        """

    @abstractmethod
    def dequantize64(self, matrix: Matrix) -> NDArray[np.float64]:
        """(N, K) float64: the exact values of a matrix of this format (a divided global rounds once)."""

    def dequantize32(self, matrix: Matrix) -> NDArray[np.float32]:
        """(N, K) float32: `dequantize64` rounded once."""
        return self.dequantize64(matrix).astype(np.float32)

    def stored_scale_shapes(self, n: int, k: int, block: ScaleBlock | None) -> tuple[tuple[int, ...], ...]:
        """The shapes in which a checkpoint may give the scales of (n, k) weights.

        block: the config's, None for formats whose blocks it does not choose.
        """
        return ((n, k // self.block),)

    def check_scale_block(self, k: int, block: ScaleBlock | None) -> None:
        """Raise `FormatError` when records cannot hold the scales of such blocks, whatever they are."""
        return

    def read_scales(self, stored: NDArray[Any], dtype: str) -> Scales:
        """A checkpoint's scales, the bits of a safetensors dtype, in this format's scale type and the same shape."""
        scales: Scales = stored
        return scales

    def spread_scales(self, stored: Scales, n: int, k: int, block: ScaleBlock | None) -> Scales:
        """Scales (N, ceil(K / block)) of a `Matrix` (n, k) from those that `read_scales` gave.

        Raises `FormatError` when they cannot be held in this format's blocks.
        """
        return stored

    def dequantize_stored(self, matrix: Matrix, stored: Scales | None, block: ScaleBlock | None) -> NDArray[np.float32]:
        """(N, K) float32 of the codes and global scale of `matrix` under such scales, which may fit no `Matrix`."""
        scales = None if stored is None else self.spread_scales(stored, *matrix.shape, block)
        return replace(matrix, scales=scales).dequantize()

    @abstractmethod
    def find_bad(self, matrix: Matrix) -> str | None:
        """What in codes, scales and global cannot be a weight (NaN, infinite, zero where that is no number), or None.

        Codes or scales without any alarm bits are all right.
        """

    def find_bad_global(self, factor: float, divides: bool) -> str | None:
        """The same of a global scale alone."""
        return None

    def tile_bytes(self, k: int) -> int:
        """Bytes of one tile of 16 rows and k columns."""
        rest = k % self.block
        return k // self.block * self.block_bytes + (self._bytes_of(rest) if rest else 0)

    def pack(self, matrix: Matrix, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Tiles (ceil(N/16), tile_bytes) uint8 of a matrix; missing rows are zero bytes.

        out: where to write them, every byte; tiles may lie apart, the bytes of each may not.
        """
        n, k = matrix.shape
        if out is None:
            out = np.empty((-(-n // TILE_ROWS), self.tile_bytes(k)), np.uint8)
        codes = _pad_rows(matrix.codes, len(out) * TILE_ROWS)
        scales = None if matrix.scales is None else _pad_rows(matrix.scales, len(out) * TILE_ROWS)
        for width, blocks, first, at in self._runs(k):
            start = first * self.block * self.bits // 8
            stop = start + blocks * width * self.bits // 8
            head, body = self._sections(out, width, blocks, at)
            lanes = np.ascontiguousarray(codes[:, start:stop]).view(np.uint32)
            body[...] = lanes.reshape(len(out), TILE_ROWS, blocks, -1).transpose(0, 2, 3, 1)
            if scales is not None and head is not None:
                run = scales[:, first : first + blocks].reshape(len(out), TILE_ROWS, blocks)
                head[...] = run.transpose(0, 2, 1)
        return out

    def unpack(self, tiles: NDArray[np.uint8], n: int, k: int) -> Matrix:
        """The inverse of `pack`: tiles (T, tile_bytes) to the matrix of the first n rows, k wide.

        The global scale is not in the tiles: it is 1 here.
        """
        rows = len(tiles) * TILE_ROWS
        codes = np.empty((rows, k * self.bits // 8), np.uint8)
        scales: Any = None if self.scale_dtype is None else np.empty((rows, self.n_blocks(k)), self.scale_dtype)
        for width, blocks, first, at in self._runs(k):
            start = first * self.block * self.bits // 8
            stop = start + blocks * width * self.bits // 8
            head, body = self._sections(tiles, width, blocks, at)
            codes[:, start:stop] = np.ascontiguousarray(body.transpose(0, 3, 1, 2)).reshape(rows, -1).view(np.uint8)
            if head is not None:
                scales[:, first : first + blocks] = head.transpose(0, 2, 1).reshape(rows, blocks)
        return Matrix(self, codes[:n], None if scales is None else scales[:n])

    def _runs(self, k: int) -> list[tuple[int, int, int, int]]:
        """A width's whole blocks, then a ragged one: (weights of a block, blocks, first block, byte in the tile)."""
        whole, rest = divmod(k, self.block)
        runs = [(self.block, whole, 0, 0)] if whole else []
        return [*runs, (rest, 1, whole, whole * self.block_bytes)] if rest else runs

    def _sections(
        self, tiles: NDArray[np.uint8], width: int, blocks: int, at: int
    ) -> tuple[NDArray[Any] | None, NDArray[np.uint32]]:
        """Views of a run of blocks in every tile: scales (T, blocks, 16) and dwords (T, blocks, lines, 16)."""
        size, head = self._bytes_of(width), TILE_ROWS * self.scale_bytes
        parts = tiles[:, at : at + blocks * size].reshape(len(tiles), blocks, size)
        body = parts[:, :, head:].view(np.uint32).reshape(len(tiles), blocks, width // self.line_k, TILE_ROWS)
        return (None if self.scale_dtype is None else parts[:, :, :head].view(self.scale_dtype)), body

    def __repr__(self) -> str:
        return f"<format {self.name}>"


def _pad_rows(array: NDArray[np.generic], rows: int) -> NDArray[np.generic]:
    """A C-contiguous copy or view with zero rows appended."""
    if array.shape[0] == rows:
        return np.ascontiguousarray(array)
    out = np.zeros((rows, *array.shape[1:]), array.dtype)
    out[: array.shape[0]] = array
    return out
