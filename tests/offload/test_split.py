"""How many missing experts are fetched: the fastest split of whole ones, or what was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from freetoken.errors import ConfigError
from freetoken.gpu.tables import MOST_ROUTES
from freetoken.offload.calibrate import Calibration
from freetoken.offload.split import Prices, fetch_table, parse_max_fetch

EVEN = Prices(fetch=2.0, compute=1.4, fetch_beside=3.0, compute_beside=1.5, hand_off=0.25)


def test_the_split_that_is_done_first() -> None:
    """By hand: of 3, one fetched takes max(3, 0.25 + 2 * 1.5)."""
    assert [EVEN.cost(3, f) for f in range(4)] == pytest.approx([4.45, 3.25, 6.0, 6.0])
    assert [EVEN.choose(m) for m in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    tie = Prices(1.0, 1.0, 1.0, 1.0, 0.0)
    assert [tie.choose(m) for m in (1, 2, 3)] == [1, 1, 2], "what is fetched stays"


def test_a_side_that_is_useless() -> None:
    slow_host = Prices(1.0, 50.0, 1.0, 50.0, 0.0)
    assert fetch_table(slow_host.choose) == list(range(MOST_ROUTES + 1))[:50] + [
        slow_host.choose(m) for m in range(50, MOST_ROUTES + 1)
    ]
    slow_link = Prices(500.0, 1.0, 500.0, 1.0, 5.0)
    assert set(fetch_table(slow_link.choose)) == {0}
    far = Prices(1.0, 0.5, 1.0, 0.5, 2.5)
    assert [far.choose(m) for m in (1, 2, 3, 4)] == [1, 2, 3, 3], "a trip must be worth it"


@pytest.mark.parametrize(
    ("missing", "hand_off", "all_fetched"), [(1, 80e-6, True), (1, 20e-6, False), (4, 80e-6, False), (4, 20e-6, False)]
)
def test_a_ratio_of_rates_is_not_enough(missing: int, hand_off: float, all_fetched: bool) -> None:
    """Experts of 2,764,800 bytes; a host of 63.8 GB/s and a link of 24.9, 54.0 and 23.9 together."""
    fetch, compute, fetch_beside, compute_beside = (2_764_800 / rate for rate in (24.9e9, 63.8e9, 23.9e9, 54.0e9))
    prices = Prices(fetch, compute, fetch_beside, compute_beside, hand_off)
    assert (prices.choose(missing) == missing) == all_fetched


def test_never_worse_than_either_side_alone() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        prices = Prices(*random.exponential(size=5).tolist())
        for missing, fetched in enumerate(fetch_table(prices.choose)):
            assert 0 <= fetched <= missing
            cost = prices.cost(missing, fetched)
            others = [prices.cost(missing, f) for f in range(missing + 1)]
            assert cost <= 1.03 * min(others)
            assert all(other > 1.03 * min(others) for other in others[fetched + 1 :])


def test_what_was_measured_goes_before_what_is_reckoned() -> None:
    found = Calibration(EVEN, experts=4, fetches=3, nbytes=6)
    assert [found.choose(m) for m in (3, 4, 5)] == [1, 3, 2]
    assert str(found) == "fetching 75% of misses over PCIe, the rest on the CPU: 0 and 0 GB/s together"


@pytest.mark.parametrize(
    ("asked", "fetches"),
    [
        (0, [0, 0, 0, 0, 0]), ("2", [0, 1, 2, 2, 2]), (1000, [0, 1, 2, 3, 4]), (0.5, [0, 1, 1, 2, 2]),
        ("0.25", [0, 0, 1, 1, 1]), (0.0, [0, 0, 0, 0, 0]), (1.0, [0, 1, 2, 3, 4]), (" .75 ", [0, 1, 2, 2, 3]),
        (np.float64(0.5), [0, 1, 1, 2, 2]), (1e-9, [0, 0, 0, 0, 0]), (1e-300, [0, 0, 0, 0, 0]),
    ],
)  # fmt: skip
def test_as_asked(asked: str | float, fetches: list[int]) -> None:
    choose = parse_max_fetch(asked)
    assert choose is not None and fetch_table(choose)[:5] == fetches


@pytest.mark.parametrize(
    "asked",
    ["", "half", -1, -0.5, 1.5, "1.01", float("nan"), float("inf"), True, None, "9" * 5000, "\uff11", "50%", b"1", [1]],
)
def test_refused(asked: object) -> None:
    with pytest.raises(ConfigError, match="max_fetch="):
        parse_max_fetch(asked)  # type: ignore[arg-type]


def test_auto() -> None:
    assert parse_max_fetch("auto") is None and parse_max_fetch(" AUTO ") is None
