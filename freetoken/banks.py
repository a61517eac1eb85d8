"""A bank: all records of one layer in one piece of host memory. It lends views and never copies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from freetoken.formats.record import Expert, RecordLayout
from freetoken.memory.mapping import map_bytes


class Bank:
    """`n_experts` records of one layout; memory is touched only as experts are put in.

    Distinct experts may be put from several threads at once. `missing` tells which were not: a bank that is not
    complete must never be computed with. records: read-only memory (nbytes,) uint8 on 64 bytes in which they lie
    already, shared with other processes; without it the bank has memory of its own.
    """

    def __init__(self, layout: RecordLayout, n_experts: int, records: NDArray[np.uint8] | None = None) -> None:
        self.layout = layout
        self.n_experts = n_experts
        self.shared = records is not None
        memory = map_bytes(self.nbytes) if records is None else records
        self.records: NDArray[np.uint8] = memory.reshape(n_experts, layout.nbytes)
        self._present = np.zeros(n_experts, bool)

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.n_experts * self.layout.nbytes

    @property
    def missing(self) -> list[int]:
        """Experts that have not been put."""
        return [int(e) for e in np.flatnonzero(~self._present)]

    def put(self, index: int, expert: Expert) -> None:
        """Write one expert's record; raises `FormatError` when it does not fit the layout."""
        self.fill(index, lambda record: self.layout.pack(expert, record))

    def fill(self, index: int, write: Callable[[NDArray[np.uint8]], object]) -> None:
        """Have `write` put one expert's bytes into its record (in a shared bank: check them); present if it returns."""
        write(self.records[index])
        self._present[index] = True

    def get(self, index: int) -> Expert:
        """The expert read back from its record (views where the layout allows)."""
        return self.layout.unpack(self.records[index])

    def __repr__(self) -> str:
        return f"<bank {self.n_experts} x {self.layout.nbytes} bytes, {self.layout.format.name}>"
