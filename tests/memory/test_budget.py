import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from freetoken.errors import CapacityError
from freetoken.memory.budget import Budget, Need, available, choose, require
from tests.support.sysfs import FakeSystem

GIB = 1 << 30
MIB = 1 << 20
V2 = "/sys/fs/cgroup"
SYSTEM_KIB = 36_070_000
SERIAL = Need(banks=6 * GIB, transient=64 * MIB)
LOADERS = {"parallel": Need(banks=6 * GIB, transient=3 * GIB), "serial": SERIAL}


def add_v2_limit(system: FakeSystem, folder: str, limit: int | str) -> None:
    system.write(f"{folder}/memory.max", f"{limit}\n")
    system.write(f"{folder}/memory.current", f"{GIB}\n")
    system.write(f"{folder}/memory.stat", f"anon 4096\ninactive_file {512 * MIB}\n")


def in_v2(limit: int | str) -> Callable[[FakeSystem], None]:
    def build(system: FakeSystem) -> None:
        system.add_cgroup_v2("/job")
        add_v2_limit(system, f"{V2}/job", limit)

    return build


def in_limited_parent(system: FakeSystem) -> None:
    system.add_cgroup_v2("/job/leaf")
    add_v2_limit(system, f"{V2}/job/leaf", "max")
    add_v2_limit(system, f"{V2}/job", 8 * GIB)


def in_unlimited_v1(system: FakeSystem) -> None:
    system.add_cgroup_v1("memory", "/job")
    system.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    system.write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", f"{GIB}\n")


@pytest.mark.parametrize(
    ("build", "budget_gib", "where", "loader"),
    [
        pytest.param(in_v2(6 * GIB), 5.5, "/job/memory.max", None, id="6 GiB"),
        pytest.param(in_v2(8 * GIB), 7.5, "/job/memory.max", "serial", id="8 GiB"),
        pytest.param(in_v2(16 * GIB), 15.5, "/job/memory.max", "parallel", id="16 GiB"),
        pytest.param(in_v2("max"), 34.4, "MemAvailable", "parallel", id="max"),
        pytest.param(in_limited_parent, 7.5, "/job/memory.max", "serial", id="parent of 8 GiB"),
        pytest.param(in_unlimited_v1, 34.4, "MemAvailable", "parallel", id="unlimited v1"),
        pytest.param(lambda system: None, 34.4, "MemAvailable", "parallel", id="no cgroup files"),
    ],
)
def test_loader_in_a_cgroup(
    tmp_path: Path, build: Callable[[FakeSystem], None], budget_gib: float, where: str, loader: str | None
) -> None:
    system = FakeSystem(tmp_path)
    system.add_meminfo(SYSTEM_KIB)
    build(system)
    budget = available(tmp_path)

    assert round(budget.available_bytes / GIB, 1) == budget_gib
    assert budget.where.endswith(where)
    if loader is not None:
        assert choose(LOADERS, what="loading", root=tmp_path) == loader
        assert require(SERIAL, what="loading", root=tmp_path) == budget
    else:
        with pytest.raises(CapacityError, match=r"6\.06 GiB .* 5\.50 GiB .*/job/memory\.max"):
            choose(LOADERS, what="loading", root=tmp_path)


