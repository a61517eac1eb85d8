import numpy as np
from numpy.typing import NDArray

WAYS: tuple[str, ...]
STEP: int

def read(memory: NDArray[np.uint8], way: str, n_threads: int) -> int: ...
