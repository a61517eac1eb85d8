"""A table in memory answers as one on disk does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from freetoken.errors import RowError
from freetoken.rows import DiskRowTable, MemoryRowTable, RowFile
from tests.support.rows import random_rows

N, ROW_BYTES = 300, 64


def test_the_same_as_on_disk(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows, scales = random_rows(rng, N, ROW_BYTES), rng.random((N, 1), np.float32) + 1
    (tmp_path / "rows").write_bytes(rows.tobytes())
    (tmp_path / "scales").write_bytes(scales.tobytes())
    of_rows = DiskRowTable.open([RowFile(tmp_path / "scales")], N, 4, "F32")
    disk = DiskRowTable.open([RowFile(tmp_path / "rows")], N, ROW_BYTES, "BF16", of_rows)
    memory = MemoryRowTable(rows, "BF16", MemoryRowTable(scales.view(np.uint8), "F32"))
    with disk, memory:
        assert (memory.rows, memory.row_bytes, memory.width) == (disk.rows, disk.row_bytes, disk.width)
        for ids in (5, [], rng.integers(0, N, (7, 16))):
            np.testing.assert_array_equal(memory.gather(ids), disk.gather(ids))
            np.testing.assert_array_equal(memory.gather_scales(ids), disk.gather_scales(ids))
        for ids in ([3, -1], [N]):
            messages = set()
            for table in (disk, memory):
                with pytest.raises(RowError) as caught:
                    table.gather(ids)
                messages.add(str(caught.value).replace(table.name, "it"))
            assert len(messages) == 1


def test_scales_of_all_rows() -> None:
    rows = np.zeros((2, 4), np.uint8)
    assert MemoryRowTable(rows, "U8").gather_scales([1, 0]).tolist() == [1.0, 1.0]
    assert MemoryRowTable(rows, "U8", -0.5).gather_scales([1]).tolist() == [-0.5]


def test_the_rows_are_not_copied() -> None:
    rows = np.zeros((2, 4), np.uint8)
    table = MemoryRowTable(rows, "U8")
    rows[1] = 7
    assert table.gather([1]).tolist() == [[7] * 4]


@pytest.mark.parametrize("rows", [np.zeros(4, np.uint8), np.zeros((2, 4), np.int8)])
def test_what_are_no_rows(rows: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    with pytest.raises(ValueError, match=r"expected uint8 \(rows, row_bytes\)"):
        MemoryRowTable(rows, "U8")
