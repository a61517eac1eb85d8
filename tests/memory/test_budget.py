import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from freetoken.errors import CapacityError
from freetoken.memory.budget import Budget, available, require
from tests.support.sysfs import FakeSystem

GIB = 1 << 30
MIB = 1 << 20
V2 = "/sys/fs/cgroup"
SYSTEM_KIB = 36_070_000
NEEDED_BYTES = 6 * GIB + 64 * MIB


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
    ("build", "budget_gib", "where", "fits"),
    [
        pytest.param(in_v2(6 * GIB), 5.5, "/job/memory.max", False, id="6 GiB"),
        pytest.param(in_v2(8 * GIB), 7.5, "/job/memory.max", True, id="8 GiB"),
        pytest.param(in_v2(16 * GIB), 15.5, "/job/memory.max", True, id="16 GiB"),
        pytest.param(in_v2("max"), 34.4, "MemAvailable", True, id="max"),
        pytest.param(in_limited_parent, 7.5, "/job/memory.max", True, id="parent of 8 GiB"),
        pytest.param(in_unlimited_v1, 34.4, "MemAvailable", True, id="unlimited v1"),
        pytest.param(lambda system: None, 34.4, "MemAvailable", True, id="no cgroup files"),
    ],
)
def test_budget_in_a_cgroup(
    tmp_path: Path, build: Callable[[FakeSystem], None], budget_gib: float, where: str, fits: bool
) -> None:
    system = FakeSystem(tmp_path)
    system.add_meminfo(SYSTEM_KIB)
    build(system)
    budget = available(tmp_path)

    assert round(budget.available_bytes / GIB, 1) == budget_gib
    assert budget.where.endswith(where)
    if fits:
        assert require(NEEDED_BYTES, what="loading", root=tmp_path) == budget
    else:
        with pytest.raises(CapacityError):
            require(NEEDED_BYTES, what="loading", root=tmp_path)


def test_refusal_names_need_budget_limit_and_next_step(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    system.add_meminfo(SYSTEM_KIB)
    in_v2(6 * GIB)(system)
    with pytest.raises(CapacityError) as caught:
        require(NEEDED_BYTES, what="loading 48 banks", root=tmp_path)
    error = pickle.loads(pickle.dumps(caught.value))

    assert (error.needed, error.available) == (NEEDED_BYTES, 11 * GIB // 2)
    assert error.where == f"{tmp_path}{V2}/job/memory.max"
    assert str(error) == (
        "loading 48 banks needs 6.06 GiB of host memory, but only 5.50 GiB can be had according to "
        f"{error.where}. Raise this limit of the container or job, "
        "or choose a smaller model or weight format."
    )


def test_exact_fit_and_one_byte_more(tmp_path: Path) -> None:
    FakeSystem(tmp_path).add_meminfo(1)

    assert require(1024, what="loading", root=tmp_path) == Budget(1024, "MemAvailable")
    with pytest.raises(CapacityError, match=r"1025 bytes .* 1024 bytes .* MemAvailable\. Free"):
        require(1025, what="loading", root=tmp_path)


@pytest.mark.parametrize("meminfo", [None, "", "MemFree: 5 kB", "MemAvailable:", "MemAvailable: -5 kB", "\x00"])
def test_psutil_where_meminfo_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meminfo: str | None) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * GIB))
    if meminfo is not None:
        FakeSystem(tmp_path).write("/proc/meminfo", meminfo)

    assert available(tmp_path) == Budget(3 * GIB, "psutil")


def test_this_machine() -> None:
    budget = available()

    assert 0 < budget.available_bytes <= psutil.virtual_memory().total
    assert require(0, what="nothing").available_bytes >= 0
