"""Compares sides in one run: rounds alternate between them, so that a noisy machine is noisy for all."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Seconds of each round, by side; the same round of two sides ran one right after the other."""

    seconds: Mapping[str, list[float]]

    def median(self, side: str) -> float:
        """Median seconds of a side."""
        return statistics.median(self.seconds[side])

    def ratio(self, side: str, base: str) -> float:
        """Median over rounds of how many times longer `base` took than `side`."""
        return statistics.median(b / s for s, b in zip(self.seconds[side], self.seconds[base], strict=True))


def compare(
    sides: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object] = lambda: None
) -> Comparison:
    """Time each side `rounds` times, taking turns, after one untimed round. before: called before each, untimed."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            before()
            start = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return Comparison(seconds)
