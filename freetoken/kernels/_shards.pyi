from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from freetoken.kernels._experts import ExpertLayer, Scratch

@final
class ShardedLayer:
    def __new__(
        cls, layers: Sequence[ExpertLayer], teams: Sequence[int], cpus: Sequence[Sequence[int]]
    ) -> ShardedLayer: ...
    @property
    def n_experts(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    def run(
        self,
        x: NDArray[Any],
        ids: NDArray[np.int32],
        weights: NDArray[np.float32],
        out: NDArray[Any],
        scratch: Scratch,
        n_threads: int,
    ) -> None: ...
