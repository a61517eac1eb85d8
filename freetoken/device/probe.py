"""The host's side of a try: does a graph wait for what the host writes, and see it?"""

from __future__ import annotations

import time
from collections.abc import Callable

from freetoken.device.base import Flag

REPLAYS = 6
"""Of the graph, which rings `bell`, waits for `answer` and takes it, and rings `end`."""


class Host:
    """The host's side of the probe: answers late, and before the graph can wait."""

    def __init__(self, bell: Flag, answer: Flag, end: Flag, seconds: float) -> None:
        self._bell, self._answer, self._end, self._seconds = bell, answer, end, seconds
        self.fault = ""

    def run(self) -> None:
        """The body of a thread."""
        for i in range(1, REPLAYS + 1):
            if i % 2:
                if not self._see(lambda i=i: self._bell.value >= 2 * i, "the host does not see the bell"):  # type: ignore[misc]
                    return
                time.sleep(1e-3)
                if self._end.value >= 2 * i:
                    self.fault = "the graph went on before it was answered"
                    return
            self._answer.value = 1
            if not self._see(lambda: self._answer.value == 0, "the graph does not see the answer"):
                return
        self._see(lambda: self._end.value == 2 * REPLAYS, "the graph does not end")

    def _see(self, happened: Callable[[], bool], fault: str) -> bool:
        end = time.monotonic() + self._seconds
        while not happened():
            if time.monotonic() > end:
                self.fault = f"{fault} within {self._seconds:g} s"
                return False
            time.sleep(0)
        return True
