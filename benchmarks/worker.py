"""freetoken's side of a comparison: expert layers over banks of their own, driven as `protocol.py` says."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from layers import Layers, Shape
from protocol import Ready, Task, play

import freetoken
from freetoken import formats

BATCH = 64
"""Layers run between two looks at the clock."""


def start(task: Task) -> Ready:
    shape = Shape(task.hidden, task.width, task.experts, task.top_k)
    layers = Layers(shape, formats.get(task.format), task.threads, 0, task.layers)
    x, weights = layers.inputs(1)

    def run() -> tuple[int, float]:
        return BATCH, layers.run([layers.routes(1) for _ in range(BATCH)], x, weights)

    return Ready(layers.token_bytes, f"freetoken {freetoken.__version__}, {layers.bound[0].choice.kernel}", run)


if __name__ == "__main__":
    play(start)