def test_refusal_names_need_budget_limit_and_next_step(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    system.add_meminfo(SYSTEM_KIB)
    in_v2(6 * GIB)(system)
    with pytest.raises(CapacityError) as caught:
        choose(LOADERS, what="loading 48 banks", root=tmp_path)
    error = pickle.loads(pickle.dumps(caught.value))

    assert (error.needed, error.available) == (6 * GIB + 64 * MIB, 11 * GIB // 2)
    assert error.where == f"{tmp_path}{V2}/job/memory.max"
    assert str(error) == (
        "loading 48 banks needs 6.06 GiB of host memory (banks 6.00 GiB, while loading 64.00 MiB), but only 5.50 GiB "
        f"can be had according to {error.where}. Raise this limit of the container or job, "
        "or choose a smaller model or weight format."
    )


def test_exact_fit_and_one_byte_more(tmp_path: Path) -> None:
    FakeSystem(tmp_path).add_meminfo(1)

    assert require(Need(dense=1024), what="loading", root=tmp_path) == Budget(1024, "MemAvailable")
    with pytest.raises(CapacityError, match=r"1025 bytes .* 1024 bytes .* MemAvailable\. Free"):
        require(Need(dense=1000, banks=25), what="loading", root=tmp_path)


def test_what_must_stay_free_is_no_part_of_the_need_but_of_the_check(tmp_path: Path) -> None:
    FakeSystem(tmp_path).add_meminfo(1024)

    assert choose({"a": Need(banks=900 << 10, spare=124 << 10)}, what="loading", root=tmp_path) == "a"
    with pytest.raises(CapacityError, match=r"needs 900\.0 KiB .* 1\.00 MiB .*, of which 124\.0 KiB must") as caught:
        require(Need(banks=900 << 10, spare=(124 << 10) + 1), what="loading", root=tmp_path)
    assert caught.value.needed == 900 << 10  # type: ignore[attr-defined]


def test_reserved_huge_pages_are_no_part_of_what_is_available(tmp_path: Path) -> None:
    """But they are address space, and may be all that banks need."""
    add_limits(FakeSystem(tmp_path), address=str(3 * GIB), data="unlimited", locked="unlimited", cap=0)
    need = Need(banks=GIB, reserved=GIB - MIB, dense=MIB)

    require(need, what="loading", root=tmp_path)
    FakeSystem(tmp_path).add_meminfo(2 << 10)
    require(need, what="loading", root=tmp_path)
    FakeSystem(tmp_path).add_meminfo((2 << 10) - 1)
    with pytest.raises(CapacityError, match=r"needs 2\.00 MiB .*banks 1\.00 MiB.* MemAvailable"):
        require(need, what="loading", root=tmp_path)
    with pytest.raises(CapacityError, match="RLIMIT_AS"):
        require(Need(banks=3 * GIB, reserved=3 * GIB), what="loading", root=tmp_path)


def test_threads_fill_address_space(tmp_path: Path) -> None:
    add_limits(FakeSystem(tmp_path), address=str(2 * GIB), data=str(GIB), locked="unlimited", cap=0)

    require(Need(banks=424 * MIB, threads=8), what="loading", root=tmp_path)
    with pytest.raises(CapacityError, match="RLIMIT_AS"):
        require(Need(banks=424 * MIB, threads=9), what="loading", root=tmp_path)
    require(Need(banks=448 * MIB, threads=8), what="loading", root=tmp_path)
    with pytest.raises(CapacityError, match="RLIMIT_DATA"):
        require(Need(banks=449 * MIB, threads=8), what="loading", root=tmp_path)


def add_limits(
    system: FakeSystem, *, address: str = "unlimited", data: str = "unlimited", locked: str, cap: int
) -> None:
    """A process that uses 1 GiB of address space, half of it private, and has locked 1 MiB."""
    system.add_meminfo(SYSTEM_KIB)
    rows = {"Max data size": data, "Max locked memory": locked, "Max address space": address}
    lines = (f"{name:<25} {value:<20} {'unlimited':<20} bytes     " for name, value in rows.items())
    system.write("/proc/self/limits", "Limit                     Soft Limit  ...\n" + "\n".join(lines) + "\n")
    status = f"VmSize:\t {GIB >> 10} kB\nVmLck:\t 1024 kB\nVmData:\t {GIB >> 11} kB\nCapEff:\t{cap:016x}\n"
    system.write("/proc/self/status", status)


@pytest.mark.parametrize(
    ("limits", "where", "needed", "left"),
    [
        ({"address": str(7 * GIB)}, "RLIMIT_AS", 6 * GIB + 64 * MIB, 6 * GIB),
        ({"data": str(6 * GIB)}, "RLIMIT_DATA", 6 * GIB + 64 * MIB, 11 * GIB // 2),
        ({"address": str(GIB // 2)}, "RLIMIT_AS", 6 * GIB + 64 * MIB, 0),
        ({}, None, 0, 0),
    ],
)
def test_limits_of_the_process(
    tmp_path: Path, limits: dict[str, str], where: str | None, needed: int, left: int
) -> None:
    add_limits(FakeSystem(tmp_path), **limits, locked="8388608", cap=0)
    if where is None:
        assert require(SERIAL, what="loading", root=tmp_path).where == "MemAvailable"
        return
    with pytest.raises(CapacityError, match=f"{where}.*ulimit") as caught:
        require(SERIAL, what="loading", root=tmp_path)
    assert (caught.value.where, caught.value.needed, caught.value.available) == (where, needed, left)  # type: ignore[attr-defined]
    assert available(tmp_path).where == where


def test_mapped_files_count_while_there_are_no_banks_yet(tmp_path: Path) -> None:
    add_limits(FakeSystem(tmp_path), address=str(8 * GIB), data=str(5 * GIB), locked="unlimited", cap=0)

    fits = Need(banks=3 * GIB, dense=GIB, mapped=3 * GIB)  # 1 + 2 x 3 of 7 GiB of addresses, 1 + 3 of 4.5 GiB
    require(fits, what="loading", root=tmp_path)
    with pytest.raises(CapacityError, match="RLIMIT_AS"):
        require(Need(dense=GIB, mapped=3 * GIB + 1), what="loading", root=tmp_path)
    add_limits(FakeSystem(tmp_path), address="unlimited", data=str(4 * GIB), locked="unlimited", cap=0)
    with pytest.raises(CapacityError, match="RLIMIT_DATA"):
        require(fits, what="loading", root=tmp_path)


@pytest.mark.parametrize(
    ("locked", "cap", "uid_map", "fits"),
    [
        (f"{8 * MIB}", 0, None, False),
        (f"{8 * MIB}", 1 << 14, None, True),
        (f"{8 * MIB}", 1 << 14, "         0          0 4294967295", True),
        (f"{8 * MIB}", 1 << 14, "         0       1000          1", False),  # a capability of its user namespace alone
        (f"{7 * GIB}", 0, None, True),
        (f"{6 * GIB + MIB - 1}", 0, None, False),  # 1 MiB is locked already
        (f"{6 * GIB + MIB}", 0, None, True),
        ("unlimited", 0, None, True),
    ],
)
def test_limit_of_locked_memory(tmp_path: Path, locked: str, cap: int, uid_map: str | None, fits: bool) -> None:
    system = FakeSystem(tmp_path)
    add_limits(system, locked=locked, cap=cap)
    if uid_map is not None:
        system.write("/proc/self/uid_map", f"{uid_map}\n")
    pinned = Need(banks=6 * GIB, pinned=6 * GIB)
    require(SERIAL, what="loading", root=tmp_path)
    if fits:
        require(pinned, what="loading", root=tmp_path)
        return
    with pytest.raises(CapacityError, match=r"locked memory, but .* RLIMIT_MEMLOCK.*ulimit -l.*FREETOKEN_MLOCK=off"):
        require(pinned, what="loading", root=tmp_path)


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    system.add_meminfo(SYSTEM_KIB)
    in_v2(8 * GIB)(system)
    system.write(f"{V2}/job/memory.high", f"{6 * GIB}\n")

    budget = available(tmp_path)

    assert (budget.available_bytes, budget.where) == (11 * GIB // 2, f"{tmp_path}{V2}/job/memory.high")


@pytest.mark.parametrize("meminfo", [None, "", "MemFree: 5 kB", "MemAvailable:", "MemAvailable: -5 kB", "\x00"])
def test_psutil_where_meminfo_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meminfo: str | None) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * GIB))
    if meminfo is not None:
        FakeSystem(tmp_path).write("/proc/meminfo", meminfo)

    assert available(tmp_path) == Budget(3 * GIB, "psutil")


def test_this_machine() -> None:
    budget = available()

    assert 0 < budget.available_bytes <= psutil.virtual_memory().total
    assert require(Need(), what="nothing").available_bytes >= 0
