import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from freetoken import topology
from freetoken.errors import ConfigError
from freetoken.topology import format_cpu_list, parse_cpu_list, parse_cpu_mask
from tests.support.sysfs import FakeSystem, paired_cores


def read_cpus(root: Path, cores: Iterable[tuple[int, ...]], mask: str, **kwargs: Any) -> topology.Topology:
    FakeSystem(root).add_cpus(cores, **kwargs)
    return topology.read(root, affinity=parse_cpu_list(mask))


@pytest.mark.parametrize(
    ("cores", "mask", "workers"),
    [
        pytest.param(paired_cores(8), "0-7", (0, 2, 4, 6), id="adjacent siblings"),
        pytest.param(paired_cores(8), "1,3,5,7", (1, 3, 5, 7), id="only second threads allowed"),
        pytest.param(paired_cores(8, stride=8), "0-7", tuple(range(8)), id="siblings far apart"),
        pytest.param([(cpu,) for cpu in range(16)], "0-7", tuple(range(8)), id="no SMT"),
        pytest.param(paired_cores(120, stride=120), "60-89,180-209", tuple(range(60, 90)), id="node 1, SMT"),
        pytest.param(paired_cores(120, stride=120), "60-89", tuple(range(60, 90)), id="node 1"),
        pytest.param([(6, 7), (10,), (14, 15)], "6-7,10,15", (6, 10, 15), id="sparse"),
        pytest.param([(0, 4), (1, 5), (2, 6), (3, 7)], "5", (5,), id="one CPU"),
        pytest.param([(c, c + 1024) for c in range(1024)], "0-2047", tuple(range(1024)), id="2048 CPUs"),
    ],
)
def test_one_worker_for_each_allowed_core(
    tmp_path: Path, cores: list[tuple[int, ...]], mask: str, workers: tuple[int, ...]
) -> None:
    found = read_cpus(tmp_path, cores, mask)

    assert found.workers() == found.physical_core_cpus() == workers
    assert set(found.workers(len(found.allowed))) == set(found.allowed) == parse_cpu_list(mask)
    assert set(found.cores) == set(cores)


def test_reading_leaves_the_process_mask_alone(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    read_cpus(tmp_path, paired_cores(8), "0-7").workers()

    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("groups", "n_workers"),
    [
        pytest.param({"/job": "765000 100000"}, 7, id="fraction"),
        pytest.param({"/job/leaf": "max 100000", "/job": "400000 100000"}, 4, id="parent is tighter"),
        pytest.param({"/job": "50000 100000"}, 1, id="less than one"),
        pytest.param({"/job/leaf": "max 100000", "/job": "max 100000"}, 48, id="none"),
        pytest.param({"/job": "6400000 100000"}, 48, id="more than the cores"),
    ],
)
def test_quota_v2(tmp_path: Path, groups: dict[str, str], n_workers: int) -> None:
    system = FakeSystem(tmp_path)
    system.add_cgroup_v2(max(groups, key=len))
    for group, text in groups.items():
        system.write(f"/sys/fs/cgroup{group}/cpu.max", text + "\n")

    assert len(read_cpus(tmp_path, paired_cores(48, stride=48), "0-95").workers()) == n_workers


@pytest.mark.parametrize(("quota_us", "n_workers"), [(-1, 48), (765_000, 7)])
def test_quota_v1(tmp_path: Path, quota_us: int, n_workers: int) -> None:
    system = FakeSystem(tmp_path)
    system.add_cgroup_v1("cpu,cpuacct", "/job")
    system.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", f"{quota_us}\n")
    system.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")

    assert len(read_cpus(tmp_path, paired_cores(48, stride=48), "0-95").workers()) == n_workers


def test_number_of_threads_is_taken_as_asked(tmp_path: Path) -> None:
    found = read_cpus(tmp_path, paired_cores(4), "0-5")

    assert found.workers(1) == (0,)
    assert found.workers(3) == (0, 2, 4)
    assert found.workers(5) == (0, 2, 4, 1, 3)


@pytest.mark.parametrize("threads", [0, -1, 7, True, 2.0, "2", "all", None])
def test_impossible_number_of_threads(tmp_path: Path, threads: Any) -> None:
    found = read_cpus(tmp_path, paired_cores(4), "0-5")

    with pytest.raises(ConfigError, match="from 1 to 6") as caught:
        found.workers(threads)
    assert caught.value.facts["value"] == threads


@pytest.mark.parametrize(
    ("mask", "quota", "threads", "why"),
    [
        ("0-3", None, "auto", "2 of 2 physical cores; no quota"),
        ("0-1", None, "auto", "1 of 2 physical cores; the CPU mask allows 1 (CPUs 0-1); no quota"),
        ("0-3", "150000 100000", "auto", "1 of 2 physical cores; quota of 1.5 CPUs"),
        ("0-3", "15 10", 2, "2 of 2 physical cores; 2 asked for; quota of 1.5 CPUs, exceeded as asked"),
        ("0-3", None, 3, "2 of 2 physical cores; 1 more on second threads; 3 asked for; no quota"),
    ],
)
def test_why(tmp_path: Path, mask: str, quota: str | None, threads: Any, why: str) -> None:
    if quota is not None:
        FakeSystem(tmp_path).write("/sys/fs/cgroup/cpu.max", quota)

    assert read_cpus(tmp_path, paired_cores(2), mask).why(threads) == why


