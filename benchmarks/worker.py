"""One side of a comparison: expert layers over banks of their own, driven by another program.

    python benchmarks/worker.py FORMAT H I E K LAYERS THREADS

prints `READY <bytes that a token reads in a layer> <note>`, and then, for each line `run SECONDS` on standard input,
`<layers run> <seconds>`. A token goes through a layer at a time; its K experts of the E are drawn at random, distinct,
for every step, and the layers take turns, so that all banks are touched. The input ends it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from layers import Layers, Shape

from freetoken import formats

BATCH = 64
"""Layers run between two looks at the clock."""


def main(arguments: list[str]) -> None:
    name, *numbers = arguments
    hidden, width, experts, top_k, count, threads = map(int, numbers)
    layers = Layers(Shape(hidden, width, experts, top_k), formats.get(name), threads, 0, count)
    x, weights = layers.inputs(1)
    print("READY", layers.token_bytes, f"freetoken {layers.bound[0].choice.kernel}", flush=True)
    for line in sys.stdin:
        command, seconds = line.split()
        if command != "run":
            sys.exit(f"unknown command {command!r}, expected run SECONDS")
        done, spent = 0, 0.0
        while spent < float(seconds):
            spent += layers.run([layers.routes(1) for _ in range(BATCH)], x, weights)
            done += BATCH
        print(done, f"{spent:.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
