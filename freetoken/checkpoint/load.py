"""Fills banks: expert by expert, several at once, never more than a few experts beside the banks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from freetoken.banks import Bank, LayerBank, ShardedBank
from freetoken.checkpoint.records import RecordExperts
from freetoken.checkpoint.safetensors import reuse_buffers
from freetoken.formats.base import Format, Matrix
from freetoken.formats.record import Expert, RecordLayout
from freetoken.memory.placement import Placement, bind_thread

Job = TypeVar("Job")


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


def write_record(source: ExpertSource, expert: int, layout: RecordLayout, out: NDArray[np.uint8]) -> None:
    """One expert's record into `out` (nbytes,): as it lies in a converted checkpoint, else re-quantized and packed."""
    if isinstance(source, RecordExperts) and source.format is layout.format:
        source.read_record(expert, out)
    else:
        with reuse_buffers():
            layout.pack(requantize_expert(source.read(expert), layout.format), out)


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

    on_bytes is called from those threads with the bytes of each record written. The first error stops the rest and
    is raised. placement: whose CPUs are near a bank's node; records of such a bank are written by threads that stay
    there, so that these touch its pages first.
    """
    threads, pairs = max(1, threads), list(pairs)
    nodes = {shard.node for bank, _ in pairs for shard in bank.shards if shard.node is not None}
    near = {node: cpus for node in nodes if placement is not None and (cpus := placement.cpus_of(node))}

    def write(bank: Bank, expert: int, source: ExpertSource) -> None:
        if isinstance(source, RecordExperts) and bank.shared:
            bank.fill(expert, partial(source.verify, expert))
        else:
            bank.fill(expert, partial(write_record, source, expert, bank.layout))

    def fill(job: tuple[LayerBank, ExpertSource, int]) -> None:
        bank, source, expert = job
        if isinstance(bank, ShardedBank):
            parts = bank.cut(requantize_expert(source.read(expert), bank.layout.format))
            tasks = [partial(shard.put, expert, part) for shard, part in zip(bank.shards, parts, strict=True)]
        else:
            tasks = [partial(write, bank, expert, source)]
        running: list[Future[None]] = []
        for shard, task in zip(bank.shards, tasks, strict=True):
            if shard.node in writers:
                running.append(writers[shard.node].submit(task))
            else:
                task()
        for future in running:
            future.result()
        on_bytes(bank.nbytes // bank.n_experts)

    with ExitStack() as stack:
        writers = {
            node: stack.enter_context(
                ThreadPoolExecutor(-(-threads // len(near)), f"freetoken-node{node}", bind_thread, (cpus,))
            )
            for node, cpus in near.items()
        }
        run_jobs(
            fill, [(bank, source, expert) for bank, source in pairs for expert in range(source.n_experts)], threads
        )


def run_jobs(run: Callable[[Job], object], jobs: Iterable[Job], threads: int) -> None:
    """Run all jobs with `threads` threads, started in order; the first error stops the rest and is raised."""
    with ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="freetoken-load") as pool:
        futures = [pool.submit(run, job) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
