"""Fills banks: expert by expert, several at once, never more than a few experts beside the banks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from freetoken.banks import Bank
from freetoken.checkpoint.records import RecordExperts
from freetoken.formats.base import Format, Matrix
from freetoken.formats.record import Expert, RecordLayout

Job = TypeVar("Job")


class ExpertSource(Protocol):
    """The experts of one layer, wherever they are."""

    @property
    def n_experts(self) -> int:
        """How many."""

    def read(self, expert: int) -> Expert:
        """One of them; called from several threads."""


def convert(expert: Expert, fmt: Format) -> Expert:
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
        layout.pack(convert(source.read(expert), layout.format), out)


def requantize(matrix: Matrix, fmt: Format) -> Matrix:
    """A matrix in another format, from its exact values; itself when it is in that format already."""
    if matrix.format is fmt:
        return matrix
    return fmt.quantize_strips(matrix.shape, lambda start, stop: matrix.rows(start, stop).dequantize())


def fill_banks(
    pairs: Iterable[tuple[Bank, ExpertSource]], threads: int, on_bytes: Callable[[int], object] = lambda n: None
) -> None:
    """Fill each bank with its source's experts, in the bank's format, with `threads` threads; check shared ones.

    on_bytes is called from those threads with the bytes of each record written. The first error stops the rest and
    is raised.
    """

    def fill(job: tuple[Bank, ExpertSource, int]) -> None:
        bank, source, expert = job
        if isinstance(source, RecordExperts) and bank.shared:
            bank.fill(expert, partial(source.verify, expert))
        else:
            bank.fill(expert, partial(write_record, source, expert, bank.layout))
        on_bytes(bank.layout.nbytes)

    run_jobs(fill, [(bank, source, expert) for bank, source in pairs for expert in range(source.n_experts)], threads)


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
