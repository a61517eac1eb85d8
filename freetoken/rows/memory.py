"""A table that lies in memory: what a small one is, and what one on disk is compared with."""

from __future__ import annotations

import numpy as np

from freetoken.rows.base import Bytes, Ids, RowTable


class MemoryRowTable(RowTable):
    """Rows that lie in memory, which is viewed, not copied."""

    def __init__(
        self, data: Bytes, dtype: str, scale: float | RowTable | None = None, name: str = "a table in memory"
    ) -> None:
        """data: (rows, row_bytes) uint8; dtype and scale: as for `RowTable`."""
        if data.ndim != 2 or data.dtype != np.uint8:
            raise ValueError(f"rows are {data.dtype} {data.shape}, expected uint8 (rows, row_bytes)")
        super().__init__(name, data.shape[0], data.shape[1], dtype, scale)
        self._data = data

    def _fill(self, ids: Ids, out: Bytes) -> None:
        bad = np.flatnonzero((ids < 0) | (ids >= self.rows))
        if bad.size:
            raise self.no_row(int(ids[bad[0]]), int(bad[0]))
        np.take(self._data, ids, axis=0, out=out.reshape(-1, self.row_bytes), mode="clip")  # checked above
