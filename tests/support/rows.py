"""Random tables of rows in files, as they may lie, and what makes reads fail."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freetoken.rows import RowFile

Change = Callable[[str, bool, int, int, int], int]


@dataclass(frozen=True)
class Laid:
    """Rows (rows, row_bytes) uint8 and the parts of files that hold them, in order; cut: rows are, by their borders."""

    rows: NDArray[np.uint8]
    files: list[RowFile]
    cut: bool


def lay_rows(folder: Path, rng: np.random.Generator, rows: NDArray[np.uint8], parts: int, cut: bool) -> Laid:
    """Write rows in `parts` parts to at most three files, with other bytes before, between and perhaps after them."""
    unit = 1 if cut else rows.shape[1]
    borders = np.sort(rng.integers(0, rows.nbytes // unit + 1, parts - 1)) * unit
    data = np.split(rows.reshape(-1), borders)
    paths = [folder / f"part{number}" for number in range(3)]
    files = []
    for number, part in enumerate(data):
        path = paths[rng.integers(3)]
        with path.open("ab") as stream:
            stream.write(rng.bytes(int(rng.integers(1, 1500))))
            offset = stream.tell()
            stream.write(part.tobytes())
            ends_here = number == len(data) - 1 or rng.random() < 0.5
            if not ends_here:
                stream.write(rng.bytes(int(rng.integers(1, 700))))
        files.append(RowFile(path, offset, part.nbytes))
    return Laid(rows, files, cut)


def random_rows(rng: np.random.Generator, n: int, row_bytes: int) -> NDArray[np.uint8]:
    return rng.integers(0, 256, (n, row_bytes), dtype=np.uint8)


def fail_often(rng: np.random.Generator) -> Change:
    """Short reads, interrupted ones, ones without room, and direct ones that are refused or fail."""

    def change(way: str, direct: bool, offset: int, nbytes: int, result: int) -> int:
        what = rng.integers(8)
        if what == 0 and result > 1:
            return int(rng.integers(1, result))
        if what == 1:
            return -errno.EINTR
        if what == 2:
            return -errno.EAGAIN
        if direct and what == 3:
            return -errno.EIO
        if direct and what == 4 and rng.random() < 0.1:
            return -errno.EINVAL
        return result

    return change


def refuse_ring(way: str, direct: bool, offset: int, nbytes: int, result: int) -> int:
    """What a system answers that knows io_uring, but not its reads."""
    return -errno.EINVAL if way == "ring" else result


def refuse_direct(way: str, direct: bool, offset: int, nbytes: int, result: int) -> int:
    """What a file system answers that takes direct reads only when it is asked whether it does."""
    return -errno.EINVAL if direct else result


class Recorder:
    """Sees all reads: (way, direct, offset, bytes asked for)."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, bool, int, int]] = []

    def __call__(self, way: str, direct: bool, offset: int, nbytes: int, result: int) -> int:
        self.reads.append((way, direct, offset, nbytes))
        return result
