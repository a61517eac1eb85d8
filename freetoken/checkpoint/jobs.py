"""Runs jobs on several threads, for whoever reads or writes many pieces of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")


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
