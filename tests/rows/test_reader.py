"""What is not seen through a table: the plain loop that rates are compared with."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from freetoken.rows._reader import read_spans
from tests.support.seccomp import RING_SETUP, refuse_calls


@pytest.mark.parametrize("depth", [1, 7, 64])
def test_spans(tmp_path: Path, depth: int) -> None:
    """All of them are read, or an error says that one was not."""
    (tmp_path / "f").write_bytes(bytes(10_000))
    offsets = np.arange(50, dtype=np.int64) * 100
    lengths = np.full(50, 5000, np.int64)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        read_spans(fd, offsets, lengths, depth)
        read_spans(fd, offsets[:0], lengths[:0], depth)
        lengths[37] = 10_000
        with pytest.raises(OSError, match="a plain read") as caught:
            read_spans(fd, offsets, lengths, depth)
        assert caught.value.errno == errno.EINVAL
        with pytest.raises(AssertionError):
            read_spans(fd, offsets, lengths[:-1], depth)
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="a plain read") as caught:
        read_spans(-1, offsets, lengths, depth)
    assert caught.value.errno == errno.EBADF


def test_spans_without_a_ring(tmp_path: Path) -> None:
    def read() -> None:
        refuse_calls((RING_SETUP,), errno.EPERM)
        read_spans(0, np.zeros(1, np.int64), np.ones(1, np.int64), 1)

    with ThreadPoolExecutor(1) as pool, pytest.raises(PermissionError):
        pool.submit(read).result()
