"""One layer of experts after another, over banks larger than any cache: GB/s of records, and share of the roof.

The roof is the fastest of several plain reads of the same memory by as many threads, just before and just after.
FREETOKEN_CPU_ISA and FREETOKEN_CPU_ACT choose other tile functions; FREETOKEN_BENCH_GIB sets the size of the banks,
FREETOKEN_BENCH_THREADS the number of threads.
"""

import itertools
import os
import statistics
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from interleave import compare
from layers import Layers, Shape, bare_loop, roof

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
    """A token at a time; also as a share of the tile function's bare loop over the same memory in the same round."""
    layers = Layers(SHAPES[shape], formats.get(name), THREADS, int(GIB * 2**30))
    x, weights = layers.inputs(1)
    steps = max(8, (1 << 30) // layers.token_bytes)
    rates, roofs, shares, bare = [], [], [], []

    def run() -> None:
        before = roof(layers.memory, THREADS)
        for _ in range(ROUNDS):
            ids = [layers.routes(1) for _ in range(steps)]
            rates.append(steps * layers.token_bytes / layers.run(ids, x, weights))
            bare.append(rates[-1] / bare_loop(layers))
            after = roof(layers.memory, THREADS)
            roofs.append((before + after) / 2)
            shares.append(rates[-1] / roofs[-1])
            before = after

    benchmark.pedantic(run, rounds=1)
    rate, top, share, of_bare = (statistics.median(values) for values in (rates, roofs, shares, bare))
    tile = layers.bound[0].choice.kernel
    benchmark.extra_info.update(gb_per_s=rate / 1e9, roof_gb_per_s=top / 1e9, share=share, bare=of_bare, tile=str(tile))
    text = f"{rate / 1e9:6.1f} of {top / 1e9:6.1f} GB/s = {share:.2f}, {of_bare:.2f} of the bare loop"
    print(f"\n{name:<9} {SHAPES[shape]!s:<24} {text}; {tile!r}")


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


@pytest.mark.parametrize("name", formats.names())
def bench_many(benchmark: Any, name: str) -> None:
    """64 tokens through the same eight experts, against torch's bf16 products alone, with weights decoded before."""
    shape, tokens = SHAPES["qwen3-30b"], 64
    layers = Layers(shape, formats.get(name), THREADS, 1 << 30)
    x, weights = layers.inputs(tokens)
    experts = [
        (torch.randn(2 * shape.width, shape.hidden).bfloat16(), torch.randn(shape.hidden, shape.width).bfloat16())
        for _ in range(8 * shape.top_k)
    ]
    given, hidden = (torch.randn(tokens, n).bfloat16() for n in (shape.hidden, shape.width))
    turn = itertools.cycle(experts)

    def products() -> None:
        for gate_up, down in itertools.islice(turn, shape.top_k):
            torch.mm(given, gate_up.T)
            torch.mm(hidden, down.T)

    torch.set_num_threads(THREADS)
    sides = {"freetoken": lambda: layers.run([layers.routes(tokens, together=True)], x, weights), "torch": products}
    found = benchmark.pedantic(lambda: compare(sides, 3 * ROUNDS), rounds=1)
    ratio = found.ratio("freetoken", "torch")
    benchmark.extra_info.update(ratio=ratio)
    print(f"\n{name:<9} {tokens} tokens: {found.median('freetoken') * 1e3:.2f} ms, {ratio:.2f} of torch's bf16 rate")


@pytest.mark.parametrize("name", ["nvfp4", "bf16"])
def bench_alternation(benchmark: Any, name: str) -> None:
    """A token through attention's products and experts in turn, against either alone: what changing over costs."""
    shape = SHAPES["qwen3-30b"]
    layers = Layers(shape, formats.get(name), THREADS, 1 << 30)
    dense = [[torch.randn(n, k).bfloat16() for n, k in ((5120, 2048), (2048, 4096))] for _ in range(16)]
    x, wide = torch.randn(1, shape.hidden).bfloat16(), torch.randn(1, 4096).bfloat16()
    weights = torch.full((1, shape.top_k), 1 / shape.top_k)
    ids = [torch.from_numpy(layers.routes(1)) for _ in range(256)]
    turn = itertools.cycle(ids)
    torch.set_num_threads(THREADS)

    def run(attention: bool, experts: bool) -> None:
        for number, (first, last) in enumerate(dense * 4):
            if attention:
                torch.nn.functional.linear(torch.nn.functional.linear(x, first)[:, :4096] + wide, last)
            if experts:
                layers.bound[number % len(layers.bound)].run(x, next(turn), weights)

    sides = {
        "attention": partial(run, True, False),
        "experts": partial(run, False, True),
        "both": partial(run, True, True),
    }
    found = benchmark.pedantic(lambda: compare(sides, 2 * ROUNDS), rounds=1)
    alone = found.median("attention") + found.median("experts")
    loss = found.median("both") / alone - 1
    benchmark.extra_info.update(loss=loss)
    times = ", ".join(f"{side} {found.median(side) / len(dense) / 4 * 1e6:.0f}" for side in sides)
    print(f"\n{name:<9} us a layer: {times}; alternating costs {loss:+.1%}")


def bench_fixed_cost(benchmark: Any) -> None:
    """A layer with no bytes to read: every route goes nowhere."""
    layers = Layers(SHAPES["tiny"], formats.get("nvfp4"), THREADS, 0)
    x, weights = layers.inputs(1)
    ids = [np.full((1, 4), -1, np.int32)] * 1000
    found = [layers.run(ids, x, weights) / len(ids) for _ in range(3 * ROUNDS)]
    benchmark.pedantic(layers.run, (ids, x, weights), rounds=1)
    benchmark.extra_info.update(us=statistics.median(found) * 1e6)
    print(f"\nfixed cost {statistics.median(found) * 1e6:.1f} us, {THREADS} threads")
