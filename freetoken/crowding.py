"""Notices that something takes cores away from a computation, and says so once.

Threads that share a layer wait for each other, so one busy foreign thread slows all of them. What tells is how often
the system takes a core from a thread that wants to go on: `LIMIT`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LIMIT = 50.0
"""Involuntary context switches a second and worker. On two cores, decoding without a pause: 16 to 18 with nothing else
running, 150 to 170 with one busy thread, and more where waiting threads sleep."""
INTERVAL = 1.0
"""Seconds between two looks."""
IN_A_ROW = 3
"""Intervals of which it must be so: what happens for a moment falls into two of them at most."""


def involuntary_switches() -> int | None:
    """Of all threads of this process, since it began; None where the system does not count them."""
    return None if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class CrowdWatch:
    """Looks from time to time while `workers` threads compute; `look` is cheap and called after every layer."""

    def __init__(
        self,
        workers: int,
        switches: Callable[[], int | None] = involuntary_switches,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = LIMIT * workers
        self._switches, self._clock = switches, clock
        self._at, self._count = clock(), switches()
        self._crowded = 0
        self._done = self._count is None

    def look(self) -> None:
        """Warn, once, if cores were taken away in some intervals in a row of steady work."""
        if self._done:
            return
        now = self._clock()
        passed = now - self._at
        if passed < INTERVAL:
            return
        count = self._switches()
        assert self._count is not None and count is not None
        rate = (count - self._count) / passed
        self._at, self._count = now, count
        # after a pause the interval says nothing of the work
        self._crowded = self._crowded + 1 if rate > self._limit and passed < 2 * INTERVAL else 0
        if self._crowded == IN_A_ROW:
            self._done = True
            logger.warning(
                "something takes cores from this process's threads (%.0f times a second), and experts wait for the "
                "slowest: stop other programs or threads, keep this process on other cores (taskset), or start it with "
                "GOMP_SPINCOUNT=1000",
                rate,
            )
