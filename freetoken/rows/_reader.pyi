from collections.abc import Callable
from typing import final

import numpy as np
from numpy.typing import NDArray

BAD_ID: int
CHANGED: int
ENDED: int
FAILED: int
STOPPED: int

def direct_align(fd: int) -> int: ...
def read_spans(fd: int, offsets: NDArray[np.int64], lengths: NDArray[np.int64], depth: int) -> None: ...

@final
class Reader:
    def __new__(
        cls,
        files: list[tuple[bytes, int, int]],
        parts: list[tuple[int, int, int, int]],
        rows: int,
        row_bytes: int,
        depth: int,
        slot_bytes: int,
        align: int,
        change: Callable[[str, bool, int, int, int], int] | None = None,
    ) -> Reader: ...
    @property
    def change(self) -> Callable[[str, bool, int, int, int], int] | None: ...
    @property
    def ring_error(self) -> int: ...
    @property
    def direct_error(self) -> int: ...
    @property
    def n_reads(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def n_threads(self) -> int: ...
    @property
    def stopping(self) -> bool: ...
    def stop(self) -> None: ...
    def gather(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> tuple[int, int, int, int, int, int] | None: ...
