import numpy as np
from numpy.typing import NDArray

from freetoken.formats.base import Format
from freetoken.kernels._isa import TileKernel

WAYS: tuple[str, ...]
STEP: int

def read(memory: NDArray[np.uint8], way: str, n_threads: int) -> int: ...
def multiply(
    records: NDArray[np.uint8],
    offset_and_size: tuple[int, int],
    fmt: Format,
    k: int,
    kernel: TileKernel,
    vector: NDArray[np.uint8],
    n_threads: int,
) -> float: ...
