"""The record: one expert's bytes, the same in a host bank, on the PCIe bus and in a GPU slot (docs/record.md).

Sections follow each other, each starting on 64 bytes:

    gate_up tiles   g0 u0 g1 u1 ...   tile t of gate and of up alternate; rows padded to 16
    gate_up globals f32 gate, f32 up, i32 mode (0 none, 1 multiply, 2 divide)
    gate_up bias    f32 [gate rows padded][up rows padded]            only with bias
    down tiles
    down globals    f32 down, i32 unused, i32 mode
    down bias       f32 [hidden rows padded]                          only with bias

A shard is a record of a smaller expert: a slice of the intermediate dimension, whose outputs add up (design D3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import FormatError
from freetoken.formats.base import LINE_BYTES, TILE_ROWS, Format, Matrix

LAYOUT_VERSION = 1
"""Changes when any byte of any record would move."""

_MODE_NONE, _MODE_MULTIPLY, _MODE_DIVIDE = 0, 1, 2


@dataclass(frozen=True)
class Expert:
    """One expert, row-major: gate and up (I, H), down (H, I), and fp32 biases (I,), (I,), (H,) or all None."""

    gate: Matrix
    up: Matrix
    down: Matrix
    gate_bias: NDArray[np.float32] | None = None
    up_bias: NDArray[np.float32] | None = None
    down_bias: NDArray[np.float32] | None = None

    def shard(self, start: int, stop: int) -> Expert:
        """The small expert of intermediate rows [start, stop); only the shard at 0 keeps the down bias."""
        biases = shard_biases((self.gate_bias, self.up_bias, self.down_bias), start, stop)
        return Expert(self.gate.rows(start, stop), self.up.rows(start, stop), self.down.columns(start, stop), *biases)


Biases = tuple[NDArray[np.float32] | None, NDArray[np.float32] | None, NDArray[np.float32] | None]
"""Of gate, up and down."""


def shard_biases(biases: Biases, start: int, stop: int) -> Biases:
    """Those of the shard of intermediate rows [start, stop)."""
    gate, up, down = biases
    if down is not None and start:
        down = np.zeros_like(down)
    return None if gate is None else gate[start:stop], None if up is None else up[start:stop], down


def shard_bounds(fmt: Format, intermediate: int, parts: int, step: int = 1) -> list[tuple[int, int]]:
    """Cut [0, intermediate) into `parts` slices on the format's granule, as even as whole granules allow.

    step: cut at multiples of this, too. 2880 in four parts of granule 32 is 23, 23, 22 and 22 blocks. The last slice
    ends at `intermediate`, which may lie inside a tile (bf16, 88: 48 and 40). Raises `FormatError` when a width cannot
    be held or has fewer granules than parts.
    """
    fmt.check_width(intermediate, "the expert width")
    granule = math.lcm(fmt.granule, step)
    granules = -(-intermediate // granule)
    if not 1 <= parts <= granules:
        raise FormatError(
            f"{fmt.name}: a width of {intermediate} is {granules} granules of {granule} and cannot make {parts}",
            format=fmt.name,
        )
    small, larger = divmod(granules, parts)
    edges = [0]
    for part in range(parts):
        edges.append(min(edges[-1] + (small + (part < larger)) * granule, intermediate))
    return list(pairwise(edges))


@dataclass(frozen=True)
class RecordLayout:
    """Where everything of one expert lies: for a format, widths hidden (H) and intermediate (I), bias or none."""

    format: Format
    hidden: int
    intermediate: int
    bias: bool = False

    def __post_init__(self) -> None:
        self.format.check_width(self.hidden, "the hidden size")
        self.format.check_width(self.intermediate, "the expert width")

    @property
    def gate_tiles(self) -> int:
        """Tiles of gate (and as many of up)."""
        return -(-self.intermediate // TILE_ROWS)

    @property
    def down_tiles(self) -> int:
        """Tiles of down."""
        return -(-self.hidden // TILE_ROWS)

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Section name -> (offset, bytes). The order is the order in memory."""
        sizes = {
            "gate_up": 2 * self.gate_tiles * self.format.tile_bytes(self.hidden),
            "gate_up_globals": LINE_BYTES,
            "gate_up_bias": 2 * self.gate_tiles * TILE_ROWS * 4 if self.bias else 0,
            "down": self.down_tiles * self.format.tile_bytes(self.intermediate),
            "down_globals": LINE_BYTES,
            "down_bias": self.down_tiles * TILE_ROWS * 4 if self.bias else 0,
        }
        table, offset = {}, 0
        for name, size in sizes.items():
            table[name] = (offset, size)
            offset += -(-size // LINE_BYTES) * LINE_BYTES
        return table

    @property
    def nbytes(self) -> int:
        """Bytes of one record, a multiple of 64."""
        offset, size = self.sections["down_bias"]
        return offset + -(-size // LINE_BYTES) * LINE_BYTES

    def pack(self, expert: Expert, out: NDArray[np.uint8]) -> None:
        """Write an expert into `out` (nbytes,) uint8; every byte of it is set. Shapes must fit the layout."""
        self.check(expert)
        pairs = self._view(out, "gate_up").reshape(self.gate_tiles, 2, -1)
        self.format.pack(expert.gate, pairs[:, 0])
        self.format.pack(expert.up, pairs[:, 1])
        self.format.pack(expert.down, self._view(out, "down").reshape(self.down_tiles, -1))
        factors = expert.gate.global_scale, expert.up.global_scale, expert.down.global_scale
        divides = expert.gate.divides, expert.down.divides
        self.pack_rest(out, factors, divides, (expert.gate_bias, expert.up_bias, expert.down_bias))

    def pack_rest(
        self,
        out: NDArray[np.uint8],
        factors: tuple[float, float, float],
        divides: tuple[bool, bool],
        biases: Biases,
    ) -> None:
        """Write all but the tiles: global scales of gate, up and down; whether the first two, and the last, divide."""
        down, size = self.sections["down"]
        out[self.sections["gate_up"][1] : down] = 0  # what follows the tiles is not written whole
        out[down + size :] = 0
        self._write_globals(out, "gate_up_globals", factors[0], factors[1], divides[0])
        self._write_globals(out, "down_globals", factors[2], 1.0, divides[1])
        if self.bias:
            gate_up = self._view(out, "gate_up_bias").view(np.float32).reshape(2, -1)
            gate_up[0, : self.intermediate] = biases[0]
            gate_up[1, : self.intermediate] = biases[1]
            self._view(out, "down_bias").view(np.float32)[: self.hidden] = biases[2]

    def unpack(self, record: NDArray[np.uint8]) -> Expert:
        """The inverse of `pack`."""
        pairs = self._view(record, "gate_up").reshape(self.gate_tiles, 2, -1)
        down = self._view(record, "down").reshape(self.down_tiles, -1)
        gate_value, up_value, divides = self._read_globals(record, "gate_up_globals")
        down_value, _, down_divides = self._read_globals(record, "down_globals")

        def matrix(tiles: NDArray[np.uint8], n: int, k: int, value: float, divide: bool) -> Matrix:
            plain = self.format.unpack(tiles, n, k)
            return Matrix(self.format, plain.codes, plain.scales, value, divide)

        biases: list[NDArray[np.float32] | None] = [None, None, None]
        if self.bias:
            gate_up = self._view(record, "gate_up_bias").view(np.float32).reshape(2, -1)[:, : self.intermediate]
            biases = [gate_up[0], gate_up[1], self._view(record, "down_bias").view(np.float32)[: self.hidden]]
        return Expert(
            matrix(pairs[:, 0], self.intermediate, self.hidden, gate_value, divides),
            matrix(pairs[:, 1], self.intermediate, self.hidden, up_value, divides),
            matrix(down, self.hidden, self.intermediate, down_value, down_divides),
            *biases,
        )

    def _view(self, record: NDArray[np.uint8], section: str) -> NDArray[np.uint8]:
        offset, size = self.sections[section]
        return record[offset : offset + size]

    def _write_globals(self, out: NDArray[np.uint8], section: str, first: float, second: float, divides: bool) -> None:
        line = self._view(out, section)
        line[:8].view(np.float32)[...] = [first, second]
        mode = _MODE_DIVIDE if divides else _MODE_MULTIPLY
        line[8:12].view(np.int32)[...] = _MODE_NONE if first == second == 1.0 else mode

    def _read_globals(self, record: NDArray[np.uint8], section: str) -> tuple[float, float, bool]:
        line = self._view(record, section)
        first, second = line[:8].view(np.float32)
        return float(first), float(second), int(line[8:12].view(np.int32)[0]) == _MODE_DIVIDE

    def check(self, expert: Expert) -> None:
        """Raise `FormatError` unless an expert has this layout's shapes, format and biases."""
        wanted = {
            "gate": (self.intermediate, self.hidden),
            "up": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }
        for name, shape in wanted.items():
            matrix: Matrix = getattr(expert, name)
            if matrix.format is not self.format or matrix.shape != shape:
                raise FormatError(
                    f"{name} is {matrix.format.name} {matrix.shape}, expected {self.format.name} {shape}",
                    format=self.format.name,
                    shape=matrix.shape,
                )
        if expert.gate.divides != expert.up.divides:
            raise FormatError("gate and up globals differ in direction", format=self.format.name)
        for name, (rows, _) in wanted.items():
            bias: NDArray[np.float32] | None = getattr(expert, f"{name}_bias")
            if (None if bias is None else bias.shape) != ((rows,) if self.bias else None):
                raise FormatError(
                    f"{name}_bias is {None if bias is None else bias.shape}, expected {(rows,) if self.bias else None}",
                    format=self.format.name,
                )
