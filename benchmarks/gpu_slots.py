"""Measures a router's choice, the look-up of slots and the gather of records. Needs a GPU.

    python benchmarks/gpu_slots.py

Choice: graphs of 384, by torch.topk and by our kernel. Look-up: graphs of 384 look-ups, 8 steps of 48 layers whose ids
are uniform and always others, a quarter of the experts in slots; time of a replay by number of look-ups, beside that of
a kernel that does nothing. "cold": before each, 128 MiB are written, so that no table is in the L2 cache; what writing
alone takes is subtracted. Gather: graphs of gathers of random experts from 1.3 to 1.7 GB of registered memory, against
copies of the same records from the same memory by the copy engine (cudaMemcpyAsync), in turns. Medians.
"""

import argparse
import mmap
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from freetoken.gpu.gather import Gather
from freetoken.gpu.lookup import Found, Lookup
from freetoken.gpu.topk import topk
from freetoken.gpu.units import Fetches
from freetoken.offload.slots import LayerExperts, SlotPool

DEVICE = torch.device("cuda")
RECORDS = {"mxfp4 2880/2880": 13_253_888, "nvfp4 2048/768": 2_654_336}
ENTRIES = 8


@triton.jit
def _nothing(x):
    pass


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of it; it has run once before."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def time_ms(graph: Any, times: int = 1) -> float:
    """Of the median replay."""
    found = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


class Banks:
    """`n` records of random bytes in registered memory on huge pages, and slots for some of them."""

    def __init__(self, n: int, nbytes: int, slots: int) -> None:
        self.n, self.nbytes = n, nbytes
        memory = mmap.mmap(-1, n * nbytes)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.host = torch.frombuffer(memory, dtype=torch.uint8).view(n, nbytes)
        for record in self.host:
            record.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=DEVICE))
        assert int(torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), n * nbytes, 2)) == 0
        self.slots = torch.empty(slots, nbytes, dtype=torch.uint8, device=DEVICE)
        self.random = torch.Generator().manual_seed(0)

    def close(self) -> None:
        """Give the memory back."""
        torch.cuda.synchronize()
        assert int(torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())) == 0

    def lists(self, length: int, count: int) -> Iterator[tuple[Fetches, list[int], list[int]]]:
        """Lists of `length` of `ENTRIES`, with what is in them: experts and slots."""
        for _ in range(count):
            experts = torch.randperm(self.n, generator=self.random)[:length].tolist()
            slots = torch.randperm(len(self.slots), generator=self.random)[:length].tolist()
            rest = ENTRIES - length
            expert = torch.tensor(experts + [-1] * rest, dtype=torch.int32, device=DEVICE)
            address = [self.slots[slot].data_ptr() for slot in slots] + [0] * rest
            yield Fetches(expert, torch.tensor(address, dtype=torch.int64, device=DEVICE)), experts, slots

    def check(self, gather: Callable[[Fetches], None]) -> None:
        """Raise unless lists of all lengths are copied to the bit, and nothing else."""
        for length in range(ENTRIES + 1):
            for fetches, experts, slots in self.lists(length, 1):
                self.slots.fill_(0x5A)
                gather(fetches)
                for slot, expert in zip(slots, experts, strict=True):
                    assert torch.equal(self.slots[slot].cpu(), self.host[expert]), (length, slot)
                    self.slots[slot] = 0x5A
                assert bool((self.slots == 0x5A).all()), length

    def graphs(self, gather: Callable[[Fetches], None], length: int, count: int) -> list[torch.cuda.CUDAGraph]:
        """`count` lists, gathered, and copied."""
        lists = list(self.lists(length, count))

        def copy() -> None:
            for _, experts, slots in lists:
                for slot, expert in zip(slots, experts, strict=True):
                    self.slots[slot].copy_(self.host[expert], non_blocking=True)

        return [capture(lambda: [gather(fetches) for fetches, *_ in lists]), capture(copy)]


