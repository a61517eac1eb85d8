"""Times the attention of one token against transformers' own. Needs a GPU.

    python benchmarks/gpu_attention.py --slices 1 2 4 8 16 32 64

Graphs of 48 calls, each on a cache of its own that is full up to the last column but one, are replayed; medians, us a
call. "plain" is the function that the model's modules call, "compiled" the same through torch.compile; "bytes" is what
reading the keys and values that are seen takes at 4.2 TB/s. The result is compared with float64 first. With --slices
the kernel is also timed with so many instead of the number that it chooses.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from gpu_slots import DEVICE, capture, time_ms
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from freetoken.gpu.attention import attend

CALLS = 48
RATE = 4.2e12
"""Bytes per second that an H200 reads."""


@dataclass(frozen=True)
class Shape:
    """A layer. window: columns that are seen, 0 for all."""

    name: str
    heads: int
    kv_heads: int
    width: int
    function: Callable[..., Any]
    window: int = 0


SHAPES = (
    Shape("gpt-oss-120b", 64, 8, 64, eager_attention_forward),
    Shape("gpt-oss-120b, window", 64, 8, 64, eager_attention_forward, 128),
    Shape("qwen3-30b-a3b", 32, 4, 128, sdpa_attention_forward),
)


class Layer:
    """Caches, a query and a mask of `rows` sequences."""

    def __init__(self, shape: Shape, rows: int, columns: int) -> None:
        self.shape, self.scaling = shape, shape.width**-0.5
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
        self.query = torch.randn(rows, 1, shape.heads, shape.width, **options).transpose(1, 2)
        self.caches = torch.randn(CALLS, 2, rows, shape.kv_heads, columns, shape.width, **options)
        column = torch.arange(columns, device=DEVICE)
        hidden = (column > columns - 2) | (column <= columns - 2 - (shape.window or columns))
        self.seen = int((~hidden).sum())
        self.mask = torch.zeros(rows, 1, 1, columns, **options).masked_fill(hidden, torch.finfo(torch.bfloat16).min)
        self.module = torch.nn.Module().eval()
        self.module.num_key_value_groups = shape.heads // shape.kv_heads
        self.module.sinks = torch.randn(shape.heads, **options) if shape.function is eager_attention_forward else None

    def ours(self, slices: int | None = None) -> Callable[[], object]:
        """All calls of the kernel."""
        tensors = self.mask, self.module.sinks, self.scaling
        return lambda: [attend(self.query, *cache, *tensors, slices=slices) for cache in self.caches]

    def theirs(self, function: Callable[..., Any]) -> Callable[[], object]:
        """All calls of a function of transformers'."""
        how = {"scaling": self.scaling, "dropout": 0.0}
        return lambda: [function(self.module, self.query, *cache, self.mask, **how) for cache in self.caches]

    def check(self) -> None:
        """Raise where the kernel is further from float64 than rounding to bf16 takes it."""
        key, value = self.caches[0].double().repeat_interleave(self.module.num_key_value_groups, 2)
        scores = self.query.double() @ key.mT * self.scaling + self.mask.double()
        if self.module.sinks is not None:
            scores = torch.cat([scores, self.module.sinks.double().view(1, -1, 1, 1).expand(len(scores), -1, 1, 1)], -1)
        wanted = (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)
        found = attend(self.query, *self.caches[0], self.mask, self.module.sinks, self.scaling)
        apart = float((found.double() - wanted).norm() / wanted.norm())
        assert apart <= 2.0**-8, apart


def show(rows: int, columns: int, slices: Sequence[int]) -> None:
    """A line for each shape."""
    for shape in SHAPES:
        layer = Layer(shape, rows, columns)
        layer.check()
        compiled = torch.compile(shape.function, fullgraph=True, dynamic=False)
        works = [layer.ours(), layer.theirs(shape.function), layer.theirs(compiled), *map(layer.ours, slices)]
        times = [time_ms(capture(work), 50) / CALLS * 1e3 for work in works]
        nbytes = 2 * 2 * rows * shape.kv_heads * layer.seen * shape.width
        cells = " | ".join(f"{time:.2f}" for time in (*times, nbytes / RATE * 1e6))
        print(f"| {shape.name} | {rows} | {columns} | {cells} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--columns", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--slices", type=int, nargs="*", default=[])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_attention: needs a CUDA device")
    more = "".join(f" {n} slices |" for n in options.slices)
    print(f"| layer | rows | columns | ours | plain | compiled |{more} bytes |")
    with torch.no_grad():
        for rows in options.rows:
            for columns in options.columns:
                show(rows, columns, options.slices)
