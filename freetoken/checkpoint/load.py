"""Fills banks: expert by expert, several at once, never more than a few experts beside the banks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from freetoken.banks import Bank, LayerBank, ShardedBank
from freetoken.checkpoint.experts import LayerExperts
from freetoken.checkpoint.jobs import run_jobs
from freetoken.checkpoint.records import RecordExperts
from freetoken.checkpoint.safetensors import reuse_buffers
from freetoken.checkpoint.strips import BATCH_BYTES, StoredExpert, write_stored
from freetoken.formats.base import Format, Matrix
from freetoken.formats.record import Expert, RecordLayout
from freetoken.memory.placement import Placement, bind_thread

T = TypeVar("T")
_BATCH = 256
"""Experts that are written at once, however small: the search for what follows what in a file is quadratic."""


class ExpertSource(Protocol):
    """The experts of one layer, wherever they are."""

    @property
    def n_experts(self) -> int:
        """How many."""

    def read(self, expert: int) -> Expert:
        """One of them; called from several threads."""


def requantize_expert(expert: Expert, fmt: Format) -> Expert:
    """The expert in another format, from its exact values; itself when it is in that format already."""
    if expert.gate.format is fmt:
        return expert
    return Expert(
        requantize(expert.gate, fmt),
        requantize(expert.up, fmt),
        requantize(expert.down, fmt),
        expert.gate_bias,
        expert.up_bias,
        expert.down_bias,
    )


def write_records(source: ExpertSource, experts: Sequence[int], layout: RecordLayout, out: NDArray[np.uint8]) -> None:
    """Records of experts into `out` (len(experts), nbytes) uint8.

    They are taken as they lie in a converted checkpoint; permuted where they lie in the format of the layout; else
    re-quantized, one after the other.
    """
    stored = find_stored(source, experts, layout)
    if stored is not None and write_stored(stored, layout, layout, 0, out):
        return
    for expert, record in zip(experts, out, strict=True):
        if isinstance(source, RecordExperts) and source.format is layout.format:
            source.read_record(expert, record)
        else:
            with reuse_buffers():
                layout.pack(requantize_expert(source.read(expert), layout.format), record)


def find_stored(source: ExpertSource, experts: Iterable[int], layout: RecordLayout) -> list[StoredExpert] | None:
    """The experts as their files hold them, where records of that layout are permutations of their bytes; else None."""
    if not isinstance(source, LayerExperts) or source.format is not layout.format:
        return None
    stored = []
    for expert in experts:
        found = source.stored(expert)
        if found is None:
            return None
        stored.append(found)
    return stored


def requantize(matrix: Matrix, fmt: Format) -> Matrix:
    """A matrix in another format, from its exact values; itself when it is in that format already."""
    if matrix.format is fmt:
        return matrix
    return fmt.quantize_strips(matrix.shape, lambda start, stop: matrix.rows(start, stop).dequantize())


def fill_banks(
    pairs: Iterable[tuple[LayerBank, ExpertSource]],
    threads: int,
    on_bytes: Callable[[int], object] = lambda n: None,
    placement: Placement | None = None,
) -> None:
    """Fill each bank with its source's experts, in the bank's format, with `threads` threads; check shared ones.

    on_bytes is called from those threads with the bytes of the records just written. The first error stops the rest and
    is raised. placement: whose CPUs are near a bank's node; records of such a bank are written by threads that stay
    there, so that these touch its pages first.
    """
    threads, pairs = max(1, threads), list(pairs)
    nodes = {shard.node for bank, _ in pairs for shard in bank.shards if shard.node is not None}
    near = {node: cpus for node in nodes if placement is not None and (cpus := placement.cpus_of(node))}

    def write(bank: Bank, experts: range, source: ExpertSource) -> None:
        if isinstance(source, RecordExperts) and bank.shared:
            for expert in experts:
                source.verify(expert, bank.records[expert])
        else:
            write_records(source, experts, bank.layout, bank.records[experts.start : experts.stop])

    def run(bank: LayerBank, tasks: Iterable[Callable[[], T]]) -> list[T]:
        """One task for each shard, by a thread near its node."""
        futures: list[Future[T]] = []
        results: list[T] = []
        for shard, task in zip(bank.shards, tasks, strict=True):
            if shard.node in writers:
                futures.append(writers[shard.node].submit(task))
            else:
                results.append(task())
        return results + [future.result() for future in futures]

    def write_shards(bank: ShardedBank, experts: range, source: ExpertSource) -> None:
        stored = find_stored(source, experts, bank.layout)
        if stored is not None:
            tasks = [
                partial(
                    write_stored, stored, bank.layout, shard.layout, start, shard.records[experts.start : experts.stop]
                )
                for shard, (start, _) in zip(bank.shards, bank.bounds, strict=True)
            ]
            if all(run(bank, tasks)):
                return
        for expert in experts:
            parts = bank.cut(requantize_expert(source.read(expert), bank.layout.format))
            run(
                bank,
                [
                    partial(shard.layout.pack, part, shard.records[expert])
                    for shard, part in zip(bank.shards, parts, strict=True)
                ],
            )

    def fill(job: tuple[LayerBank, ExpertSource, range]) -> None:
        bank, source, experts = job
        if isinstance(bank, ShardedBank):
            write_shards(bank, experts, source)
        else:
            run(bank, [partial(write, bank, experts, source)])
        for shard in bank.shards:
            shard.mark(experts)
        on_bytes(bank.nbytes // bank.n_experts * len(experts))

    with ExitStack() as stack:
        writers = {
            node: stack.enter_context(
                ThreadPoolExecutor(-(-threads // len(near)), f"freetoken-node{node}", bind_thread, (cpus,))
            )
            for node, cpus in near.items()
        }
        run_jobs(
            fill, [(bank, source, some) for bank, source in pairs for some in _batches(bank, source, threads)], threads
        )


def _batches(bank: LayerBank, source: ExpertSource, threads: int) -> list[range]:
    """The experts of a layer, some at a time: few enough for every thread to have some."""
    of_expert = max(1, bank.nbytes // bank.n_experts)
    n = max(1, min(BATCH_BYTES // of_expert, _BATCH, source.n_experts // (4 * threads)))
    return [range(start, min(start + n, source.n_experts)) for start in range(0, source.n_experts, n)]
