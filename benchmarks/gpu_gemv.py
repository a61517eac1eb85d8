"""Times the products of few tokens with quantized experts that lie on a GPU. Needs a GPU.

    python benchmarks/gpu_gemv.py [--format mxfp4 nvfp4] [--model gpt-oss-120b] [--sweep]

Gate and up, activation and down, with biases where the model has them, without the weighted sum: in CUDA C and in
Triton, and which of them `freetoken.gpu.layer` chooses. Graphs of 16 layers (48 of the smaller experts), each of slots
of its own, so that nothing that a layer reads is in a cache; "shared" are 4 tokens that have the same experts. Against
the device's own copy of 1 GiB, read and written bytes. Graphs and copy take turns in random order, each replayed once
before it is timed; medians, shares of each turn.

--sweep compares shapes of the CUDA C kernels instead, one token, two and four of mxfp4 and nvfp4.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpu_slots import capture, time_ms
from layers import Shape, make_expert

from freetoken import formats
from freetoken.device.cuda import CudaDevice
from freetoken.formats.base import Format
from freetoken.gpu.gemv import TritonGemv
from freetoken.gpu.gemv_cuda import DEFAULT, CudaGemv
from freetoken.gpu.gemv_cuda import Shape as Launch
from freetoken.gpu.layer import Gemv, LayerKernels
from freetoken.gpu.units import COLUMNS, Units

MODELS = {
    "gpt-oss-120b": (Shape(2880, 2880, 128, 4, gpt_oss=True), 16),
    "qwen3-30b-a3b": (Shape(2048, 768, 128, 8), 48),
}
"""Experts, and layers of a graph."""
CASES = {"1": (1, False), "2": (2, False), "4": (4, False), "4 shared": (4, True)}
"""Tokens, and whether they have the same experts."""
COPIED = 1 << 30
WARM_S = 0.3
SWEEP = [
    DEFAULT,
    *(
        replace(DEFAULT, **changed)
        for changed in (
            {"own": 0},
            {"depth": 3},
            {"units": 6},
            {"units": 12},
            {"resident": 4},
            {"resident": 6},
            {"tiles": 1},
            {"tiles": 4},
            {"warps": 8, "resident": 2},
        )
    ),
]
"""Shapes that may be best for 90 units of a row, four experts a token."""
BOUND = 1e-2
"""Error at which a shape is wrong, relative to Triton's output."""


class Copy:
    """A copy of 1 GiB on the device, timed as a graph is, but eager: a graph's copies are slower there."""

    def __init__(self) -> None:
        self.target, self.source = torch.empty(2, COPIED, dtype=torch.uint8, device="cuda")

    def replay(self) -> None:
        """Once."""
        self.target.copy_(self.source)