def test_repr_is_short(tmp_path: Path) -> None:
    found = read_cpus(tmp_path, paired_cores(1024), "0-2047")

    assert repr(found) == "Topology(online=0-2047, n_cores=1024, allowed=0-2047, quota=None, source=sysfs)"


def test_offline_cpus_get_no_worker(tmp_path: Path) -> None:
    found = read_cpus(tmp_path, paired_cores(4), "0-7", online="1-5")

    assert found.allowed == found.online == (1, 2, 3, 4, 5)
    assert found.workers() == (1, 2, 4)


@pytest.mark.parametrize("mask", ["0", ""])
def test_mask_without_an_online_cpu(tmp_path: Path, mask: str) -> None:
    with pytest.raises(ConfigError, match="1-3"):
        read_cpus(tmp_path, paired_cores(2), mask, online="1-3")


@pytest.mark.parametrize("online", [None, "\n", "cpus", "0-", "3-1", "-1", "0-4294967295", "0,,1"])
def test_folders_tell_what_is_online_where_the_list_does_not(tmp_path: Path, online: str | None) -> None:
    system = FakeSystem(tmp_path)
    system.add_cpus(paired_cores(2))
    (tmp_path / "sys/devices/system/cpu/online").unlink()
    if online is not None:
        system.write("/sys/devices/system/cpu/online", online)
    system.write("/sys/devices/system/cpu/cpu1/online", "0\n")
    system.write("/sys/devices/system/cpu/cpu2/online", "1\n")
    system.write("/sys/devices/system/cpu/cpufreq/policy0", "")

    assert topology.read(tmp_path, affinity=range(4)).online == (0, 2, 3)


def test_siblings_from_other_files(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    system.write("/sys/devices/system/cpu/online", "0-3,40,72\n")
    for cpu, name, text in (
        (0, "thread_siblings", "00000000,00000005"),
        (2, "core_cpus", "00000000,00000005"),
        (1, "core_cpus_list", "1,3"),
        (3, "core_cpus", "a"),
        (40, "thread_siblings", "00000100,00000100,00000000"),
        (72, "thread_siblings", "00000100,00000100,00000000"),
    ):
        system.write(f"/sys/devices/system/cpu/cpu{cpu}/topology/{name}", text + "\n")

    assert topology.read(tmp_path, affinity=(0, 1, 2, 3, 40, 72)).cores == ((0, 2), (1, 3), (40, 72))


@pytest.mark.parametrize("garbage", ["", "\n", "none", "-3", "9" * 6000, "\x00", "0-1,"])
def test_a_cpu_without_siblings_is_its_own_core(tmp_path: Path, garbage: str) -> None:
    system = FakeSystem(tmp_path)
    system.add_cpus([(0, 1), (2,), (3,)])
    system.write("/sys/devices/system/cpu/cpu2/topology/thread_siblings_list", garbage)
    # contradicts the others:
    system.write("/sys/devices/system/cpu/cpu3/topology/thread_siblings_list", "0-3")

    assert topology.read(tmp_path, affinity=range(4)).cores == ((0, 1), (2,), (3,))


@pytest.mark.parametrize(("n_physical", "workers"), [(2, (4, 5)), (64, (4, 5, 6, 7)), (None, (4, 5, 6, 7))])
def test_silent_sysfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_physical: int | None, workers: tuple[int, ...]
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: n_physical)
    found = topology.read(tmp_path, affinity=range(4, 8))

    assert (found.source, found.online, found.workers()) == ("psutil", (4, 5, 6, 7), workers)
    assert "not known" in found.why()


def test_system_without_masks_or_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(logical: bool) -> int:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.setattr(psutil, "cpu_count", fail)

    assert topology.read(tmp_path).workers() == (0,)


def test_system_mask_is_trusted_over_a_renumbered_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSystem(tmp_path).add_cpus(paired_cores(8), online="0-3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 12, 13})

    assert topology.read(tmp_path).workers() == (2, 12)


def test_this_machine() -> None:
    found = topology.read()
    quota = math.inf if found.quota is None else max(1, int(found.quota))

    assert set(found.allowed) == os.sched_getaffinity(0)
    assert set(found.workers()) <= set(found.allowed)
    assert len(found.workers()) == min(len(found.physical_core_cpus()), quota)
    assert topology.read(pid=os.getpid()).quota == found.quota


@pytest.mark.parametrize("text", ["", "0", "0-3", "0,2,4", "0-1,8,10-12", "2047"])
def test_cpu_lists_come_back(text: str) -> None:
    assert format_cpu_list(parse_cpu_list(text + "\n")) == text


@pytest.mark.parametrize("text", ["a", "0-", "-1", "1-0", "0 1", ",", "0,", "65536", "0-99999999999"])
def test_bad_cpu_lists(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|invalid literal"):
        parse_cpu_list(text)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", ""), ("0", ""), ("3", "0-1"), ("1,80000000", "31-32"), ("ffffffff," * 63 + "0" * 8, "32-2047")],
)
def test_cpu_masks(text: str, cpus: str) -> None:
    assert format_cpu_list(parse_cpu_mask(text)) == cpus


@pytest.mark.parametrize("text", ["xyz", "-1", "f" * 20_000])
def test_bad_cpu_masks(text: str) -> None:
    with pytest.raises(ValueError, match=r"mask|invalid literal"):
        parse_cpu_mask(text)
