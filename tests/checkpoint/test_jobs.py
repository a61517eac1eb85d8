"""Jobs on several threads: all of them, or none after an error."""

from __future__ import annotations

import gc
import signal
import threading
import time
import traceback
import weakref
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


def test_an_error_of_the_jobs_themselves_comes_first() -> None:
    done: list[int] = []

    def jobs() -> Iterator[int]:
        yield from range(100)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        run_jobs(done.append, jobs(), 3)
    assert not done
    check_stopped(done)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_interruption_of_the_caller_stops_the_jobs(threads: int) -> None:
    done: list[int] = []

    def run(job: int) -> None:
        if job == 5:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.002)
        done.append(job)

    with pytest.raises(KeyboardInterrupt):
        run_jobs(run, range(1000), threads)
    check_stopped(done)


def test_an_error_keeps_nothing_alive() -> None:
    """But what its frames hold, which whoever keeps the error can clear."""

    class Held:
        pass

    held = [Held() for _ in range(8)]
    gone = [weakref.ref(job) for job in held]

    def run(job: Held) -> None:
        raise ValueError("no")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="no") as kept:
            run_jobs(run, held, 2)
        del held
        traceback.clear_frames(kept.tb)
        assert not [job for job in gone if job() is not None]
    finally:
        gc.enable()


def check_stopped(done: list[int]) -> None:
    assert len(done) < 500
    assert not [t for t in threading.enumerate() if t.name.startswith("freetoken-load")]