class Slots:
    """Records of one expert, in as many slots as the layers of a graph read."""

    def __init__(self, shape: Shape, layers: int, fmt: Format) -> None:
        self.shape, self.layers, self.layout = shape, layers, shape.layout(fmt)
        self.expert = make_expert(self.layout, np.random.default_rng(0))
        record = np.empty(self.layout.nbytes, np.uint8)
        self.layout.pack(self.expert, record)
        count = layers * shape.top_k * max(tokens for tokens, _ in CASES.values())
        self.records = torch.from_numpy(record).cuda().repeat(count, 1)
        self.address = self.records.data_ptr() + torch.randperm(count) * self.layout.nbytes

    def chosen(self, device: CudaDevice) -> str:
        """Name of the products that a layer takes; they have been checked."""
        kernels = LayerKernels(
            (self.layout,), self.shape.activation, self.shape.experts, device, torch.bfloat16, (self.expert,)
        )
        return kernels.name.split()[0]

    def units(self, tokens: int, shared: bool) -> list[Units]:
        """Those of each layer."""
        k = self.shape.top_k
        routes = torch.arange(tokens * k, dtype=torch.int32).view(tokens, k)
        n, columns = (k, tokens) if shared else (tokens * k, 1)
        route = torch.full((n, COLUMNS), -1, dtype=torch.int32)
        route[:, :columns] = routes.T if shared else routes.view(-1, 1)
        route = route.cuda()
        return [Units(self.address[n * layer :][:n].cuda(), route) for layer in range(self.layers)]

    def work(self, gemv: Gemv, units: Sequence[Units], tokens: int) -> tuple[Callable[[], None], torch.Tensor]:
        """What a graph does, and the outputs of its last layer's routes."""
        x = torch.randn(tokens, self.shape.hidden, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
        n = tokens * self.shape.top_k
        h = torch.empty(n, self.shape.width, device="cuda")
        y = torch.empty(n, self.shape.hidden, device="cuda")

        def run() -> None:
            for each in units:
                gemv.gate_up(x, each, self.shape.top_k, h, early=True)  # as after a look-up
                gemv.down(h, each, y)

        return run, y


def measure(
    slots: Slots, gemvs: Mapping[str, Gemv], case: str, copy: Copy, rounds: int
) -> dict[str, tuple[float, float, float]]:
    """Of each: microseconds of a layer, bytes of records a second, and their share of what a copy moves."""
    tokens, shared = CASES[case]
    units = slots.units(tokens, shared)
    nbytes = len(units[0].address) * slots.layout.nbytes
    triton, wanted = slots.work(TritonGemv(slots.layout, slots.shape.activation), units[-1:], tokens)
    triton()
    graphs = {}
    for name, gemv in gemvs.items():
        run, y = slots.work(gemv, units, tokens)
        graphs[name] = capture(run)
        y.fill_(float("nan"))
        graphs[name].replay()
        error = float((y - wanted).norm() / wanted.norm())
        if not error <= BOUND:
            raise SystemExit(f"{name}, {slots.layout.format.name}, {slots.shape}, {case} tokens: error {error:.2g}")
    warm(copy)
    order = random.Random(0)
    sides = [("", copy), *graphs.items()]
    turns = [{name: time_turn(graph) for name, graph in order.sample(sides, len(sides))} for _ in range(rounds)]
    found = {}
    for name in graphs:
        seconds = [turn[name] / 1e3 / slots.layers for turn in turns]
        copied = [2 * COPIED / turn[""] * 1e3 for turn in turns]
        median = statistics.median(seconds)
        share = statistics.median(nbytes / s / rate for s, rate in zip(seconds, copied, strict=True))
        found[name] = median * 1e6, nbytes / median, share
    return found


def time_turn(graph: Any) -> float:
    """Milliseconds of the second of two replays.

    During the first one what the copy has left in the L2 cache, up to all of it, is written to memory; and the launch
    of the second is over when the first one ends.
    """
    graph.replay()
    return time_ms(graph)


def warm(copy: Copy) -> None:
    """Keep the device busy until its clocks are up."""
    end = time.monotonic() + WARM_S
    while time.monotonic() < end:
        time_ms(copy)


def show(rows: Sequence[Sequence[str]]) -> None:
    """A table, its first row the names of columns."""
    for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        print("| " + " | ".join(row) + " |")


def table(o: argparse.Namespace, device: CudaDevice, copy: Copy) -> list[list[str]]:
    """A row for each format, model and number of tokens."""
    names = "CudaGemv", "TritonGemv"
    columns = [f"{name}: us" for name in names]
    rows = [["format", "experts", "tokens", "MB", columns[0], "GB/s", "share", columns[1], "GB/s", "share", "chosen"]]
    for fmt in o.format or formats.names():
        for shape, layers in map(MODELS.__getitem__, o.model):
            slots = Slots(shape, layers, formats.get(fmt))
            gemvs: list[Gemv] = [
                CudaGemv(device, slots.layout, shape.activation),
                TritonGemv(slots.layout, shape.activation),
            ]
            chosen = slots.chosen(device)
            for case in CASES:
                found = measure(slots, dict(zip(names, gemvs, strict=True)), case, copy, o.rounds)
                us, rate, _ = found[names[0]]
                row = [fmt, f"{shape}", case, f"{us * rate / 1e12:.1f}"]
                for us, rate, share in found.values():
                    row += [f"{us:.1f}", f"{rate / 1e9:.0f}", f"{share:.2f}"]
                rows.append([*row, chosen])
    return rows


def sweep(o: argparse.Namespace, device: CudaDevice, copy: Copy) -> list[list[str]]:
    """A row for each shape, format and model."""
    cases = [case for case, (_, shared) in CASES.items() if not shared]
    rows = [["format", "experts", "shape", *(f"{case}: us, share" for case in cases)]]
    for fmt in o.format or ("mxfp4", "nvfp4"):
        for shape, layers in map(MODELS.__getitem__, o.model):
            slots = Slots(shape, layers, formats.get(fmt))
            gemvs = {
                describe(launch): CudaGemv(device, slots.layout, shape.activation, shape=launch) for launch in SWEEP
            }
            found = [measure(slots, gemvs, case, copy, o.rounds) for case in cases]
            for name in gemvs:
                cells = [f"{us:.1f}, {share:.2f}" for us, _, share in (each[name] for each in found)]
                rows.append([fmt, f"{shape}", name, *cells])
    return rows


def describe(launch: Launch) -> str:
    """What is not as in the default."""
    changed = [f"{name}={value}" for name, value in vars(launch).items() if value != getattr(DEFAULT, name)]
    return ", ".join(changed) or "default"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", nargs="+", choices=formats.names())
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    o = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    device = CudaDevice()
    copy = Copy()
    rows = (sweep if o.sweep else table)(o, device, copy)
    ms = time_ms(copy, o.rounds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, its own copy {2 * COPIED / ms / 1e9:.2f} TB/s")
    show(rows)


if __name__ == "__main__":
    main()
