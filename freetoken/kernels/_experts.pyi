from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from freetoken.formats.record import RecordLayout
from freetoken.kernels._isa import TileKernel

@final
class Block:
    def __new__(cls, size: int) -> Block: ...

@final
class Scratch:
    def __new__(cls) -> Scratch: ...
    @property
    def nbytes(self) -> int: ...

@final
class ExpertLayer:
    def __new__(
        cls,
        bank: NDArray[np.uint8],
        layout: RecordLayout,
        kernel: TileKernel,
        activation: str = "silu",
        alpha: float = 0.0,
        limit: float = 0.0,
        rounding: str = "none",
    ) -> ExpertLayer: ...
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
