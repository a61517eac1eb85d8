"""The guard against fake files and a fake clock: what it sees, when it speaks, what it leaves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from freetoken.errors import CapacityError, ConfigError
from freetoken.memory import guard
from freetoken.memory.guard import Guard
from tests.support.sysfs import FakeSystem

MIB = 1 << 20
PSI = "some avg10=0.00 avg60=0.00 avg300=0.00 total=999999999\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
SYSTEM = "/proc/pressure/memory"


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watch_stalls(
    tmp_path: Path, stalled_s: list[float], file: str = SYSTEM, percent: float = 60, step: float = 1.0
) -> Guard:
    """A guard after samples `step` seconds apart; stalled_s: seconds of full stall before each of them."""
    system, clock = FakeSystem(tmp_path), Clock()
    total = 5_000_000
    system.write(file, PSI.format(total))
    watch = Guard(0, percent, root=tmp_path, clock=clock)
    watch.sample()
    for stalled in stalled_s:
        clock.now += step
        total += int(stalled * 1e6)
        system.write(file, PSI.format(total))
        watch.sample()
    return watch


@pytest.mark.parametrize(
    ("stalled_s", "stops"),
    [
        ([0.5] * 20, False),
        ([1.0] * 4, False),  # not for long enough
        ([1.0] * 5, True),
        ([1.0, 0, 0, 1.0, 0, 0, 1.0, 0, 0], False),
        ([0] * 30 + [1.0] * 3, False),
        ([0] * 30 + [0.7] * 5, True),
        ([1.0] * 5 + [0] * 30, True),  # once is enough
    ],
)
def test_stalls_over_five_seconds(tmp_path: Path, stalled_s: list[float], stops: bool) -> None:
    watch = watch_stalls(tmp_path, stalled_s)
    if not stops:
        watch.check()
        return
    with pytest.raises(CapacityError, match=r"60 % are allowed \(FREETOKEN_LOAD_MAX_PRESSURE\)") as caught:
        watch.check()
    assert caught.value.where == f"{tmp_path}{SYSTEM}"  # type: ignore[attr-defined]


def test_stalls_of_a_cgroup_and_its_ancestors(tmp_path: Path) -> None:
    FakeSystem(tmp_path).add_cgroup_v2("/job/leaf")
    watch = watch_stalls(tmp_path, [1.0] * 6, "/sys/fs/cgroup/job/memory.pressure")
    with pytest.raises(CapacityError, match=r"for 100 % of the last [56] s .* /\S*/job/memory\.pressure"):
        watch.check()


def test_stalls_are_not_watched_where_there_is_no_file_or_no_threshold(tmp_path: Path) -> None:
    watch_stalls(tmp_path, [1.0] * 30, percent=0).check()
    system = FakeSystem(tmp_path / "other")
    system.write(SYSTEM, "")
    Guard(0, 60, root=tmp_path / "other").sample()


def test_available_memory(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    system.add_meminfo(65 * 1024)
    watch = Guard(64 * MIB, 0, root=tmp_path)
    watch.sample()
    watch.check()
    system.add_meminfo(63 * 1024)
    watch.check()
    watch.sample()
    for _ in range(2):
        with pytest.raises(
            CapacityError, match=r"63\.00 MiB .* MemAvailable, and 64\.00 MiB .*FREETOKEN_LOAD_MIN_AVAILABLE"
        ) as caught:
            watch.check()
        assert (caught.value.available, caught.value.where) == (63 * MIB, "MemAvailable")  # type: ignore[attr-defined]


def test_available_memory_of_a_cgroup(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    system.add_meminfo(1 << 20)
    system.add_cgroup_v2("/job")
    system.write("/sys/fs/cgroup/job/memory.max", f"{100 * MIB}\n")
    system.write("/sys/fs/cgroup/job/memory.current", f"{90 * MIB}\n")
    for threshold, stops in ((11 * MIB, True), (10 * MIB, False), (0, False)):
        watch = Guard(threshold, 0, root=tmp_path)
        watch.sample()
        if stops:
            with pytest.raises(CapacityError, match=r"10\.00 MiB .*/job/memory\.max"):
                watch.check()
        else:
            watch.check()


def test_available_memory_is_not_watched_where_it_is_estimated(tmp_path: Path) -> None:
    watch = Guard(1 << 60, 0, root=tmp_path)
    watch.sample()
    watch.check()


def test_a_thread_samples_and_goes(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    system.add_meminfo(1 << 20)
    before = threading.enumerate()
    with Guard(64 * MIB, 60, root=tmp_path) as watch:
        (ours,) = [thread for thread in threading.enumerate() if thread not in before]
        assert ours.name == "freetoken-guard"
        watch.check()
        system.add_meminfo(1)
        ours.join(60)  # it ends once it has seen enough
        with pytest.raises(CapacityError):
            watch.check()
    assert threading.enumerate() == before
    with pytest.raises(ZeroDivisionError), Guard(64 * MIB, 60, root=tmp_path):
        raise ZeroDivisionError
    assert threading.enumerate() == before


def test_an_interruption_while_the_thread_starts_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSystem(tmp_path).add_meminfo(1 << 20)
    watch = Guard(64 * MIB, 60, root=tmp_path)
    started, real = [], threading.Thread.start

    def start(thread: threading.Thread) -> None:
        real(thread)
        started.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt), watch:
        pass
    (ours,) = started
    ours.join(60)
    assert not ours.is_alive()


def test_this_machine_is_healthy() -> None:
    with guard.from_settings() as watch:
        watch.check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FREETOKEN_LOAD_MIN_AVAILABLE", "-1"),
        ("FREETOKEN_LOAD_MIN_AVAILABLE", "1e3"),
        ("FREETOKEN_LOAD_MIN_AVAILABLE", "9" * 5000),
        ("FREETOKEN_LOAD_MAX_PRESSURE", "101"),
        ("FREETOKEN_LOAD_MAX_PRESSURE", "off"),
    ],
)
def test_thresholds_that_are_none(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}=.*whole number from 0 to"):
        guard.from_settings()
