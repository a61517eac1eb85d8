"""One layer of experts after another, over banks larger than any cache: GB/s of records, and share of the roof.

The roof is the fastest of several plain reads of the same memory by as many threads, just before and just after.
FREETOKEN_CPU_ISA and FREETOKEN_CPU_ACT choose other tile functions; FREETOKEN_BENCH_GIB sets the size of the banks,
FREETOKEN_BENCH_THREADS the number of threads.
"""

import os
import statistics
from typing import Any

import numpy as np
import pytest
from layers import Layers, Shape, roof

from freetoken import formats, topology

SHAPES = {
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "gpt-oss": Shape(2880, 2880, 32, 4, gpt_oss=True),
    "narrow": Shape(2560, 640, 512, 10),
    "tiny": Shape(384, 128, 32, 4),
}
BATCHES = (1, 2, 4, 8, 16, 64)
ROUNDS = 7
GIB = float(os.environ.get("FREETOKEN_BENCH_GIB", "3"))
THREADS = int(os.environ.get("FREETOKEN_BENCH_THREADS", len(topology.read().workers())))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", formats.names())
def bench_layer(benchmark: Any, name: str, shape: str) -> None:
    """A token at a time."""
    layers = Layers(SHAPES[shape], formats.get(name), THREADS, int(GIB * 2**30))
    x, weights = layers.inputs(1)
    steps = max(8, (1 << 30) // layers.token_bytes)
    rates, roofs, shares = [], [], []

    def run() -> None:
        before = roof(layers.memory, THREADS)
        for _ in range(ROUNDS):
            ids = [layers.routes(1) for _ in range(steps)]
            rates.append(steps * layers.token_bytes / layers.run(ids, x, weights))
            after = roof(layers.memory, THREADS)
            roofs.append((before + after) / 2)
            shares.append(rates[-1] / roofs[-1])
            before = after

    benchmark.pedantic(run, rounds=1)
    rate, top, share = (statistics.median(values) for values in (rates, roofs, shares))
    tile = layers.bound[0].choice.kernel
    benchmark.extra_info.update(gb_per_s=rate / 1e9, roof_gb_per_s=top / 1e9, share=share, tile=str(tile))
    print(f"\n{name:<9} {SHAPES[shape]!s:<24} {rate / 1e9:6.1f} of {top / 1e9:6.1f} GB/s = {share:.2f}; {tile!r}")


@pytest.mark.parametrize("name", formats.names())
def bench_batch(benchmark: Any, name: str) -> None:
    """Several tokens on the same experts: how many times the cost of one."""
    layers = Layers(SHAPES["qwen3-30b"], formats.get(name), THREADS, 1 << 30)
    seconds: dict[int, list[float]] = {tokens: [] for tokens in BATCHES}
    inputs = {tokens: layers.inputs(tokens) for tokens in BATCHES}

    def run() -> None:
        for _ in range(ROUNDS):
            for tokens, found in seconds.items():
                steps = max(2, 32 // tokens)
                ids = [layers.routes(tokens, together=True) for _ in range(steps)]
                found.append(layers.run(ids, *inputs[tokens]) / steps)

    benchmark.pedantic(run, rounds=1)
    median = {tokens: statistics.median(found) for tokens, found in seconds.items()}
    costs = {tokens: median[tokens] / median[1] for tokens in BATCHES}
    benchmark.extra_info.update(cost={str(tokens): cost for tokens, cost in costs.items()})
    text = ", ".join(f"{tokens}: {cost:.2f}" for tokens, cost in costs.items())
    print(f"\n{name:<9} {median[1] * 1e6:7.1f} us for one token; times for more: {text}")


def bench_fixed_cost(benchmark: Any) -> None:
    """A layer with no bytes to read: every route goes nowhere."""
    layers = Layers(SHAPES["tiny"], formats.get("nvfp4"), THREADS, 0)
    x, weights = layers.inputs(1)
    ids = [np.full((1, 4), -1, np.int32)] * 1000
    found = [layers.run(ids, x, weights) / len(ids) for _ in range(3 * ROUNDS)]
    benchmark.pedantic(layers.run, (ids, x, weights), rounds=1)
    benchmark.extra_info.update(us=statistics.median(found) * 1e6)
    print(f"\nfixed cost {statistics.median(found) * 1e6:.1f} us, {THREADS} threads")
