from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from freetoken.duties._worker import TeamWork
from freetoken.kernels._experts import ExpertLayer, Scratch
from freetoken.kernels._shards import ShardedLayer

@final
class LayerWork(TeamWork):
    def __new__(
        cls,
        experts: ExpertLayer | ShardedLayer,
        x: NDArray[Any],
        ids: NDArray[np.int32],
        weights: NDArray[np.float32],
        out: NDArray[Any],
        scratch: Scratch,
        n_threads: int,
        took: NDArray[np.int64] | None = None,
    ) -> LayerWork: ...
