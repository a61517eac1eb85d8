"""Which of a step's missing experts are fetched and which the host computes: the split that is done first.

Experts are whole. Of m that are missing f are fetched, which takes f times what one takes over the link; meanwhile the
host computes m - f, which takes a hand-off and m - f times what one takes there. Both sides read the same memory, so
what one expert takes depends on whether the other side is at work too. All of it is measured (calibrate.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from freetoken.errors import ConfigError
from freetoken.gpu.tables import MOST_ROUTES

_NEARLY = 1.03
"""What a split may cost that fetches more: an expert that is used again soon saves a whole miss."""
EXPECTED = '"auto", a share of what is missing from 0.0 to 1.0, or a number of experts from 0'


@dataclass(frozen=True)
class Prices:
    """Seconds of one missing expert.

    fetch, compute: with one side at work. fetch_beside, compute_beside: with both. hand_off: of a trip to the host,
    beyond what is computed there.
    """

    fetch: float
    compute: float
    fetch_beside: float
    compute_beside: float
    hand_off: float

    def cost(self, missing: int, fetched: int) -> float:
        """Seconds of a layer where so many experts are missing and so many of them fetched."""
        left = missing - fetched
        if not left:
            return fetched * self.fetch
        if not fetched:
            return self.hand_off + left * self.compute
        return max(fetched * self.fetch_beside, self.hand_off + left * self.compute_beside)

    def choose(self, missing: int) -> int:
        """How many to fetch: of splits nearly as fast the one that fetches most, since what is fetched stays."""
        costs = [self.cost(missing, fetched) for fetched in range(missing + 1)]
        return max(fetched for fetched, cost in enumerate(costs) if cost <= min(costs) * _NEARLY)


def parse_max_fetch(value: str | float) -> Callable[[int], int] | None:
    """From a number of missing experts to how many of them are fetched; None for "auto".

    A number with a point, or a float, is a share, which is rounded; a whole number is a count. Numbers may be text.
    Raises `ConfigError` for anything else.
    """
    text = "" if isinstance(value, bool) else str(value).strip().lower()
    if text == "auto":
        return None
    if re.fullmatch(r"[0-9]{1,9}", text):
        most = int(text)
        return lambda missing: min(missing, most)
    if (
        re.fullmatch(r"[0-9]*\.[0-9]+(e-[0-9]{1,3})?|[0-9]+\.|[0-9]+e-[0-9]{1,3}", text)
        and len(text) < 40
        and float(text) <= 1
    ):
        share = float(text)
        return lambda missing: math.floor(missing * share + 0.5)
    raise ConfigError(f"max_fetch={value!r} is none of {EXPECTED}", name="max_fetch", value=value, expected=EXPECTED)


def fetch_table(choose: Callable[[int], int]) -> list[int]:
    """As `SlotPool.split_misses` takes it."""
    return [choose(missing) for missing in range(MOST_ROUTES + 1)]
