"""The experts that peers get, and what a layer of them gives: a peer that computes something else may not race.

All come from one random expert. Number n of all layers' experts has the rows of its three matrices rotated by n, so
that no two are alike and a wrong one is seen, and yet the fp32 values of one are enough to check all.
"""

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from protocol import Task

TOLERANCE = 0.03
"""Relative to the norm of a layer's output. bf16 gives up to 0.006, int8 activations 0.012, one wrong of 8 0.37."""

Values = NDArray[np.float32]


def map_huge(nbytes: int) -> NDArray[np.uint8]:
    """Zeros, on huge pages where the system has them, as freetoken's banks are: no peer loses by its pages."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def rotate(rows: NDArray[Any], number: int) -> NDArray[Any]:
    """A matrix of expert `number`, in whatever form it has rows."""
    return np.roll(rows, number, axis=0)


@dataclass(frozen=True)
class Expert:
    """Gate and up (I, H), down (H, I)."""

    gate: Values
    up: Values
    down: Values

    def run(self, x: Values, number: int) -> Values:
        """What expert `number` makes of x (H,)."""
        gate, up = (rotate(matrix @ x, number) for matrix in (self.gate, self.up))
        return rotate(self.down @ (gate / (1 + np.exp(-gate)) * up), number)


class Problem:
    """A task's expert and inputs, all from one seed."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._random = np.random.default_rng(0)
        h, i = task.hidden, task.width
        self.expert = Expert(*(0.05 * self._normal(n, k) for n, k in ((i, h), (i, h), (h, i))))
        self.x = self._normal(h)
        weights = 0.5 + self._random.random(task.top_k, np.float32)
        self.weights = weights / weights.sum()

    def _normal(self, *shape: int) -> Values:
        return self._random.standard_normal(shape, np.float32)

    def routes(self, count: int) -> NDArray[np.int32]:
        """Random experts (count, K), those of each row distinct."""
        draws = [self._random.permutation(self.task.experts)[: self.task.top_k] for _ in range(count)]
        return np.stack(draws).astype(np.int32)

    def check(self, layer: int, ids: NDArray[np.int32], found: Values, held: Expert) -> None:
        """Raise if `found` (H,) is not what a layer gives for x and `ids` (K,); held: the expert as the side has it."""
        numbers = layer * self.task.experts + ids
        expected = sum(w * held.run(self.x, n) for w, n in zip(self.weights, numbers.tolist(), strict=True))
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        if not error < TOLERANCE:
            raise ArithmeticError(f"layer {layer} differs from NumPy by {error:.3g}, expected less than {TOLERANCE}")
