"""Rows of a table on disk against what the drive gives at random: the same reads, as many in flight, nothing done.

The table is a temporary file of 4 GiB; both sides read it directly, and its pages are dropped before each round. Each
round asks for other rows, so few that hardly two of them share a read. The drive is asked for the sectors that such
rows lie in, in random order and in order: the better rate counts. `fio`, if it is installed, gives a rate of its own.
"""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interleave import compare
from numpy.typing import NDArray

from freetoken.rows import DiskRowTable, RowFile
from freetoken.rows._reader import read_spans
from tests.support.seccomp import RING_SETUP, refuse_calls

ROW_BYTES, OFFSET = 160, 1000
FILE_BYTES = 4 << 30
ROWS = (FILE_BYTES - OFFSET) // ROW_BYTES
SECTOR = 512
ROUNDS = 9
COUNTS = {1: 5_000, 16: 10_000, 64: 20_000, 256: 20_000}
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


def open_table(file: Path, depth: int) -> DiskRowTable:
    return DiskRowTable.open([RowFile(file, OFFSET, ROWS * ROW_BYTES)], ROWS, ROW_BYTES, "U8", depth=depth)


def open_without_ring(file: Path, depth: int) -> DiskRowTable:
    """As where io_uring is refused, which it is in a thread that ends when the table is open."""

    def refuse() -> DiskRowTable:
        refuse_calls((RING_SETUP,), errno.EPERM)
        return open_table(file, depth)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(refuse).result()


def check(table: DiskRowTable, file: Path, rng: np.random.Generator) -> None:
    ids = draw(rng, 200)
    with file.open("rb") as stream:
        for number, row in zip(ids, table.gather(ids), strict=True):
            stream.seek(OFFSET + int(number) * ROW_BYTES)
            assert stream.read(ROW_BYTES) == row.tobytes()


@pytest.mark.parametrize("depth", COUNTS)
def bench_rate(benchmark: Any, file: Path, depth: int) -> None:
    """Rows a second, and the share of the drive's reads a second in the same round."""
    n, rng = COUNTS[depth], np.random.default_rng(depth)
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    with open_table(file, depth) as table, open_without_ring(file, depth) as by_threads:
        sides = {
            "rows": partial(gather, table, rng, n),
            "by threads": partial(gather, by_threads, rng, n),
            "drive": partial(read_drive, fd, rng, n, depth, in_order=False),
            "drive in order": partial(read_drive, fd, rng, n, depth, in_order=True),
        }
        for side in (table, by_threads):
            check(side, file, rng)
        found = benchmark.pedantic(lambda: compare(sides, ROUNDS, partial(forget, file)), rounds=1)
        how = table.reading, by_threads.reading
    os.close(fd)
    rates = {side: n / found.median(side) for side in sides}
    shares = {
        side: min(found.ratio(side, base) for base in ("drive", "drive in order")) for side in ("rows", "by threads")
    }
    fio = ask_fio(file, depth)
    benchmark.extra_info.update(rates=rates, shares=shares, fio=fio, how=how)
    text = ", ".join(f"{side} {rate:,.0f}" for side, rate in rates.items())
    other = f"fio {fio:,.0f}" if fio else "fio is not installed"
    print(f"\n{depth:>3} in flight, reads/s: {text}, {other}")
    print(f"    of the drive: {shares['rows']:.2f} {how[0]}; {shares['by threads']:.2f} {how[1]}")


@pytest.mark.parametrize("tokens", [1, 8])
def bench_step(benchmark: Any, file: Path, tokens: int) -> None:
    """The time of a step's 16 rows a token, by a duty, against that of one read of the drive."""
    rng = np.random.default_rng(tokens)
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    ids, out = np.zeros((tokens, 16), np.int64), np.zeros((tokens, 16, ROW_BYTES), np.uint8)
    with open_table(file, 256) as table:
        duty = table.stage(ids, out)

        def step() -> None:
            ids[...] = draw(rng, ids.size).reshape(ids.shape)
            duty()

        sides = {"step": step, "read": partial(read_drive, fd, rng, 100, 1, in_order=False)}
        found = benchmark.pedantic(lambda: compare(sides, 300, lambda: None), rounds=1)
    os.close(fd)
    spent, one = sorted(found.seconds["step"]), found.median("read") / 100
    p50, p99 = spent[len(spent) // 2], spent[len(spent) * 99 // 100]
    benchmark.extra_info.update(p50=p50, p99=p99, one_read=one)
    print(f"\n{ids.size} rows: p50 {p50 * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us; one read {one * 1e6:.0f} us")


def bench_memory(benchmark: Any, file: Path) -> None:
    """What a process grows by while it gathers more rows than are sorted at once."""
    ids, out = draw(np.random.default_rng(0), 600_000), np.ones((600_000, ROW_BYTES), np.uint8)
    with open_table(file, 256) as table:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here on
        before = held_kib("VmRSS")
        benchmark.pedantic(lambda: table.gather(ids, out), rounds=1)
        grown, held = (held_kib("VmHWM") - before) / 1024, table.held_bytes / 2**20
    benchmark.extra_info.update(grown_mib=grown, held_mib=held)
    print(f"\n{ids.size} rows at once: the process grew by {grown:.1f} MiB; the table may hold {held:.1f} MiB")
