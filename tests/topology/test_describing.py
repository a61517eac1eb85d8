import json
from pathlib import Path

import pytest

from freetoken import topology
from freetoken.topology import Rank, parse_cpu_list
from tests.support.sysfs import FakeSystem, paired_cores, single_cores


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    return FakeSystem(tmp_path)


def draw(system: FakeSystem, mask: str, rank: Rank | None = None) -> list[str]:
    return str(topology.read(system.root, affinity=parse_cpu_list(mask), rank=rank)).splitlines()


def test_two_nodes_a_gpu_and_memory_alone(system: FakeSystem) -> None:
    system.add_cpus(paired_cores(4, stride=4))
    system.add_packages((0, 1, 4, 5), (2, 3, 6, 7))
    system.add_offline_cpu(8)
    system.add_node(0, "0-1,4-5", gib=64, distances="10 20 13")
    system.add_node(1, "2-3,6-7", gib=64, distances="20 10 23")
    system.add_node(2, "", gib=16, distances="13 23 10")
    system.add_pci("0000:17:00.0", node=1, kind="0x030200", vendor="0x10de")
    system.add_pci("0000:18:00.0", node=-1, kind="0x030200", vendor="0x1002")

    assert draw(system, "0-6") == [
        "CPUs       CPUs 0-7 on 4 cores in 2 packages",
        "offline    CPU 8",
        "node 0     64.00 GiB, CPUs 0-1,4-5 on 2 cores, 2 workers, banks, distances 0:10 1:20 2:13",
        "node 1     64.00 GiB, CPUs 2-3,6-7 on 2 cores, 2 workers, banks, distances 0:20 1:10 2:23",
        "node 2     16.00 GiB, no CPUs, no banks, distances 0:13 1:23 2:10",
        "GPU        0000:17:00.0 NVIDIA, node 1",
        "GPU        0000:18:00.0 AMD, node not known",
        "not used   CPU 7: not allowed",
        "not used   CPUs 4-6: second threads of cores",
        "workers    4 on CPUs 0-3 (4 of 4 physical cores; the CPU mask allows 4 (CPUs 0-6); no quota)",
    ]


def test_a_hybrid_processor(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    system.add_cpus([(0, 1), (2, 3), (4,), (5,)])
    system.write("/sys/devices/cpu_core/cpus", "0-3\n")
    system.write("/sys/devices/cpu_atom/cpus", "4-5\n")

    lines = draw(system, "0-5")
    assert "kinds      performance CPUs 0-3, efficiency CPUs 4-5" in lines
    assert "nodes      not known: taken as one" in lines
    assert "not used   CPUs 4-5: efficiency cores" in lines
    assert "not used   CPUs 1,3: second threads of cores" in lines
    monkeypatch.setenv("FREETOKEN_CPU_CORES", "all")
    assert not any("efficiency cores" in line for line in draw(system, "0-5"))


def test_a_quota_and_ranks(system: FakeSystem) -> None:
    system.add_cpus(single_cores(8))
    system.add_node(0, "0-7")
    system.write("/sys/fs/cgroup/cpu.max", "400000 100000")

    assert draw(system, "0-7", Rank(1, 2)) == [
        "CPUs       CPUs 0-7 on 8 cores",
        "node 0     memory not known, CPUs 0-7 on 8 cores, 2 workers, banks",
        "rank       1 of 2: CPUs 4-7",
        "not used   CPUs 0-3: other ranks",
        "not used   CPUs 6-7: over the quota",
        "workers    2 on CPUs 4-5 (2 of 8 physical cores; rank 1 of 2 on this machine; quota of 4 CPUs for 2 ranks)",
    ]


def test_memory_that_is_not_allowed_or_not_there(system: FakeSystem) -> None:
    system.add_cpus(single_cores(4))
    system.add_node(0, "0", gib=1)
    system.add_node(1, "1", gib=0)
    system.add_node(2, "2", gib=1)
    system.add_status("0-3", "1-2")

    lines = draw(system, "0-3")
    assert lines[1] == "node 0     1.00 GiB, CPU 0 on 1 core, 1 worker, its memory is not allowed"
    assert lines[2] == "node 1     no memory, CPU 1 on 1 core, 1 worker"
    assert lines[3] == "node 2     1.00 GiB, CPU 2 on 1 core, 1 worker, banks"
    assert lines[4] == "no node    CPU 3"


def test_every_cpu_has_a_worker_or_a_reason(system: FakeSystem) -> None:
    system.add_cpus(paired_cores(8))
    system.write("/sys/devices/cpu_core/cpus", "0-9\n")
    system.write("/sys/devices/cpu_atom/cpus", "10-15\n")
    system.write("/sys/fs/cgroup/cpu.max", "400000 100000")
    found = topology.read(system.root, affinity=parse_cpu_list("0-7,12-15"), rank=Rank(0, 2))

    facts = found.to_dict()
    reasons = [cpu for cpus in facts["not_used"].values() for cpu in cpus]
    assert sorted([*facts["workers"], *reasons]) == facts["online_cpus"]


def test_dict_is_json(system: FakeSystem) -> None:
    system.add_cpus(single_cores(2))
    system.add_node(0, "0-1", gib=1, distances="10")
    system.add_pci("0000:17:00.0", node=0, kind="0x030200", vendor="0x10de")

    facts = json.loads(json.dumps(topology.read(system.root).to_dict()))
    assert facts["numa_nodes"] == {"0": {"cpus": [0, 1], "mem_total_kb": 1 << 20, "distances": {"0": 10}}}
    assert facts["gpus"] == {"0000:17:00.0": {"name": "NVIDIA", "node": 0}}
    assert facts["workers"] == facts["allowed_cpus"] == [0, 1]
    assert (facts["rank"], facts["ranks"], facts["load_threads"], facts["source"]) == (0, 1, 2, "sysfs")
