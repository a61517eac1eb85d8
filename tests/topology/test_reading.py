import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from freetoken import topology
from freetoken.errors import ConfigError
from freetoken.topology import Rank, format_cpu_list, parse_cpu_list, ranks
from tests.support.sysfs import CPUS, FakeSystem, paired_cores, single_cores


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    return FakeSystem(tmp_path)


@pytest.fixture
def whole(system: FakeSystem) -> FakeSystem:
    """A machine that says everything there is to read."""
    system.add_cpus(paired_cores(4, stride=4))
    system.add_offline_cpu(8)
    system.write(f"{CPUS}/present", "0-8\n")
    system.add_packages((0, 1, 4, 5), (2, 3, 6, 7))
    system.add_node(0, "0-1,4-5", gib=1, distances="10 21")
    system.add_node(1, "2-3,6-7", gib=2, distances="21 10")
    system.write("/sys/devices/system/node/online", "0-1\n")
    system.add_clocks({cpu: 5_000_000 if cpu % 4 < 3 else 3_000_000 for cpu in range(8)})
    system.add_arm_parts({cpu: "0xd87" if cpu % 4 == 3 else "0xd85" for cpu in range(8)})
    system.write("/sys/devices/cpu_core/cpus", "0-2,4-6\n")
    system.write("/sys/devices/cpu_atom/cpus", "3,7\n")
    system.add_pci("0000:17:00.0", node=1, kind="0x030200", vendor="0x10de")
    system.write("/proc/driver/nvidia/gpus/0000:17:00.0/information", "Model: NVIDIA H200\n")
    system.add_status("0-8", "0-1")
    system.add_cgroup_v2("/job")
    system.write("/sys/fs/cgroup/job/cpu.max", "600000 100000\n")
    system.write("/sys/fs/cgroup/job/cpuset.cpus.effective", "0-7\n")
    system.write("/sys/fs/cgroup/job/cpuset.mems.effective", "0-1\n")
    system.write("/proc/mounts", "none /dev/cpuset cpuset rw 0 0\n")
    system.write("/proc/self/cpuset", "/job\n")
    return system


def test_everything_is_read(whole: FakeSystem) -> None:
    found = topology.read(whole.root)

    assert found.online == found.mask == found.allowed == tuple(range(8))
    assert found.offline == (8,)
    assert found.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found.packages == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert [(node.id, node.memory_bytes) for node in found.nodes] == [(0, 1 << 30), (1, 2 << 30)]
    assert (found.performance, found.efficiency) == ((0, 1, 2, 4, 5, 6), (3, 7))
    assert [(gpu.gpu, gpu.node) for gpu in found.gpus] == [("NVIDIA H200", 1)]
    assert (found.mems, found.quota, found.rank, found.source) == ((0, 1), 6.0, Rank(), "sysfs")
    assert found.workers() == (0, 1, 2)


# --- never an exception ----------------------------------------------------------------------------------------------

GARBAGE = [b"", b"\n", b"-1", b"x" * 5000, b"9" * 6000, b"\x00\xff\xfe", b"0-", b"4294967295", b"0-9999\n", b"a b c\n"]


def check_usable(root: Path) -> None:
    found = topology.read(root)
    assert found.workers()
    assert set(found.workers()) <= set(found.allowed)
    assert str(found)
    json.dumps(found.to_dict())


def test_garbage_in_any_file(whole: FakeSystem) -> None:
    files = [file for file in whole.root.rglob("*") if file.is_file()]
    assert len(files) > 40
    for file in files:
        good = file.read_bytes()
        for garbage in GARBAGE:
            file.write_bytes(garbage)
            check_usable(whole.root)
        file.unlink()
        check_usable(whole.root)
        file.mkdir()
        check_usable(whole.root)
        file.rmdir()
        file.write_bytes(good)


@pytest.mark.parametrize("garbage", [None, *GARBAGE])
def test_garbage_in_every_file(whole: FakeSystem, garbage: bytes | None) -> None:
    for file in [file for file in whole.root.rglob("*") if file.is_file()]:
        file.unlink()
        if garbage is not None:
            file.write_bytes(garbage)

    check_usable(whole.root)


