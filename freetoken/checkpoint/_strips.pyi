from typing import Any, final

import numpy as np
from numpy.typing import NDArray

ENDED: int

def window_bytes(strip_bytes: int) -> int: ...

@final
class Reader:
    def __new__(cls) -> Reader: ...
    def has_byte(self, path: bytes, spans: list[tuple[int, int]], alarms: tuple[int, ...]) -> tuple[int, int, bool]: ...
    def write(self, pieces: list[Any], out: NDArray[np.uint8]) -> tuple[int, int, bool, bool]: ...
