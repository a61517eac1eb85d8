"""Jobs on several threads: all of them, or none after an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from freetoken.checkpoint.jobs import run_jobs


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_every_job_runs(threads: int) -> None:
    done: list[int] = []
    run_jobs(done.append, range(100), threads)
    assert sorted(done) == list(range(100))
    assert threads > 1 or done == list(range(100))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_a_job_stops_the_rest(error: type[BaseException], threads: int) -> None:
    done: list[int] = []

    def run(job: int) -> None:
        if job == 5:
            raise error("job 5")
        time.sleep(0.002)
        done.append(job)

    with pytest.raises(error, match="job 5"):
        run_jobs(run, range(1000), threads)
    check_stopped(done)


def test_an_interruption_while_jobs_are_handed_out_stops_them() -> None:
    done: list[int] = []

    def jobs() -> Iterator[int]:
        yield from range(1000)
        raise KeyboardInterrupt

    def run(job: int) -> None:
        time.sleep(0.002)
        done.append(job)

    with pytest.raises(KeyboardInterrupt):
        run_jobs(run, jobs(), 1)
    check_stopped(done)


def check_stopped(done: list[int]) -> None:
    assert len(done) < 500
    assert not [t for t in threading.enumerate() if t.name.startswith("freetoken-load")]
