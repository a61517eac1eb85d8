"""Direct reads: the bytes of the file, wherever they lie, in whatever pieces and whatever the file system refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freetoken.checkpoint.direct import BLOCK, read_direct
from freetoken.checkpoint.safetensors import TensorInfo
from freetoken.errors import CheckpointError
from freetoken.memory.mapping import map_bytes

SIZE = 5 * BLOCK + 192


@pytest.fixture
def info(tmp_path: Path) -> TensorInfo:
    data = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    data.tofile(tmp_path / "f")
    return TensorInfo("t", "U8", (SIZE,), tmp_path / "f", 0, SIZE)


def check_read(info: TensorInfo, offset: int, nbytes: int, shift: int = 0) -> None:
    """Into memory that lies as the file does, moved by `shift` bytes; the bytes around it stay."""
    memory: NDArray[np.uint8] = map_bytes(SIZE + 2 * BLOCK)
    memory[...] = 0xA5
    start = offset + shift
    read_direct(info, offset, memory[start : start + nbytes])
    expected = np.full_like(memory, 0xA5)
    expected[start : start + nbytes] = np.fromfile(info.file, np.uint8)[offset : offset + nbytes]
    np.testing.assert_array_equal(memory, expected)


RANGES = [(0, SIZE), (64, SIZE - 64), (0, BLOCK), (BLOCK, 2 * BLOCK), (100, 50), (BLOCK - 64, 128), (4032, 64), (8, 0),
          (64, 2 * BLOCK), (SIZE - 10, 10)]  # fmt: skip


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
@pytest.mark.parametrize("shift", [0, 64, BLOCK])
def test_any_range(info: TensorInfo, offset: int, nbytes: int, shift: int) -> None:
    check_read(info, offset, nbytes, shift)


def record_reads(monkeypatch: pytest.MonkeyPatch, read: Callable[..., int]) -> list[tuple[int, int]]:
    """(offset, bytes asked for) of every direct read, which `read` answers."""
    seen: list[tuple[int, int]] = []

    def preadv(fd: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError(errno.EAGAIN, "not cached")
        seen.append((offset, sum(len(b) for b in buffers)))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return seen


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct reads")
def test_whole_blocks_are_read_directly(info: TensorInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        os.close(os.open(info.file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct reads")
    seen = record_reads(monkeypatch, os.preadv)
    check_read(info, 64, SIZE - 64)
    assert seen == [(BLOCK, 4 * BLOCK)]


@pytest.mark.parametrize("most", [BLOCK, 2 * BLOCK, 100, BLOCK + 512, 0])
def test_short_direct_reads(info: TensorInfo, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """One that stops inside a block, and none at all, is gone on with plainly."""
    real = os.preadv
    seen = record_reads(monkeypatch, lambda fd, b, at: real(fd, [b[0][:most]], at) if most else 0)
    monkeypatch.setattr(os, "O_DIRECT", os.O_CLOEXEC)  # any file system
    check_read(info, 0, SIZE)
    assert len(seen) == {BLOCK: 5, 2 * BLOCK: 3}.get(most, 1)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_refused_direct_reads(info: TensorInfo, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "O_DIRECT", os.O_CLOEXEC)
    record_reads(monkeypatch, refuse)
    check_read(info, 0, SIZE)


def test_without_direct_reads(info: TensorInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    check_read(info, 0, SIZE)


def test_short_plain_reads(info: TensorInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """`readinto` may give less than asked for as well."""
    real = Path.open

    class Short:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> Short:
            return self

        def __exit__(self, *args: object) -> None:
            self.stream.close()

        def seek(self, offset: int) -> None:
            self.stream.seek(offset)

        def readinto(self, view: memoryview) -> int:
            return int(self.stream.readinto(view[:1000]))

    monkeypatch.setattr(Path, "open", lambda self, *args, **kwargs: Short(real(self, *args, **kwargs)))
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    memory = np.empty(SIZE, np.uint8)
    read_direct(info, 0, memory)
    monkeypatch.undo()
    np.testing.assert_array_equal(memory, np.fromfile(info.file, np.uint8))


def test_a_file_that_ends_early(info: TensorInfo) -> None:
    with pytest.raises(CheckpointError, match=r"f ended while tensor 't' was read"):
        read_direct(info, BLOCK, np.empty(SIZE, np.uint8))
    info.file.unlink()
    with pytest.raises(CheckpointError, match="tensor 't' cannot be read: No such file"):
        read_direct(info, 0, map_bytes(SIZE))


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system does not tell what is cached")
@pytest.mark.parametrize(
    ("most", "there", "enough"), [(SIZE, SIZE, True), (BLOCK, SIZE, True), (SIZE, 2 * BLOCK, False), (100, SIZE, False)]
)
def test_what_is_cached_is_not_read_from_the_disk(
    info: TensorInfo, monkeypatch: pytest.MonkeyPatch, most: int, there: int, enough: bool
) -> None:
    """All of it: where some is not, or the answer comes in pieces that end, the whole is read as if nothing were."""
    data = np.fromfile(info.file, np.uint8)
    asked: list[int] = []

    def preadv(fd: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
        asked.append(flags)
        if not flags:
            raise OSError(errno.EIO, "no disk")
        n = min(len(buffers[0]), most, max(0, there - offset) if offset < SIZE - BLOCK else BLOCK)
        if not n:
            raise BlockingIOError(errno.EAGAIN, "not cached")
        buffers[0][:n] = data[offset : offset + n].tobytes()
        return n

    monkeypatch.setattr(os, "preadv", preadv)
    memory = map_bytes(SIZE)
    read_direct(info, 0, memory)
    np.testing.assert_array_equal(memory, data)
    assert (0 not in asked) == enough
