"""Locked and swapped-out pages, as the kernel and as recorded lines tell."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from freetoken.memory.mapping import map_bytes
from freetoken.memory.residency import Residency, lock, read
from tests.support.sysfs import FakeSystem

KIB = 1024


class Span:
    """Looks like an array at a place of memory that nobody reads."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.ctypes = type("", (), {"data": start})
        self.nbytes = nbytes


SMAPS = """\
10000000-10100000 rw-p 00000000 00:00 0
Size:               1024 kB
Rss:                 100 kB
Swap:                 16 kB
SwapPss:              16 kB
Locked:                0 kB
VmFlags: rd wr mr mw me ac hg
20000000-20400000 rw-p 00000000 00:00 0                                  [anon: x]
Size:               4096 kB
Swap:               2048 kB
Locked:             4096 kB
7f0000000000-7f0000001000 r--p 00000000 fe:00 1                          /usr/lib/a: b.so
Swap:                  4 kB
"""


@pytest.mark.parametrize(
    ("spans", "swapped", "locked"),
    [
        ([(0x10000000, 0x100000)], 16, 0),
        ([(0x20000000, 0x400000)], 2048, 4096),
        ([(0x10000000, 0x100000), (0x20000000, 0x400000)], 2064, 4096),
        ([(0x20000000, 0x100000)], 1024, 1024),  # a quarter of the mapping: no more than all of that
        ([(0x20000000, 0x200000), (0x20200000, 0x200000)], 2048, 4096),
        ([(0x30000000, 0x100000)], 0, 0),
        ([], 0, 0),
    ],
)
def test_mappings_that_overlap_count(tmp_path: Path, spans: list[tuple[int, int]], swapped: int, locked: int) -> None:
    FakeSystem(tmp_path).write("/proc/self/smaps", SMAPS)
    found = read([Span(*span) for span in spans], tmp_path)  # type: ignore[misc]
    assert found == Residency(swapped * KIB, locked * KIB)


def test_nothing_is_said_where_there_is_no_such_file(tmp_path: Path) -> None:
    assert read([np.zeros(1 << 20)], tmp_path) == Residency()


def locked_kib() -> int:
    found = re.search(r"^VmLck:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_a_lock_is_seen_and_goes_with_its_mapping() -> None:
    before, array = locked_kib(), map_bytes(1 << 20)
    try:
        lock(array)
    except MemoryError:
        pytest.skip("this process may not lock 1 MiB of memory")
    assert locked_kib() - before == 1024
    assert read([array]).locked_bytes == 1 << 20
    del array
    assert locked_kib() == before


LOCK_TOO_MUCH = """
import os, resource, sys
from freetoken.memory.mapping import map_bytes
from freetoken.memory.residency import lock
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.geteuid() == 0:  # root may lock anything
    os.setuid(65534)
try:
    lock(map_bytes(1 << 20))
except MemoryError as error:
    print(type(error).__name__, error)
"""


def test_a_refused_lock_names_the_limit() -> None:
    out = subprocess.run([sys.executable, "-c", LOCK_TOO_MUCH], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert re.match(r"CapacityError locking a bank needs 1\.00 MiB .* 64\.0 KiB .* RLIMIT_MEMLOCK", out.stdout)