def test_a_folder_that_is_missing_or_a_file(whole: FakeSystem) -> None:
    folders = ["sys/bus", "proc/driver", "sys/devices/system/node", "sys/fs", "proc", "sys/devices/system/cpu", "sys"]
    for folder in folders:
        shutil.rmtree(whole.root / folder)
        check_usable(whole.root)
        (whole.root / folder).touch()
        check_usable(whole.root)
        (whole.root / folder).unlink()
    check_usable(whole.root / "missing")


@pytest.mark.parametrize(("n_physical", "workers"), [(2, (4, 5)), (64, (4, 5, 6, 7)), (None, (4, 5, 6, 7))])
def test_silent_sysfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_physical: int | None, workers: tuple[int, ...]
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: n_physical)
    found = topology.read(tmp_path, affinity=range(4, 8))

    assert (found.source, found.online, found.workers()) == ("psutil", (4, 5, 6, 7), workers)
    assert found.nodes == ()
    assert "not known" in found.why()


@pytest.mark.parametrize("error", [FileNotFoundError, RuntimeError, NotImplementedError])
def test_system_without_masks_or_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fail(logical: bool) -> int:
        raise error

    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.setattr(psutil, "cpu_count", fail)

    assert topology.read(tmp_path).workers() == (0,)


def test_this_machine_where_the_system_has_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, whose Python has no sched_getaffinity."""
    monkeypatch.delattr(os, "sched_getaffinity")

    assert set(topology.read().workers()) <= set(topology.read().online)


# --- online, offline, masks ------------------------------------------------------------------------------------------


def test_offline_cpus_get_no_worker(system: FakeSystem) -> None:
    system.add_cpus(paired_cores(4), online="1-5")
    for affinity in (range(8), (1, 2, 3, 4, 5)):
        found = topology.read(system.root, affinity=affinity)
        assert found.allowed == found.online == (1, 2, 3, 4, 5)
        assert found.offline == (0, 6, 7)
        assert found.workers() == (1, 2, 4)


@pytest.mark.parametrize("mask", ["0", ""])
def test_mask_without_an_online_cpu(system: FakeSystem, mask: str) -> None:
    system.add_cpus(paired_cores(2), online="1-3")
    with pytest.raises(ConfigError, match="1-3"):
        topology.read(system.root, affinity=parse_cpu_list(mask))


def test_status_may_name_cpus_that_are_not_there(system: FakeSystem) -> None:
    """The kernel's list keeps CPUs that are off, and all that could ever be plugged in."""
    system.add_cpus(single_cores(4))
    system.add_offline_cpu(4)
    system.add_status("1-255")

    assert topology.read(system.root).allowed == (1, 2, 3)


def test_mask_is_trusted_over_a_renumbered_list(system: FakeSystem) -> None:
    """Container file systems (lxcfs) number what a container may use from 0; pinning goes by the true numbers."""
    system.add_cpus(paired_cores(8), online="0-3")
    system.add_status("2-3,12-13")

    assert topology.read(system.root).workers() == (2, 12)


def test_every_cpu_where_nothing_limits(system: FakeSystem) -> None:
    system.add_cpus(single_cores(3))

    assert topology.read(system.root).allowed == (0, 1, 2)


