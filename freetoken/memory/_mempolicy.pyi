from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SUPPORTED: bool
DEFAULT: int
PREFERRED: int
BIND: int
INTERLEAVE: int
MAP_HUGETLB: int
MADV_POPULATE_WRITE: int

def mbind(address: int, nbytes: int, mode: int, nodes: Sequence[int] = ()) -> None: ...
def set_mempolicy(mode: int, nodes: Sequence[int] = ()) -> None: ...
def get_mempolicy(address: int = 0) -> tuple[int, tuple[int, ...]]: ...
def locate_pages(pages: NDArray[np.uintp], nodes: NDArray[np.int32]) -> None: ...