def lookups(
    n_experts: int,
    n_slots: int,
    routes: int,
    layers: int = 48,
    steps: int = 8,
    between: Callable[[], object] | None = None,
) -> torch.cuda.CUDAGraph:
    """A graph of steps * layers of them."""
    pool = SlotPool([LayerExperts(n_experts, 8, (64,))] * layers, [n_slots] * layers, DEVICE)
    found = Found(routes, DEVICE)
    each = [Lookup(pool.tables(layer), routes) for layer in range(layers)]
    tokens = routes // 8
    ids = torch.stack([torch.randperm(n_experts, device=DEVICE)[:8] for _ in range(layers * steps * tokens)])
    ids = ids.view(steps, layers, tokens, 8)

    def work() -> None:
        for step in ids:
            for lookup, chosen in zip(each, step, strict=True):
                if between:
                    between()
                lookup(chosen, found)

    graph = capture(work)
    graph.pool_of_slots = pool, ids, found  # kept alive with it
    return graph


def show_choices() -> None:
    """One table."""
    print("| rows | experts | chosen | dtype | torch.topk us | ours us |")
    for dtype, k in ((torch.bfloat16, 4), (torch.float32, 8)):
        for rows, n_experts in ((1, 128), (8, 128), (1, 256), (8, 512)):
            x = torch.randn(rows, n_experts, device=DEVICE).to(dtype)
            if not torch.equal(topk(x, k)[0], torch.topk(x, k).values):
                sys.exit(f"gpu_slots: the {k} largest of {n_experts} {dtype} are not those of torch")
            graphs = [capture(lambda x=x, k=k, of=of: [of(x, k) for _ in range(384)]) for of in (torch.topk, topk)]
            us = [time_ms(graph, 20) / 384 * 1e3 for graph in graphs]
            print(f"| {rows} | {n_experts} | {k} | {dtype} | {us[0]:.2f} | {us[1]:.2f} |")


def show_lookups() -> None:
    """One table."""
    filler = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
    nothing = capture(lambda: [_nothing[(1,)](filler) for _ in range(384)])
    fill = capture(lambda: [filler.fill_(1) for _ in range(48)])
    print(f"a kernel that does nothing: {time_ms(nothing, 20) / 384 * 1e3:.2f} us")
    print("| experts | slots | routes | us | cold us |")
    for n_experts in (128, 256, 512):
        for routes in (8, 16, 32, 64):
            n_slots = max(n_experts // 4, routes)
            warm = lookups(n_experts, n_slots, routes)
            cold = lookups(n_experts, n_slots, routes, steps=1, between=lambda: filler.fill_(1))
            extra = statistics.median(time_ms(cold) - time_ms(fill) for _ in range(15))
            print(
                f"| {n_experts} | {n_slots} | {routes} | {time_ms(warm, 20) / 384 * 1e3:.2f} | {extra / 48 * 1e3:.2f} |"
            )
    full = lookups(512, 512, 64)
    print(f"| 512 | 512 | 64 | {time_ms(full, 20) / 384 * 1e3:.2f} | |")


def show_gathers(rounds: int = 9) -> None:
    """One table."""
    print("| record | records | gather GB/s | copies GB/s | share |")
    for name, nbytes in RECORDS.items():
        banks = Banks(128 if nbytes > 8 << 20 else 512, nbytes, 32)
        gather = Gather([banks.host.data_ptr()], [nbytes], DEVICE)
        banks.check(gather)
        for length in (1, 2, 4, 8):
            count = max(2, (160 << 20) // (length * nbytes))
            pair = banks.graphs(gather, length, count)
            times = [[time_ms(graph) for graph in pair] for _ in range(rounds)]
            rates = [length * count * nbytes / 1e6 / statistics.median(column) for column in zip(*times, strict=True)]
            share = statistics.median(copied / gathered for gathered, copied in times)
            print(f"| {name} | {length} | {rates[0]:.1f} | {rates[1]:.1f} | {share:.3f} |")
        banks.close()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_slots: needs a CUDA device")
    show_choices()
    show_lookups()
    show_gathers()
