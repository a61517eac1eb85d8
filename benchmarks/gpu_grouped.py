"""Times routed experts on a GPU, many tokens at once, beside torch's grouped product in bf16; and the plain GEMV.

    python benchmarks/gpu_grouped.py [--tokens 2048] [--formats mxfp4 nvfp4]

Uniform routing. "layer" is routes sorted, both products with biases and activation, and the weighted sum; torch's
"products" are its two grouped products alone on the same routes, sorted before, and its "layer" all of it as plain
torch operators. A replayed graph each, medians; torch is timed before and after each format, the device's own copy
before. "error" is that of an expert's output against float64 on the same activations, relative to its norm. The GEMV
reads layers of its own in turn, so that nothing is in the cache.
"""

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from layers import Shape, make_expert

from freetoken import formats
from freetoken.formats.record import RecordLayout
from freetoken.gpu.combine import combine
from freetoken.gpu.gemv import TritonGemv
from freetoken.gpu.grouped import GroupedProduct, sort_routes
from freetoken.gpu.units import COLUMNS, Units
from freetoken.kernels import reference

SHAPES = {"gpt-oss-120b": Shape(2880, 2880, 128, 4, gpt_oss=True), "qwen3-30b-a3b": Shape(2048, 768, 128, 8)}
GEMV_LAYERS = 16


def median_ms(compute: Callable[[], object], *, graph: bool = True) -> float:
    """Milliseconds of a call, replayed as a graph."""
    compute()
    torch.cuda.synchronize()
    run: Callable[[], object] = compute
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            compute()
        run = captured.replay
    run()
    times = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


class Layer:
    """A layer's records, all of one expert, and tokens with their routes."""

    def __init__(self, shape: Shape, layout: RecordLayout, tokens: int) -> None:
        self.shape, self.layout = shape, layout
        self.expert = make_expert(layout, np.random.default_rng(0))
        record = np.empty(layout.nbytes, np.uint8)
        layout.pack(self.expert, record)
        self.records = torch.from_numpy(record).cuda().repeat(shape.experts, 1)
        self.address = self.records.data_ptr() + torch.arange(shape.experts, device="cuda") * layout.nbytes
        self.ids, self.weights = route(shape, tokens)
        self.x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
        self.h = torch.empty(self.ids.numel(), shape.width, dtype=torch.bfloat16, device="cuda")
        self.y = torch.empty(1, self.ids.numel(), shape.hidden, device="cuda")
        self.out = torch.empty_like(self.x)
        self.product = GroupedProduct(layout, shape.activation)

    def run(self) -> None:
        order, starts = sort_routes(self.ids, self.shape.experts)
        self.product.gate_up(self.x, order, starts, self.address, self.shape.top_k, self.h)
        self.product.down(self.h, starts, self.address, order, self.y[0])
        combine(self.y, self.ids, self.weights, self.shape.experts, self.out)

    def error(self) -> float:
        """Of the first routes' outputs."""
        self.run()
        how = self.shape.activation
        x = self.x[:4].double().cpu().numpy().repeat(self.shape.top_k, 0)
        wanted = reference.run_expert(self.expert, x, how.kind, how.alpha, how.limit)
        found = self.y[0, : len(x)].double().cpu().numpy()
        return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))

    def gemv_us(self, tokens: int) -> float:
        """Microseconds of both products of so many tokens, whose routes all go to different experts."""
        n = tokens * self.shape.top_k
        gemv = TritonGemv(self.layout, self.shape.activation)
        route = torch.full((n, COLUMNS), -1, dtype=torch.int32, device="cuda")
        route[:, 0] = torch.arange(n)
        layers = [Units(self.address[torch.randperm(self.shape.experts)[:n].cuda()], route) for _ in range(GEMV_LAYERS)]
        x = self.x[:tokens].contiguous()
        h, y = torch.empty(n, self.shape.width, device="cuda"), torch.empty(n, self.shape.hidden, device="cuda")

        def run() -> None:
            for units in layers:
                gemv.gate_up(x, units, self.shape.top_k, h)
                gemv.down(h, units, y)

        return median_ms(run) / GEMV_LAYERS * 1e3


def route(shape: Shape, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (T, K) and weights."""
    ids = torch.rand(tokens, shape.experts, generator=torch.Generator().manual_seed(0)).topk(shape.top_k).indices
    return ids.int().cuda(), torch.rand(tokens, shape.top_k, device="cuda")


def time_torch(shape: Shape, tokens: int) -> tuple[float, float]:
    """Milliseconds of the two grouped products, and of all that a layer is."""
    ids, weights = route(shape, tokens)
    gate_up = torch.empty(shape.experts, 2 * shape.width, shape.hidden, dtype=torch.bfloat16, device="cuda").normal_()
    down = torch.empty(shape.experts, shape.hidden, shape.width, dtype=torch.bfloat16, device="cuda").normal_()
    biases = torch.randn(shape.experts, 2 * shape.width, device="cuda").bfloat16()
    down_biases = torch.randn(shape.experts, shape.hidden, device="cuda").bfloat16()
    x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
    edges = torch.arange(1, shape.experts + 1, dtype=torch.int32, device="cuda")

    def sort() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        expert, order = torch.sort(ids.flatten(), stable=True)
        return expert, order, torch.searchsorted(expert, edges, out_int32=True)

    def layer() -> torch.Tensor:
        expert, order, stops = sort()
        hidden = torch._grouped_mm(x[order // shape.top_k], gate_up.transpose(1, 2), offs=stops)
        if shape.gpt_oss:
            hidden = hidden + biases[expert]
        gate, up = hidden.chunk(2, -1)
        if shape.gpt_oss:
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            hidden = torch.nn.functional.silu(gate) * up
        y = torch._grouped_mm(hidden, down.transpose(1, 2), offs=stops)
        if shape.gpt_oss:
            y = y + down_biases[expert]
        y = y * weights.flatten()[order, None].to(y.dtype)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device="cuda"))
        return y[back].view(tokens, shape.top_k, -1).sum(1)

    _, order, stops = sort()
    sorted_x = x[order // shape.top_k].contiguous()
    h = torch.randn(len(order), shape.width, device="cuda").bfloat16()

    def products() -> None:
        torch._grouped_mm(sorted_x, gate_up.transpose(1, 2), offs=stops)
        torch._grouped_mm(h, down.transpose(1, 2), offs=stops)

    return median_ms(products), median_ms(layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", choices=formats.names(), default=formats.names())
    o = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {o.tokens} tokens")
    rows = [["experts", "format", "layer, ms", "torch's products", "torch's layer", "error", "GEMV: 1, 4 tokens"]]
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(big)
    for name, shape in SHAPES.items():
        for fmt in o.formats:
            before = time_torch(shape, o.tokens)
            copy = 2 * big.numel() / median_ms(lambda: target.copy_(big), graph=False) * 1e3
            layer = Layer(shape, shape.layout(formats.get(fmt)), o.tokens)
            error, ms = layer.error(), median_ms(layer.run)
            after = time_torch(shape, o.tokens)
            torch_ms = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
            shares = []
            for tokens in (1, 4):
                us = layer.gemv_us(tokens)
                rate = tokens * shape.top_k * layer.layout.nbytes / us * 1e6
                shares.append(f"{us:.0f} us, {rate / 1e12:.2f} TB/s, {rate / copy:.2f} of copy")
            beside = [f"{t:.2f}: {t / ms:.2f}" for t in torch_ms]
            rows.append([name, fmt, f"{ms:.2f}", *beside, f"{error:.1e}", "; ".join(shares)])
            print(" | ".join(rows[-1]), flush=True)
            del layer
    for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
