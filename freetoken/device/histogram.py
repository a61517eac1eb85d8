"""Times counted in buckets, 8 to a power of two: what a device can add to without a list, and what is read from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = 8
"""Buckets of a power of two: one is an eighth of what it begins with wide, or less."""
BUCKETS = 272
"""Up to 2 ** 36 ns, which is 69 s; the last one has all that is longer, too."""


def bucket(ns: int) -> int:
    """That of a time: a number below 8 has its own, and of others the highest 4 bits count. As in handoff.cu."""
    ns = max(0, ns)
    shift = max(0, ns.bit_length() - 4)
    return min(_STEPS * shift + (ns >> shift), BUCKETS - 1)


def edge(number: int) -> int:
    """The smallest time in a bucket, ns."""
    shift = max(0, number // _STEPS - 1)
    return (number - _STEPS * shift) << shift


@dataclass(frozen=True)
class Times:
    """What a histogram says. In seconds, to a sixteenth; 0 where nothing was counted.

    mean: to the last bucket, which has no end.
    """

    count: int
    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, counts: Sequence[int]) -> Times:
        """Of BUCKETS counts. Times of a bucket count as its middle."""
        if len(counts) != BUCKETS:
            raise ValueError(f"a histogram of {len(counts)} counts, expected {BUCKETS}")
        middles = [(edge(i) + edge(i + 1) - 1) / 2e9 for i in range(BUCKETS)]
        total = sum(counts)

        def quantile(share: float) -> float:
            left = share * total
            for n, middle in zip(counts, middles, strict=True):
                left -= n
                if n and left <= 0:
                    return middle
            return 0.0

        mean = sum(n * middle for n, middle in zip(counts, middles, strict=True)) / max(1, total)
        return cls(total, mean, quantile(0.5), quantile(0.99))
