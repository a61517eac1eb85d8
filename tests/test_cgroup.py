from pathlib import Path

import pytest

from freetoken.cgroup import MemoryLimit, cpu_quota, memory_limit
from tests.support.sysfs import FakeSystem

V2 = "/sys/fs/cgroup"
GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    return FakeSystem(tmp_path)


def add_v1_quota(system: FakeSystem, folder: str, quota_us: object, period_us: object = 100_000) -> None:
    system.write(f"{folder}/cpu.cfs_quota_us", f"{quota_us}\n")
    system.write(f"{folder}/cpu.cfs_period_us", f"{period_us}\n")


def add_v2_memory(system: FakeSystem, folder: str, limit: object, used: object, inactive: object = 0) -> None:
    system.write(f"{folder}/memory.max", f"{limit}\n")
    system.write(f"{folder}/memory.current", f"{used}\n")
    system.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive}\nactive_file 0\n")


def add_v1_memory(system: FakeSystem, folder: str, limit: int, used: int, stat: str = "") -> None:
    system.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
    system.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
    system.write(f"{folder}/memory.stat", stat)


def test_nothing_there(system: FakeSystem) -> None:
    assert cpu_quota(system.root) is None
    assert memory_limit(system.root) is None
    assert cpu_quota(system.root / "missing") is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n", "max", "max 100000", "100000", "0 100000", "-1 100000", "100000 0", "100000 -5"),
        *("1e5 100000", "a b", "100000 100000 7", "nan 1", "\x00\xff", "9" * 400 + " 1", "9" * 6000 + " 1"),
    ],
)
def test_quota_that_is_none_or_nonsense(system: FakeSystem, text: str) -> None:
    system.add_cgroup_v2("/a/b")
    system.write(f"{V2}/a/b/cpu.max", text)
    assert cpu_quota(system.root) is None

    system.write(f"{V2}/a/cpu.max", "250000 100000")
    assert cpu_quota(system.root) == 2.5


@pytest.mark.parametrize(("leaf", "middle", "quota"), [(100, 200, 1.0), (200, 100, 1.0), (200, "max", 2.0)])
def test_tightest_ancestor_wins(system: FakeSystem, leaf: object, middle: object, quota: float) -> None:
    system.add_cgroup_v2("/a/b/c")
    system.write(f"{V2}/a/b/c/cpu.max", f"{leaf} 100")
    system.write(f"{V2}/a/b/cpu.max", f"{middle} 100")
    system.write(f"{V2}/a/cpu.max", "max 100")
    system.write(f"{V2}/other/cpu.max", "1 100")

    assert cpu_quota(system.root) == quota


def test_v1_ancestors(system: FakeSystem) -> None:
    system.add_cgroup_v1("cpuset", "/")
    system.add_cgroup_v1("cpu,cpuacct", "/a/b")
    add_v1_quota(system, "/sys/fs/cgroup/cpu,cpuacct/a/b", -1)
    add_v1_quota(system, "/sys/fs/cgroup/cpu,cpuacct/a", 50_000, 20_000)
    add_v1_quota(system, "/sys/fs/cgroup/cpuset", 1)

    assert cpu_quota(system.root) == 2.5


@pytest.mark.parametrize("period_us", ["", "0", "-1", "soon"])
def test_v1_without_a_period(system: FakeSystem, period_us: str) -> None:
    system.add_cgroup_v1("cpu")
    add_v1_quota(system, "/sys/fs/cgroup/cpu", 100_000, period_us)

    assert cpu_quota(system.root) is None


def test_hybrid_mounts(system: FakeSystem) -> None:
    system.add_cgroup_v1("cpu", "/one")
    system.add_cgroup_v1("memory", "/two")
    system.add_cgroup_v2("/three", mount="/sys/fs/cgroup/unified")
    add_v1_quota(system, "/sys/fs/cgroup/cpu/one", 300_000)
    add_v1_memory(system, "/sys/fs/cgroup/memory/two", 4 * GIB, GIB)
    assert (cpu_quota(system.root), memory_limit(system.root)) == (
        3.0,
        MemoryLimit(4 * GIB, GIB, f"{system.root}/sys/fs/cgroup/memory/two/memory.limit_in_bytes"),
    )

    system.write("/sys/fs/cgroup/unified/three/cpu.max", "200000 100000")
    assert cpu_quota(system.root) == 2.0


@pytest.mark.parametrize(
    ("path", "top"),
    [
        pytest.param("/", "/", id="own namespace"),
        pytest.param("/docker/ab", "/docker/ab", id="v1 container"),
        pytest.param("/docker/ab", "/", id="path of the host"),
        pytest.param("/", "/docker/ab", id="mount of the host"),
        pytest.param("/", "/../..", id="mounted outside the namespace"),
        pytest.param("/../other", "/", id="process outside the namespace"),
        pytest.param("/gone (deleted)", "/", id="deleted"),
        pytest.param("/a\0b", "/", id="damaged"),
        pytest.param("", "/", id="empty"),
    ],
)
def test_mount_point_stands_in_for_a_path_that_is_not_there(system: FakeSystem, path: str, top: str) -> None:
    system.add_cgroup_v2(path, top=top)
    system.write(f"{V2}/cpu.max", "400000 100000")
    system.write(f"{V2}/../other/cpu.max", "100000 100000")  # what "/../other" must not reach

    assert cpu_quota(system.root) == 4.0


def test_path_below_the_mounted_part(system: FakeSystem) -> None:
    system.add_cgroup_v2("/docker/ab/worker", top="/docker/ab")
    system.write(f"{V2}/worker/cpu.max", "100000 100000")

    assert cpu_quota(system.root) == 1.0


