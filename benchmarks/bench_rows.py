"""Rows of a table on disk against what the drive gives at random: the same reads, as many in flight, nothing done.

The table is a temporary file of 4 GiB; both sides read it directly, and its pages are dropped before each round. Each
round asks for other rows, so few that hardly two of them share a read. The drive is asked for the sectors that such
rows lie in, in random order and in order: the better rate counts. `fio`, if it is installed, gives a rate of its own.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interleave import compare
from numpy.typing import NDArray

from freetoken.rows import DiskRowTable, RowFile
from freetoken.rows._reader import read_spans

ROW_BYTES, OFFSET = 160, 1000
FILE_BYTES = 4 << 30
ROWS = (FILE_BYTES - OFFSET) // ROW_BYTES
SECTOR = 512
ROUNDS = 7
COUNTS = {1: 1_500, 16: 10_000, 64: 20_000, 256: 20_000}
"""In flight: rows a round."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("rows")
    if shutil.disk_usage(folder).free < 2 * FILE_BYTES:
        pytest.skip(f"{folder} has not {2 * FILE_BYTES >> 30} GiB free: set --basetemp to a folder that has")
    path, rng = folder / "table", np.random.default_rng(0)
    with path.open("wb") as stream:
        for _ in range(FILE_BYTES >> 24):
            stream.write(rng.bytes(1 << 24))
        os.fsync(stream.fileno())
    yield path
    path.unlink()


def forget(file: Path) -> None:
    """Have none of the file in the page cache."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def draw(rng: np.random.Generator, n: int) -> NDArray[np.int64]:
    return rng.integers(0, ROWS, n)


def read_drive(fd: int, rng: np.random.Generator, n: int, depth: int, *, in_order: bool) -> None:
    first = OFFSET + draw(rng, n) * ROW_BYTES
    if in_order:
        first.sort()
    start = first // SECTOR * SECTOR
    read_spans(fd, start, -(-(first + ROW_BYTES) // SECTOR) * SECTOR - start, depth)


def gather(table: DiskRowTable, rng: np.random.Generator, n: int) -> None:
    table.gather(draw(rng, n))


def held_kib(what: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def ask_fio(file: Path, depth: int) -> float | None:
    """Random reads of a sector a second, by another program; None where it is not installed."""
    if shutil.which("fio") is None:
        return None
    done = subprocess.run(
        ["fio", "--name=rows", f"--filename={file}", "--rw=randread", f"--bs={SECTOR}", "--direct=1", "--readonly",
         "--ioengine=io_uring", f"--iodepth={depth}", "--runtime=3", "--time_based", "--output-format=json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(json.loads(done.stdout)["jobs"][0]["read"]["iops"])


@pytest.mark.parametrize("depth", COUNTS)
def bench_rate(benchmark: Any, file: Path, depth: int) -> None:
    """Rows a second, and the share of the drive's reads a second in the same round; RAM that a gathering adds."""
    n, rng = COUNTS[depth], np.random.default_rng(depth)
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    with DiskRowTable.open([RowFile(file, OFFSET, ROWS * ROW_BYTES)], ROWS, ROW_BYTES, "U8", depth=depth) as table:
        ids = draw(rng, 200)
        expected = [
            os.pread(fd_plain := os.open(file, os.O_RDONLY), ROW_BYTES, OFFSET + int(i) * ROW_BYTES) for i in ids
        ]
        os.close(fd_plain)
        assert [row.tobytes() for row in table.gather(ids)] == expected
        sides = {
            "rows": partial(gather, table, rng, n),
            "drive": partial(read_drive, fd, rng, n, depth, in_order=False),
            "drive in order": partial(read_drive, fd, rng, n, depth, in_order=True),
        }
        found = benchmark.pedantic(lambda: compare(sides, ROUNDS, partial(forget, file)), rounds=1)
        how = table.reading
        out, many = np.zeros((1 << 20, ROW_BYTES), np.uint8), draw(rng, 1 << 20)
        before = held_kib("VmRSS")
        table.gather(many, out)
        grown = max(held_kib("VmHWM") - before, 0) / 1024
    os.close(fd)
    rates = {side: n / found.median(side) for side in sides}
    share = min(found.ratio("rows", side) for side in sides if side != "rows")
    fio = ask_fio(file, depth)
    benchmark.extra_info.update(rates=rates, share=share, fio=fio, how=how, ram_mib=grown)
    text = ", ".join(f"{side} {rate:,.0f}/s" for side, rate in rates.items())
    other = f", fio {fio:,.0f}/s" if fio else ", fio is not installed"
    print(
        f"\n{depth:>3} in flight: {text}{other}: {share:.2f} of the drive; 1 Mi rows at once add {grown:.1f} MiB; {how}"
    )
