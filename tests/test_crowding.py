"""A warning, once, when cores are taken away for a while."""

from __future__ import annotations

import logging

import pytest

from freetoken import crowding
from freetoken.crowding import IN_A_ROW, INTERVAL, LIMIT, CrowdWatch, involuntary_switches


class Machine:
    """A clock and a count of switches that tests move."""

    def __init__(self) -> None:
        self.now, self.count = 100.0, 7.0

    def run(self, watch: CrowdWatch, seconds: float, rate: float) -> None:
        """Layers of 10 ms, while so many switches happen in a second."""
        for _ in range(round(seconds / 0.01)):
            self.now += 0.01
            self.count += rate * 0.01
            watch.look()

    def watch(self, workers: int) -> CrowdWatch:
        return CrowdWatch(workers, lambda: int(self.count), lambda: self.now)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.mark.parametrize("workers", [1, 16])
def test_crowded_cores_are_told_once(machine: Machine, caplog: pytest.LogCaptureFixture, workers: int) -> None:
    watch = machine.watch(workers)
    machine.run(watch, (IN_A_ROW - 0.5) * INTERVAL, 2 * LIMIT * workers)
    assert not caplog.records, "it may be chance"
    machine.run(watch, 20 * INTERVAL, 2 * LIMIT * workers)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{2 * LIMIT * workers:.0f} times a second" in record.getMessage()


def test_it_is_not_told_again(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    watch = machine.watch(1)
    for _ in range(3):
        machine.run(watch, 2 * IN_A_ROW * INTERVAL, 2 * LIMIT)
        machine.run(watch, 5 * INTERVAL, 0)
    assert len(caplog.records) == 1


def test_a_quiet_machine_is_not_told(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    watch = machine.watch(2)
    for _ in range(5):
        machine.run(watch, 4 * INTERVAL, 1.8 * LIMIT)
        machine.run(watch, INTERVAL, 10 * LIMIT)  # falls into two intervals, or one
    assert not caplog.records


def test_what_happens_in_a_pause_is_not_counted(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    watch = machine.watch(2)
    for _ in range(10):
        machine.now += 100 * INTERVAL
        machine.count += 100 * INTERVAL * 10 * LIMIT
        machine.run(watch, 0.5 * INTERVAL, 0)
    assert not caplog.records


def test_a_system_that_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    watch = CrowdWatch(2, lambda: None, lambda: 0.0)
    for _ in range(10):
        watch.look()
    assert not caplog.records


def test_this_system(monkeypatch: pytest.MonkeyPatch) -> None:
    if crowding.resource is not None:
        first = involuntary_switches()
        assert first is not None and first >= 0
    monkeypatch.setattr(crowding, "resource", None)
    assert involuntary_switches() is None
