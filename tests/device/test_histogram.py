"""Histograms: every time has its bucket, and what is read from one is near what was put in."""

from __future__ import annotations

import numpy as np
import pytest

from freetoken.device.histogram import BUCKETS, Times, bucket, edge


def test_buckets_follow_each_other() -> None:
    assert [bucket(ns) for ns in range(18)] == [*range(16), 16, 16]
    assert [edge(i) for i in range(18)] == [*range(16), 16, 18]
    for i in range(BUCKETS):
        assert bucket(edge(i)) == i
        assert bucket(edge(i + 1) - 1) == i
        assert edge(i + 1) - edge(i) <= max(1, edge(i) / 8)
    assert edge(BUCKETS) == 1 << 36


@pytest.mark.parametrize("ns", [1 << 36, (1 << 63) - 1])
def test_what_is_longer_is_in_the_last_bucket(ns: int) -> None:
    assert bucket(ns) == BUCKETS - 1


def test_a_clock_that_goes_back_is_in_the_first() -> None:
    assert bucket(-1) == bucket(-(1 << 63)) == 0


def test_what_is_read_is_near_what_was_counted() -> None:
    times = np.random.default_rng(0).lognormal(10, 1, 20_001).astype(int)
    counts = np.bincount([bucket(int(ns)) for ns in times], minlength=BUCKETS)
    found = Times.of(counts.tolist())
    assert found.count == len(times)
    assert found.mean == pytest.approx(times.mean() * 1e-9, rel=0.02)
    assert found.p50 == pytest.approx(float(np.quantile(times, 0.5)) * 1e-9, rel=1 / 15)
    assert found.p99 == pytest.approx(float(np.quantile(times, 0.99)) * 1e-9, rel=1 / 15)


def test_one_time_and_none() -> None:
    counts = [0] * BUCKETS
    assert Times.of(counts) == Times(0, 0.0, 0.0, 0.0)
    counts[7] = 1
    assert Times.of(counts) == Times(1, 7e-9, 7e-9, 7e-9)
    with pytest.raises(ValueError, match="271 counts, expected 272"):
        Times.of(counts[1:])