@pytest.mark.parametrize(
    "names",
    [
        ("cpuset.cpus.effective", "cpuset.mems.effective"),
        ("cpuset.effective_cpus", "cpuset.effective_mems"),
        ("cpuset.cpus", "cpuset.mems"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_cpusets_of_control_groups(system: FakeSystem, version: int, names: tuple[str, str]) -> None:
    system.add_cpus(single_cores(8))
    system.add_node(0, "0-3", gib=1)
    system.add_node(1, "4-7", gib=1)
    if version == 2:
        system.add_cgroup_v2("/slice/job")
    else:
        system.add_cgroup_v1("cpuset", "/slice/job")
    folder = "/sys/fs/cgroup" + ("" if version == 2 else "/cpuset") + "/slice"
    system.write(f"{folder}/job/{names[0]}", "\n")  # says nothing of its own: the parent's holds
    system.write(f"{folder}/{names[0]}", "5-6,99\n")
    system.write(f"{folder}/{names[1]}", "1\n")

    found = topology.read(system.root)
    assert found.allowed == (5, 6)
    assert found.mems == found.bank_nodes == (1,)


@pytest.mark.parametrize("prefix", ["", "cpuset."])
def test_the_cpuset_file_system_before_control_groups(system: FakeSystem, prefix: str) -> None:
    system.add_cpus(single_cores(8))
    system.add_node(0, "0-3", gib=1)
    system.add_node(3, "4-7", gib=1)
    system.write("/proc/mounts", "none /dev/cpuset cpuset rw,relatime 0 0\n")
    system.write("/proc/self/cpuset", "/job\n")
    system.write(f"/dev/cpuset/job/{prefix}cpus", "1,5-6\n")
    system.write(f"/dev/cpuset/job/{prefix}mems", "3\n")

    found = topology.read(system.root)
    assert found.allowed == (1, 5, 6)
    assert found.mems == (3,)


def test_status_wins_over_the_cpuset(system: FakeSystem) -> None:
    """A mask may be narrower than the cpuset, never wider."""
    system.add_cpus(single_cores(8))
    system.write("/sys/fs/cgroup/cpuset.cpus.effective", "0-6\n")
    system.add_status("2-3")

    assert topology.read(system.root).allowed == (2, 3)


def test_memory_of_unknown_nodes_is_all_memory(system: FakeSystem) -> None:
    system.add_cpus(single_cores(2))
    system.add_node(0, "0-1", gib=1)
    system.add_status("0-1", "5-6")

    assert topology.read(system.root).mems == (0,)


@pytest.mark.parametrize("rank", [Rank(2, 2), Rank(-1, 2), Rank(0, 0)])
def test_impossible_rank(system: FakeSystem, rank: Rank) -> None:
    with pytest.raises(ConfigError, match="count"):
        topology.read(system.root, rank=rank)


def test_ranks_do_not_cut_another_machine(whole: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "_is_pinned_by_launcher", lambda variable: False)

    assert topology.read(whole.root).rank == Rank()
    assert topology.read().rank == Rank(0, 2)


# --- here ------------------------------------------------------------------------------------------------------------


def test_reading_leaves_the_process_mask_alone(whole: FakeSystem) -> None:
    before = os.sched_getaffinity(0)
    topology.read(whole.root).workers()
    topology.read().workers()

    assert os.sched_getaffinity(0) == before


def test_this_machine() -> None:
    found = topology.read()
    quota = math.inf if found.quota is None else max(1, int(found.quota))

    assert set(found.allowed) == os.sched_getaffinity(0)
    assert set(found.workers()) <= set(found.allowed)
    assert len(found.workers(cores="all")) == min(len(found.physical_core_cpus()), quota)
    assert topology.read(pid=os.getpid()).quota == found.quota


def test_needs_no_torch() -> None:
    script = "import sys; from freetoken import topology; topology.read(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


# --- describe --------------------------------------------------------------------------------------------------------


def test_describe_of_a_machine_and_of_some_cpus(whole: FakeSystem) -> None:
    every, some = topology.describe(whole.root), topology.describe(whole.root, allowed=[6, 7])

    assert every["physical_cores"] == [0, 1, 2, 3]
    assert every["nodes_with_cpus"] == [0, 1]
    assert some["physical_cores"] == some["allowed_cpus"] == [6, 7]
    assert some["nodes_with_cpus"] == [1]
    assert some["online_cpus"] == every["online_cpus"]
    assert some["smt_siblings"] == every["smt_siblings"]


def test_dumps_of_machines_nobody_here_owns(shared_dir: Path) -> None:
    folder = shared_dir / "topology"
    dumps = list(folder.glob("*/expected.json"))
    if not dumps:
        pytest.skip(f"no dumps in {folder}")
    done = subprocess.run(
        [sys.executable, folder / "check_topology.py", "freetoken.topology:describe"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(topology.__file__).parents[2],
    )

    assert done.stdout.splitlines()[-1:] == [f"{len(dumps)} passed, 0 failed"], done.stdout + done.stderr


def test_cpus_beyond_those_of_any_fixed_mask(system: FakeSystem) -> None:
    """2048 CPUs in 16 nodes: masks of 64 words, twice what fits into 1024 bits."""
    system.add_cpus(paired_cores(1024, stride=1024))
    for node in range(16):
        first = node * 64
        system.add_node(node, f"{first}-{first + 63},{first + 1024}-{first + 1087}", gib=1)
    system.add_status("0-2047")

    found = topology.read(system.root)
    assert format_cpu_list(found.allowed) == "0-2047"
    assert found.workers() == tuple(range(1024))
    assert [len(found.physical_core_cpus(node)) for node in range(16)] == [64] * 16
