"""One layer of experts at a time over banks larger than the cache: GB/s of records read, beside a plain read.

Shapes are those of Qwen3-30B-A3B (2048/768, top 8 of 128) cut to fewer experts.
"""

from typing import Any

import numpy as np
import pytest
import torch
from interleave import compare

from freetoken import formats, topology
from freetoken.banks import Bank
from freetoken.executor import Activation, Executor
from freetoken.formats.record import Expert, RecordLayout

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 96, 8
STEPS = 12  # layer calls in a round: each takes other experts


@pytest.mark.parametrize("name", formats.names())
def bench_layer(benchmark: Any, name: str) -> None:
    """A token at a time through random experts, every expert once in a round."""
    layout = RecordLayout(formats.get(name), HIDDEN, WIDTH)
    bank = Bank(layout, EXPERTS)
    random = np.random.default_rng(0)
    expert = make_expert(layout, random)
    for index in range(EXPERTS):
        bank.put(index, expert)
    executor = Executor(topology.read().workers(), torch.bfloat16)
    layer = executor.bind(bank, Activation())
    x = torch.randn(1, HIDDEN, dtype=torch.bfloat16)
    routes = torch.from_numpy(random.permutation(EXPERTS).astype(np.int32)).view(STEPS, 1, TOP_K)
    weights = torch.full((1, TOP_K), 1 / TOP_K)
    moved = STEPS * TOP_K * layout.nbytes
    plain = torch.from_numpy(bank.records.view(np.int64).reshape(-1)[: moved // 8])

    def run() -> None:
        for step in range(STEPS):
            layer.run(x, routes[step], weights)

    # torch's sum runs on the same threads and does next to nothing with what it reads
    result = benchmark.pedantic(lambda: compare({"layer": run, "read": plain.sum}, 15), rounds=1)
    rate, read_rate = moved / result.median("layer") / 1e9, moved / result.median("read") / 1e9
    benchmark.extra_info.update(
        bytes=moved,
        gb_per_s=rate,
        read_gb_per_s=read_rate,
        tile=str(layer.choice.kernel),
        threads=len(executor.workers),
    )
    print(f"\n{name:<8}{rate:6.1f} GB/s of records, torch sums them at {read_rate:6.1f} GB/s; {layer.choice.kernel}")


def make_expert(layout: RecordLayout, random: np.random.Generator) -> Expert:
    """An expert of small random weights."""

    def matrix(n: int, k: int) -> Any:
        return layout.format.quantize(random.standard_normal((n, k), np.float32) * np.float32(0.05))

    h, i = layout.hidden, layout.intermediate
    return Expert(matrix(i, h), matrix(i, h), matrix(h, i))
