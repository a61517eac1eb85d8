"""Fills banks from a checkpoint: expert by expert, several at once, never more than a few experts beside the banks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from freetoken.banks import Bank
from freetoken.checkpoint.experts import LayerExperts
from freetoken.checkpoint.records import RecordExperts
from freetoken.formats.base import Format, Matrix
from freetoken.formats.record import Expert, RecordLayout

Job = TypeVar("Job")


def convert(expert: Expert, fmt: Format) -> Expert:
    """The expert in another format, from its exact values; itself when it is in that format already."""
    if expert.gate.format is fmt:
        return expert

    def matrix(source: Matrix) -> Matrix:
        return fmt.quantize_strips(source.shape, lambda start, stop: source.rows(start, stop).dequantize())

    return Expert(
        matrix(expert.gate),
        matrix(expert.up),
        matrix(expert.down),
        expert.gate_bias,
        expert.up_bias,
        expert.down_bias,
    )


def write_record(group: LayerExperts, expert: int, layout: RecordLayout, out: NDArray[np.uint8]) -> None:
    """One expert's record into `out` (nbytes,): as it lies in a converted checkpoint, else re-quantized and packed."""
    if isinstance(group, RecordExperts) and group.format is layout.format:
        group.read_record(expert, out)
    else:
        layout.pack(convert(group.read(expert), layout.format), out)


def fill_banks(
    pairs: Iterable[tuple[Bank, LayerExperts]], threads: int, on_bytes: Callable[[int], object] = lambda n: None
) -> None:
    """Fill each bank with its group's experts, in the bank's format, with `threads` threads; check shared ones.

    on_bytes is called from those threads with the bytes of each record written. The first error stops the rest and
    is raised.
    """

    def fill(job: tuple[Bank, LayerExperts, int]) -> None:
        bank, group, expert = job
        if isinstance(group, RecordExperts) and bank.shared:
            bank.fill(expert, partial(group.verify, expert))
        else:
            bank.fill(expert, partial(write_record, group, expert, bank.layout))
        on_bytes(bank.layout.nbytes)

    run_jobs(fill, [(bank, group, expert) for bank, group in pairs for expert in range(group.n_experts)], threads)


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
