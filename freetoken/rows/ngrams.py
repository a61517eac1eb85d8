"""From the last tokens to rows: the hash of tables that are looked up by bigrams and trigrams.

With t a token, p1 the one before and p2 the one before that, in 64-bit arithmetic that wraps:

    bigram = t * m0 xor p1 * m1        trigram = bigram xor p2 * m2
    row of head h = (bigram, or trigram for the second half of the heads) mod size_h + the sizes of the heads before it

What the published family says leaves open, and is taken so here: the three multipliers are the first three numbers of
splitmix64, as they come; products are read as signed numbers, and the rest is the one from 0 to size_h - 1 (read as
unsigned ones, it would be another wherever the top bit is set); before a text's first token stands its end-of-text id.
Sizes are successive primes from the first one above 20,000,000 on: their sum for 16 heads, 320,001,446, filled up to a
multiple of 128, is the number of rows that the family's tables have, so rows after the last head's are not looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MASK = 2**64 - 1


@dataclass(frozen=True)
class NgramHash:
    """multipliers: m0, m1, m2 as signed 64-bit numbers. sizes: rows of each head; bigrams have the first half of them.

    end: the end-of-text id. What was before it counts for no token after it: p2 is `end` where p1 is.
    """

    multipliers: tuple[int, int, int]
    sizes: tuple[int, ...]
    end: int

    @classmethod
    def published(cls, layer: int, end: int, heads: int = 16, above: int = 20_000_000) -> NgramHash:
        """That of a layer of the published family; heads, above: smaller ones for a small table."""
        m0, m1, m2 = (to_signed(value) for value in splitmix64(1234 + 10007 * layer, 3))
        return cls((m0, m1, m2), tuple(primes_above(above, heads)), end)

    @property
    def rows(self) -> int:
        """That it may ask for: ids are from 0 to `rows` - 1."""
        return sum(self.sizes)

    def heads(self, t: Any, p1: Any, p2: Any) -> list[Any]:
        """The rows of each head, for int64 arrays or tensors of one shape (NumPy's or torch's)."""
        m0, m1, m2 = self.multipliers
        bigram = t * m0 ^ p1 * m1
        trigram = bigram ^ (p2 + (p1 == self.end) * (self.end - p2)) * m2
        found, first = [], 0
        for head, size in enumerate(self.sizes):
            found.append((bigram if head < len(self.sizes) // 2 else trigram) % size + first)
            first += size
        return found

    def look_up(self, tokens: NDArray[np.int64], previous: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows (..., T, heads) of tokens (..., T), given the two before them, (..., 2), the older one first."""
        whole = np.concatenate([previous, tokens], axis=-1)
        return np.stack(self.heads(whole[..., 2:], whole[..., 1:-1], whole[..., :-2]), axis=-1)

    def start(self, *shape: int) -> NDArray[np.int64]:
        """What stands before texts: (*shape, 2)."""
        return np.full((*shape, 2), self.end, np.int64)


def splitmix64(seed: int, n: int) -> list[int]:
    """The first n numbers, unsigned (https://prng.di.unimi.it/splitmix64.c)."""
    found = []
    for _ in range(n):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        found.append(z ^ (z >> 31))
    return found


def to_signed(value: int) -> int:
    """The signed 64-bit number of the same bits."""
    return value - 2**64 if value >= 2**63 else value


def primes_above(low: int, n: int) -> list[int]:
    """The first n primes that are larger than `low`."""
    found: list[int] = []
    while len(found) < n:
        low += 1
        divisors = np.arange(2, int(low**0.5) + 1)
        if low > 1 and (low % divisors).all():
            found.append(low)
    return found