def test_mount_of_another_part_says_nothing(system: FakeSystem) -> None:
    system.add_cgroup_v2("/mine")
    system.add_cgroup_v2("/mine", mount="/mnt/theirs", top="/theirs")
    system.write(f"{V2}/mine/cpu.max", "400000 100000")
    system.write("/mnt/theirs/cpu.max", "100000 100000")

    assert cpu_quota(system.root) == 4.0


def test_mount_point_with_a_blank(system: FakeSystem) -> None:
    system.add_cgroup_v2("/", mount=r"/my\040cgroups")
    system.write("/my cgroups/cpu.max", "400000 100000")

    assert cpu_quota(system.root) == 4.0


@pytest.mark.parametrize("table", ["/proc/mounts", "/proc/self/mounts"])
def test_mounts_without_mountinfo(system: FakeSystem, table: str) -> None:
    system.write(table, "proc /proc proc rw 0 0\nbad\n")
    system.write(table, "cgroup /cg/cpu cgroup rw,cpu 0 0\nnone /cg/2 cgroup2 rw 0 0\n", append=True)
    system.write("/proc/self/cgroup", "1:cpu:/a:b\n0::/v\n")
    add_v1_quota(system, "/cg/cpu/a:b", 500_000)
    assert cpu_quota(system.root) == 5.0

    system.write("/cg/2/v/cpu.max", "100000 100000")
    assert cpu_quota(system.root) == 1.0


@pytest.mark.parametrize("folder", ["", "/unified"])
def test_customary_mounts_without_any_table(system: FakeSystem, folder: str) -> None:
    system.write("/proc/self/mountinfo", "garbage\n\n1 2 - cgroup2\n - \n")
    system.write("/proc/self/cgroup", "garbage\n::\n0:/x\n")
    system.write(f"{V2}{folder}/cpu.max", "100000 100000")
    assert cpu_quota(system.root) == 1.0


def test_another_process(system: FakeSystem) -> None:
    system.add_cgroup_v2("/mine")
    system.write("/proc/7/cgroup", "0::/theirs\n")
    for group, cpus in (("mine", 1), ("theirs", 2)):
        system.write(f"{V2}/{group}/cpu.max", f"{cpus} 1")
        add_v2_memory(system, f"{V2}/{group}", cpus * GIB, 0)
    limit = memory_limit(system.root, pid=7)

    assert cpu_quota(system.root, pid=7) == 2.0
    assert limit is not None
    assert limit.limit_bytes == 2 * GIB


def test_least_headroom_wins_not_the_least_limit(system: FakeSystem) -> None:
    system.add_cgroup_v2("/parent/leaf")
    add_v2_memory(system, f"{V2}/parent/leaf", 4 * GIB, GIB)
    add_v2_memory(system, f"{V2}/parent", 8 * GIB, 7 * GIB, GIB // 2)
    limit = memory_limit(system.root)

    assert limit == MemoryLimit(8 * GIB, 13 * GIB // 2, f"{system.root}{V2}/parent/memory.max")
    assert limit.headroom_bytes == 3 * GIB // 2


@pytest.mark.parametrize("limit", ["max", "", "-1", "lots", str(1 << 63), "9223372036854771712"])
def test_no_memory_limit(system: FakeSystem, limit: str) -> None:
    system.add_cgroup_v2("/")
    add_v2_memory(system, V2, limit, GIB)

    assert memory_limit(system.root) is None


@pytest.mark.parametrize("page_bytes", [4096, 65536])
def test_v1_unlimited(system: FakeSystem, page_bytes: int) -> None:
    system.add_cgroup_v1("memory")
    add_v1_memory(system, "/sys/fs/cgroup/memory", ((1 << 63) - 1) // page_bytes * page_bytes, GIB)

    assert memory_limit(system.root) is None


@pytest.mark.parametrize(
    ("stat", "used_bytes"),
    [
        ("inactive_file 100\ntotal_inactive_file 300\n", 700),
        ("inactive_file 100\n", 900),
        ("inactive_file 100\nactive_file 300\n", 750),
        ("inactive_file -100\n", 1000),
        ("inactive_file 5000\n", 0),
        ("inactive_file\nx y z\n", 1000),
        ("", 1000),
    ],
)
def test_page_cache_is_free(system: FakeSystem, stat: str, used_bytes: int) -> None:
    system.add_cgroup_v1("memory")
    add_v1_memory(system, "/sys/fs/cgroup/memory", 2000, 1000, stat)
    limit = memory_limit(system.root)

    assert limit is not None
    assert limit.used_bytes == used_bytes


def test_limit_with_unreadable_use_and_limit_below_use(system: FakeSystem) -> None:
    system.add_cgroup_v2("/a")
    system.write(f"{V2}/a/memory.max", "1000")
    limit = memory_limit(system.root)
    assert limit is not None
    assert (limit.used_bytes, limit.headroom_bytes) == (0, 1000)

    add_v2_memory(system, V2, 0, 500)
    limit = memory_limit(system.root)
    assert limit is not None
    assert (limit.limit_bytes, limit.headroom_bytes) == (0, 0)


def test_a_folder_in_place_of_a_file(system: FakeSystem) -> None:
    system.add_cgroup_v2("/")
    (system.root / "sys/fs/cgroup/cpu.max").mkdir(parents=True)
    (system.root / "sys/fs/cgroup/memory.max").mkdir()

    assert cpu_quota(system.root) is None
    assert memory_limit(system.root) is None


def test_this_machine() -> None:
    quota = cpu_quota()
    limit = memory_limit()

    assert quota is None or quota > 0
    assert limit is None or limit.headroom_bytes <= limit.limit_bytes
