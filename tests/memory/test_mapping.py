"""A mapped file is its bytes, read-only, shared, and given back when nothing views it."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from freetoken.memory.mapping import map_file


def test_a_mapped_file(tmp_path: Path) -> None:
    file = tmp_path / "f"
    data = np.random.default_rng(0).integers(0, 256, 3 * 4096 + 64, np.uint8)
    data.tofile(file)
    for offset, nbytes in ((0, data.size), (4096, 8192), (64, 1), (8192, 4160)):
        mapped = map_file(file, offset, nbytes)
        np.testing.assert_array_equal(mapped, data[offset : offset + nbytes])
        assert not mapped.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            mapped[0] = 1
    with file.open("r+b") as stream:
        stream.seek(8192)
        stream.write(b"\0" * 64)
    assert not mapped[:64].any(), "the pages are the file's"
    file.unlink()
    np.testing.assert_array_equal(mapped[64:], data[8192 + 64 :])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not tell what is mapped")
def test_it_is_given_back(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x" * 8192)
    view = map_file(file, 4096, 4096)[10:20]
    assert str(file) in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="mmap"):
        map_file(file, 0, 200)
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "absent", 0, 1)
