"""Runs jobs on several threads, for whoever reads or writes many pieces of files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")


def run_jobs(run: Callable[[Job], object], jobs: Iterable[Job], threads: int) -> None:
    """Run all jobs with `threads` threads, started in order; an error keeps the rest from starting and is raised."""
    stopped = threading.Event()

    def start(job: Job) -> None:
        if stopped.is_set():
            return
        try:
            run(job)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="freetoken-load") as pool:
        try:
            for future in [pool.submit(start, job) for job in jobs]:
                future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
