"""Watches memory while a model loads, and stops the load before the machine starves or something is killed.

The budget was checked before, but others allocate meanwhile. `Guard` looks several times a second, from a thread of
its own, at what is still available and at the kernel's own measure of stalls; the loader asks it between experts.
Thresholds are settings. What a system has no file for is not watched.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from freetoken import cgroup, settings
from freetoken.errors import CapacityError
from freetoken.memory import budget
from freetoken.units import format_bytes

_INTERVAL_S = 0.2
_WINDOW_S = 5.0
"""Pressure is a mean over this time: shorter stalls are the ordinary price of reclaiming page cache."""


class Guard:
    """A context manager: while it is open, `check` raises once memory has run short.

    min_available: bytes that must stay available to this process (0: not watched). max_pressure: per cent of the last
    5 s in which every task at once waited for memory, PSI's `full`, in the whole system or in one of the process's
    cgroups (0: not watched). root, clock: for tests. `check` may be called from any thread.
    """

    def __init__(
        self,
        min_available: int,
        max_pressure: float,
        *,
        root: str | os.PathLike[str] = "/",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._min_available = min_available
        self._max_pressure = max_pressure
        self._root = root
        self._clock = clock
        self._stalls: dict[Path, deque[tuple[float, int]]] = {}
        self._short: CapacityError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="freetoken-guard", daemon=True)
        if max_pressure:
            self._stalls = {file: deque() for file in cgroup.pressure_files(root)}

    def sample(self) -> None:
        """Look once; the first shortage seen is kept for `check`."""
        self._short = self._short or self._look_at_available() or self._look_at_stalls()

    def check(self) -> None:
        """Raise `CapacityError` with what was seen and the threshold, if memory has run short since the start."""
        if self._short is not None:
            raise CapacityError(str(self._short), **self._short.facts)  # one of its own for each thread that asks

    def __enter__(self) -> Guard:
        self.sample()
        try:
            self._thread.start()
        except BaseException:  # interrupted, it may have started
            self._stop.set()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._short is None and not self._stop.wait(_INTERVAL_S):
            self.sample()

    def _look_at_available(self) -> CapacityError | None:
        if not self._min_available:
            return None
        have = budget.resident(self._root)
        if have.where == "psutil" or have.available_bytes >= self._min_available:  # psutil: only an estimate
            return None
        return CapacityError(
            f"the load was stopped: {format_bytes(have.available_bytes)} of memory were left according to "
            f"{have.where}, and {format_bytes(self._min_available)} must stay free "
            f"({settings.LOAD_MIN_AVAILABLE.name}, in MiB). Free memory, or choose a smaller model or weight format.",
            needed=self._min_available,
            available=have.available_bytes,
            where=have.where,
        )

    def _look_at_stalls(self) -> CapacityError | None:
        for file, seen in self._stalls.items():
            total = re.search(r"^full .*\btotal=(\d+)", cgroup.read_kernel_file(file), re.MULTILINE)
            if total is None:
                continue
            now = self._clock()
            seen.append((now, int(total[1])))
            while len(seen) > 2 and now - seen[1][0] >= _WINDOW_S:
                seen.popleft()
            (start, before), (_, after) = seen[0], seen[-1]
            if now - start < _WINDOW_S:
                continue
            percent = (after - before) / 1e4 / (now - start)  # microseconds of stall
            if percent > self._max_pressure:
                return CapacityError(
                    f"the load was stopped: for {percent:.0f} % of the last {now - start:.0f} s everything waited for "
                    f"memory according to {file}, and {self._max_pressure:g} % are allowed "
                    f"({settings.LOAD_MAX_PRESSURE.name}). Free memory, or choose a smaller model or weight format.",
                    needed=self._min_available,
                    available=budget.resident(self._root).available_bytes,
                    where=str(file),
                )
        return None


def from_settings() -> Guard:
    """A guard of this machine with the thresholds that are set; raises `ConfigError` for a bad one."""
    return Guard(min_available_bytes(), settings.LOAD_MAX_PRESSURE.read())


def min_available_bytes() -> int:
    """What must stay available while loading, as it is set."""
    return settings.LOAD_MIN_AVAILABLE.read() << 20
