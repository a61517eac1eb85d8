"""Expert layers as duties of a standing team, against calls of the same layers: GB/s, share of the roof, and the trip.

This thread plays the device: it counts a bell up, spins until the answer is there, and takes it. It needs a core of its
own, so the team has one thread less than there are workers (FREETOKEN_BENCH_THREADS: so many).
"""

import os
import statistics
import threading
import time
from typing import Any

import numpy as np
import pytest
from layers import Layers, Shape, roof

from freetoken import formats, topology
from freetoken.device.base import make_flags
from freetoken.duties import Duty, Line, Worker
from freetoken.duties._layer import LayerWork
from freetoken.kernels._experts import Scratch

SHAPES = {"qwen3-30b": Shape(2048, 768, 128, 8), "gpt-oss": Shape(2880, 2880, 32, 4, gpt_oss=True)}
ROUNDS = 7
STEPS = 200
THREADS = int(os.environ.get("FREETOKEN_BENCH_THREADS", max(1, len(topology.read().workers()) - 1)))


class Team:
    """A worker, and one duty for each layer over the same buffers."""

    def __init__(self, layers: Layers) -> None:
        self.x, self.weights = layers.inputs(1)
        self.ids = np.zeros((1, layers.shape.top_k), np.int32)
        self.out = np.zeros_like(self.x)
        scratch = Scratch()
        works = [
            LayerWork(layer.kernel, self.x, self.ids, self.weights, self.out, scratch, THREADS)  # type: ignore[arg-type]
            for layer in layers.bound
        ]
        flags = make_flags(2 * len(works))
        self.bells, self.answers = flags[::2], flags[1::2]
        names = enumerate(zip(works, self.answers, self.bells, strict=True))
        self.line = Line(Duty("experts", i, work, answer, bell) for i, (work, answer, bell) in names)
        self.worker = Worker("experts", THREADS)
        self.steps = 0
        threading.Thread(target=self.worker.run, daemon=True).start()

    def step(self, ids: np.ndarray) -> list[float]:
        """Seconds from bell to answer, layer by layer."""
        self.steps += 1
        self.worker.post(self.line, 2 * self.steps, self.steps)
        found = []
        for bell, answer, routes in zip(self.bells, self.answers, ids, strict=True):
            self.ids[:] = routes
            words = answer.words
            start = time.perf_counter()
            bell.words[0] += 2
            while not words[0]:
                pass
            found.append(time.perf_counter() - start)
            words[0] = 0
        while self.worker.done < self.steps:
            pass
        return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["bf16", "nvfp4", "mxfp4"])
def bench_team(benchmark: Any, name: str, shape: str) -> None:
    """The same layers, called and as duties, in turn."""
    layers = Layers(SHAPES[shape], formats.get(name), THREADS, 3 << 30)
    team = Team(layers)
    steps = max(1, STEPS // len(layers.bound))
    shares: dict[str, list[float]] = {"called": [], "as duties": []}
    times: dict[str, list[float]] = {side: [] for side in shares}

    def run() -> None:
        before = roof(layers.memory, THREADS)
        for _ in range(ROUNDS):
            ids = [layers.routes(1) for _ in range(steps * len(layers.bound))]
            called = layers.run(ids, team.x, team.weights) / len(ids)
            duties = [
                t
                for at in range(0, len(ids), len(layers.bound))
                for t in team.step(np.stack(ids[at:][: len(layers.bound)]))
            ]
            after = roof(layers.memory, THREADS)
            for side, seconds in (("called", called), ("as duties", statistics.mean(duties))):
                times[side].append(seconds)
                shares[side].append(layers.token_bytes / seconds / ((before + after) / 2))
            before = after

    benchmark.pedantic(run, rounds=1)
    team.worker.stop()
    text = "; ".join(
        f"{side} {statistics.median(times[side]) * 1e6:.0f} us = {statistics.median(found):.2f}"
        for side, found in shares.items()
    )
    print(f"\n{name:<9} {SHAPES[shape]!s:<24} {THREADS} threads, of the roof: {text}")


def bench_trip(benchmark: Any) -> None:
    """From bell to answer where there is nothing to compute."""
    team = Team(Layers(SHAPES["qwen3-30b"], formats.get("nvfp4"), THREADS, 1))
    nowhere = np.full((1, *team.ids.shape), -1, np.int32)

    def run() -> list[float]:
        return sorted(t for _ in range(5000) for t in team.step(nowhere))

    found = benchmark.pedantic(run, rounds=1)
    team.worker.stop()
    p50, p99 = (found[int(len(found) * part)] * 1e6 for part in (0.5, 0.99))
    print(f"\n{THREADS} threads: p50 {p50:.1f} us, p99 {p99:.1f} us")
