from typing import final

import numpy as np
from numpy.typing import NDArray

@final
class Stop:
    def set(self) -> None: ...

@final
class HostWait:
    def __new__(cls, words: NDArray[np.uint32], take: bool, stop: Stop) -> HostWait: ...
    def enqueue(self, function: int, stream: int) -> int: ...
