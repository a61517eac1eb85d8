"""Which CPUs get a worker. Cases 2 to 5 are from what people report about programs of this kind."""

import dataclasses
import pickle
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken import topology
from freetoken.errors import ConfigError
from freetoken.topology import Node, PciDevice, Rank, Topology, parse_cpu_list
from tests.support.sysfs import FakeSystem, paired_cores, single_cores


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    return FakeSystem(tmp_path)


def read(system: FakeSystem, mask: str, rank: Rank | None = None) -> Topology:
    return topology.read(system.root, affinity=parse_cpu_list(mask), rank=rank)


def make_machine(
    n_cores: int = 8, n_nodes: int = 2, *, n_strong: int = 0, mask: Iterable[int] | None = None, **facts: Any
) -> Topology:
    """Cores of one thread each in equal nodes of 1 GiB; the first `n_strong` are performance cores."""
    cpus, share = tuple(range(n_cores)), n_cores // n_nodes
    allowed = cpus if mask is None else tuple(mask)
    fields = {
        "online": cpus,
        "offline": (),
        "cores": tuple((cpu,) for cpu in cpus),
        "packages": (cpus,),
        "nodes": tuple(Node(n, cpus[n * share : (n + 1) * share], 1 << 30) for n in range(n_nodes)),
        "mems": tuple(range(n_nodes)),
        "performance": cpus[:n_strong],
        "efficiency": cpus[n_strong:] if n_strong else (),
        "pci": (),
        "mask": allowed,
        "allowed": allowed,
        "quota": None,
        "rank": Rank(),
        "source": "sysfs",
    }
    return Topology(**{**fields, **facts})


# --- case 2: cores of a mask -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "mask", "workers"),
    [
        pytest.param(paired_cores(8), "0-7", (0, 2, 4, 6), id="2a adjacent siblings"),
        pytest.param(paired_cores(8), "1,3,5,7", (1, 3, 5, 7), id="2b only second threads allowed"),
        pytest.param(paired_cores(8, stride=8), "0-7", tuple(range(8)), id="2c siblings far apart"),
        pytest.param(single_cores(16), "0-7", tuple(range(8)), id="2d no SMT"),
        pytest.param([(6, 7), (10,), (14, 15)], "6-7,10,15", (6, 10, 15), id="sparse"),
        pytest.param([(0, 4), (1, 5), (2, 6), (3, 7)], "5", (5,), id="one CPU"),
        pytest.param([(c, c + 1024) for c in range(1024)], "0-2047", tuple(range(1024)), id="2048 CPUs"),
    ],
)
def test_one_worker_for_each_allowed_core(
    system: FakeSystem, cores: list[tuple[int, ...]], mask: str, workers: tuple[int, ...]
) -> None:
    system.add_cpus(cores)
    found = read(system, mask)

    assert found.workers() == found.physical_core_cpus() == workers
    assert set(found.workers(len(found.allowed))) == set(found.allowed) == parse_cpu_list(mask)
    assert set(found.cores) == set(cores)


# --- case 3: quotas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "n_workers"),
    [
        pytest.param({"/job": "765000 100000"}, 7, id="3a fraction"),
        pytest.param({"/job/leaf": "max 100000", "/job": "400000 100000"}, 4, id="3b parent is tighter"),
        pytest.param({"/job": "50000 100000"}, 1, id="3c less than one"),
        pytest.param({"/job/leaf": "max 100000", "/job": "max 100000"}, 48, id="3d none"),
        pytest.param({"/job": "6400000 100000"}, 48, id="3g more than the cores"),
    ],
)
def test_quota_v2(system: FakeSystem, groups: dict[str, str], n_workers: int) -> None:
    system.add_cpus(paired_cores(48, stride=48))
    system.add_cgroup_v2(max(groups, key=len))
    for group, text in groups.items():
        system.write(f"/sys/fs/cgroup{group}/cpu.max", text + "\n")

    assert len(read(system, "0-95").workers()) == n_workers


@pytest.mark.parametrize(
    ("quota_us", "n_workers"), [pytest.param(-1, 48, id="3e none"), pytest.param(765_000, 7, id="3f fraction")]
)
def test_quota_v1(system: FakeSystem, quota_us: int, n_workers: int) -> None:
    system.add_cpus(paired_cores(48, stride=48))
    system.add_cgroup_v1("cpu,cpuacct", "/job")
    system.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", f"{quota_us}\n")
    system.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")

    assert len(read(system, "0-95").workers()) == n_workers


@pytest.mark.parametrize(
    ("quota", "workers"), [(1.0, (0,)), (2.9, (0, 4)), (3.0, (0, 1, 4)), (4.0, (0, 1, 4, 5)), (99.0, tuple(range(8)))]
)
def test_a_quota_is_spread_evenly_over_nodes(quota: float, workers: tuple[int, ...]) -> None:
    assert make_machine(quota=quota).workers() == workers


def test_ranks_share_the_quota_of_their_group() -> None:
    machine = make_machine(16, quota=7.0)
    ranks = [machine.slice_for(Rank(number, 2)) for number in range(2)]

    assert [rank.workers() for rank in ranks] == [(0, 1, 2), (8, 9, 10)]
    assert "quota of 7 CPUs for 2 ranks" in ranks[0].why()
    assert len(make_machine(quota=1.0).slice_for(Rank(1, 2)).workers()) == 1


# --- case 4: nodes of memory alone -----------------------------------------------------------------------------------


@pytest.fixture
def flat(system: FakeSystem) -> FakeSystem:
    """Two nodes of CPUs and two of memory: HBM in flat mode, or CXL."""
    system.add_cpus(single_cores(16))
    system.add_node(0, "0-7", gib=64, distances="10 20 13 23")
    system.add_node(1, "8-15", gib=64, distances="20 10 23 13")
    system.add_node(2, "", gib=16, distances="13 23 10 23")
    system.add_node(3, "", gib=16, distances="23 13 23 10")
    system.write("/sys/devices/system/node/online", "0-3\n")
    return system


def test_nodes_without_cpus_are_memory_only(flat: FakeSystem) -> None:
    found = read(flat, "0-15")

    assert found.compute_nodes == found.bank_nodes == (0, 1)
    assert found.memory_only_nodes == (2, 3)
    assert len(found.workers()) == 16
    assert [len(found.physical_core_cpus(node)) for node in (0, 1)] == [8, 8]


def test_two_ranks_get_a_node_each(flat: FakeSystem) -> None:
    for number in (0, 1):
        mine = read(flat, "0-15", Rank(number, 2))
        assert mine.compute_nodes == mine.bank_nodes == (number,)
        assert mine.workers() == tuple(range(8 * number, 8 * number + 8))


@pytest.mark.parametrize(
    ("node", "mask", "words"),
    [
        (2, "0-15", "node 2 has memory but no CPUs"),
        (7, "0-15", "node 7 does not exist"),
        (1, "0-3", r"node 1 has only CPUs this process may not use \(8-15\)"),
    ],
)
def test_a_node_where_no_worker_can_run(flat: FakeSystem, node: int, mask: str, words: str) -> None:
    found = read(flat, mask)
    with pytest.raises(ConfigError, match=words) as caught:
        found.physical_core_cpus(node)
    assert caught.value.facts["value"] == node
    assert "one of nodes 0" in caught.value.facts["expected"]


def test_no_node_can_be_asked_for_where_the_system_names_none(system: FakeSystem) -> None:
    system.add_cpus(single_cores(2))
    found = read(system, "0-1")

    assert found.nodes == found.compute_nodes == found.bank_nodes == ()
    with pytest.raises(ConfigError, match="names none"):
        found.physical_core_cpus(0)


# --- case 5: a mask within one node, and ranks -----------------------------------------------------------------------


@pytest.fixture
def two_sockets(system: FakeSystem) -> FakeSystem:
    system.add_cpus(paired_cores(120, stride=120))
    system.add_node(0, "0-59,120-179", gib=256)
    system.add_node(1, "60-119,180-239", gib=256)
    return system


@pytest.mark.parametrize("mask", ["60-89,180-209", "60-89"])
def test_mask_within_node_1(two_sockets: FakeSystem, mask: str) -> None:
    found = read(two_sockets, mask)

    assert found.workers() == tuple(range(60, 90))
    assert found.compute_nodes == found.bank_nodes == (1,)


def test_two_local_ranks_share_a_mask_within_node_1(two_sockets: FakeSystem) -> None:
    """Of a world of 4 on two hosts: only ranks of this machine count."""
    taken = []
    for local in "01":
        variables = {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": "2", "RANK": str(int(local) + 2), "WORLD_SIZE": "4"}
        mine = read(two_sockets, "60-89,180-209", topology.find_rank(variables))
        assert len(mine.workers()) == 15
        assert mine.compute_nodes == mine.bank_nodes == (1,)
        assert set(mine.allowed) == {cpu + add for cpu in mine.workers() for add in (0, 120)}
        taken += mine.allowed
    assert sorted(taken) == sorted(parse_cpu_list("60-89,180-209"))


@pytest.mark.parametrize(
    ("machine", "count", "slices"),
    [
        pytest.param(make_machine(8), 1, [range(8)], id="one rank"),
        pytest.param(make_machine(8), 2, [range(4), range(4, 8)], id="a node each"),
        pytest.param(make_machine(8), 3, [range(2), range(2, 5), range(5, 8)], id="no way by nodes"),
        pytest.param(make_machine(8), 4, [(0, 1), (2, 3), (4, 5), (6, 7)], id="half a node each"),
        pytest.param(make_machine(8, 4), 2, [range(4), range(4, 8)], id="two nodes each"),
        pytest.param(make_machine(2), 3, [(0,), (0,), (1,)], id="more ranks than cores"),
        pytest.param(make_machine(1, 1), 2, [(0,), (0,)], id="one core for two"),
        pytest.param(make_machine(8, mask=range(3, 8)), 2, [(3, 4), (5, 6, 7)], id="uneven mask: not one core by node"),
        pytest.param(make_machine(8, mask=range(2, 8)), 2, [(2, 3), (4, 5, 6, 7)], id="half is still by node"),
        pytest.param(make_machine(8, mask=(0, 5, 6, 7)), 4, [(0,), (5,), (6,), (7,)], id="as many ranks as cores"),
        pytest.param(make_machine(8, 1, n_strong=4), 2, [(0, 1, 4, 5), (2, 3, 6, 7)], id="each gets performance cores"),
        pytest.param(make_machine(4, 1, n_strong=1), 2, [(0, 1), (2, 3)], id="too few performance cores"),
        pytest.param(make_machine(8, nodes=(), mems=()), 2, [range(4), range(4, 8)], id="no nodes"),
    ],
)
def test_slices(machine: Topology, count: int, slices: list[Iterable[int]]) -> None:
    found = [machine.slice_for(Rank(number, count)) for number in range(count)]

    assert [part.allowed for part in found] == [tuple(cpus) for cpus in slices]
    assert {part.mask for part in found} == {machine.mask}


def test_a_pinned_rank_keeps_its_mask_and_shares_the_quota() -> None:
    mine = make_machine(8, mask=range(4, 8), quota=6.0).slice_for(Rank(1, 2, pinned=True))

    assert mine.allowed == mine.mask == (4, 5, 6, 7)
    assert mine.workers() == (4, 5, 6)
    assert mine.load_threads == 3
    assert dataclasses.replace(mine, quota=None).load_threads == 4


def test_a_slice_can_be_cut_anew() -> None:
    first = make_machine().slice_for(Rank(0, 2))

    assert first.slice_for(Rank(1, 2)).allowed == (4, 5, 6, 7)
    assert first.slice_for(Rank()).allowed == first.mask


# --- numbers of threads ----------------------------------------------------------------------------------------------


def test_number_of_threads_is_taken_as_asked(system: FakeSystem) -> None:
    system.add_cpus(paired_cores(4))
    found = read(system, "0-5")

    assert found.workers(1) == (0,)
    assert found.workers(3) == (0, 2, 4)
    assert found.workers(5) == (0, 2, 4, 1, 3)
    assert dataclasses.replace(found, quota=1.0).workers(5) == (0, 2, 4, 1, 3)


def test_fewer_threads_than_cores_are_spread_over_nodes() -> None:
    assert make_machine(8).workers(4) == (0, 1, 4, 5)


@pytest.mark.parametrize("threads", [0, -1, 7, True, 2.0, "2", "all", None])
def test_impossible_number_of_threads(system: FakeSystem, threads: Any) -> None:
    system.add_cpus(paired_cores(4))
    found = read(system, "0-5")

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
def test_why(system: FakeSystem, mask: str, quota: str | None, threads: Any, why: str) -> None:
    system.add_cpus(paired_cores(2))
    if quota is not None:
        system.write("/sys/fs/cgroup/cpu.max", quota)

    assert read(system, mask).why(threads) == why


@pytest.mark.parametrize(
    ("ranks", "mask", "why"),
    [
        (2, range(8), "4 of 8 physical cores; rank 0 of 2 on this machine; no quota"),
        (2, range(6), "4 of 8 physical cores; rank 0 of 2 on this machine; the CPU mask allows 6 (CPUs 0-5); no quota"),
    ],
)
def test_why_of_a_rank(ranks: int, mask: Iterable[int], why: str) -> None:
    assert make_machine(8, mask=mask).slice_for(Rank(0, ranks)).why() == why


# --- hybrid processors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "cores", "workers"),
    [
        (None, None, (0, 1)),
        ("performance", None, (0, 1)),
        ("All", None, (0, 1, 2, 3)),
        ("all", "performance", (0, 1)),
        ("performance", "all", (0, 1, 2, 3)),
    ],
)
def test_hybrid_cores(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, cores: Any, workers: tuple[int, ...]
) -> None:
    monkeypatch.delenv("FREETOKEN_CPU_CORES", raising=False)
    if setting is not None:
        monkeypatch.setenv("FREETOKEN_CPU_CORES", setting)
    machine = make_machine(4, 1, n_strong=2)

    assert machine.workers(cores=cores) == workers
    assert machine.workers(3) == ((0, 1, 2) if workers == (0, 1) else workers[:3])


def test_a_mask_of_efficiency_cores_alone_uses_them() -> None:
    assert make_machine(4, 1, n_strong=2, mask=(2, 3)).workers() == (2, 3)


def test_bad_words_for_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    bad: Any = "fast"
    with pytest.raises(ConfigError, match="cores='fast' is not one of auto, performance, all"):
        make_machine().workers(cores=bad)
    monkeypatch.setenv("FREETOKEN_CPU_CORES", "fast")
    with pytest.raises(ConfigError, match="FREETOKEN_CPU_CORES='fast' is not one of auto, performance, all"):
        make_machine().workers()


# --- the coordinator of a GPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "near", "kept"),
    [
        (make_machine(), None, 7),
        (make_machine(), 0, 3),
        (make_machine(), 1, 7),
        (make_machine(), 9, 7),
        (make_machine(mask=range(4)), 1, 3),
        (make_machine(8, 1, n_strong=4), 0, 3),
        (make_machine(2, 1), 0, 1),
    ],
)
def test_a_core_is_kept_free_for_the_coordinator(machine: Topology, near: int | None, kept: int) -> None:
    workers = machine.workers(coordinator=True, near=near)

    assert machine.coordinator_cpu(near) == kept
    assert workers == tuple(cpu for cpu in machine.workers() if cpu != kept)
    assert kept not in machine.workers(len(workers), coordinator=True, near=near)
    assert kept in machine.workers(len(machine.allowed), coordinator=True, near=near)


def test_the_coordinator_sits_nearest_to_a_gpu_whose_node_has_no_cpus(flat: FakeSystem) -> None:
    found = read(flat, "0-15")

    assert found.coordinator_cpu(near=2) == 7
    assert found.coordinator_cpu(near=3) == 15
    assert len(found.workers(coordinator=True, near=2)) == 15


def test_the_coordinator_needs_some_of_the_quota() -> None:
    assert make_machine(quota=4.5).workers(coordinator=True, near=0) == (0, 1, 4)
    assert make_machine(quota=1.0).workers(coordinator=True) == (0,)


def test_a_single_core_is_shared_with_the_coordinator() -> None:
    assert make_machine(1, 1).workers(coordinator=True) == (0,)


# --- GPUs ------------------------------------------------------------------------------------------------------------

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3D, pci_device_id=0)


@pytest.mark.parametrize("device", ["0000:3d:00.0", "0000:3D:00.0", "00000000:3D:00.0", GPU])
def test_node_of_a_gpu(device: Any) -> None:
    pci = (PciDevice("0000:3d:00.0", 1, "NVIDIA"), PciDevice("0000:3e:00.0", 0))
    found = make_machine(pci=pci)

    assert found.gpu_numa_node(device) == 1
    assert found.gpus == pci[:1]


def test_node_of_a_gpu_that_nobody_knows() -> None:
    """-1 in /sys, a node that is not there, or no such device: on one node it is that one, on several unknown."""
    pci = (PciDevice("0000:3d:00.0", -1, "NVIDIA"), PciDevice("0000:3e:00.0", 9, "NVIDIA"))
    for address in ("0000:3d:00.0", "0000:3e:00.0", "0000:3f:00.0"):
        assert make_machine(8, 1, pci=pci).gpu_numa_node(address) == 0
        assert make_machine(8, 2, pci=pci).gpu_numa_node(address) is None
        assert make_machine(8, 2, pci=pci, nodes=()).gpu_numa_node(address) is None


@pytest.mark.parametrize("device", ["cuda:0", "", 0, None, SimpleNamespace(pci_bus_id=1)])
def test_what_is_no_gpu(device: Any) -> None:
    with pytest.raises(ConfigError, match="PCI address"):
        make_machine().gpu_numa_node(device)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_banks_avoid_memory_that_is_not_allowed_or_not_there() -> None:
    empty = (Node(0, (0, 1, 2, 3), 0), Node(1, (4, 5, 6, 7), 1 << 30))
    assert make_machine(nodes=empty).bank_nodes == (1,)
    assert make_machine(mems=(1,)).bank_nodes == (1,)
    assert make_machine(mems=(1,), mask=(0, 1)).bank_nodes == (1,)  # no memory beside its CPUs: what there is


# --- threads of a load -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "ranks", "threads"),
    [
        (make_machine(6), 2, 3),
        (make_machine(32), 2, 16),
        (make_machine(32), 1, 32),
        (make_machine(4), 8, 1),
        (make_machine(32, mask=range(8)), 2, 4),
        (make_machine(32, quota=6.5), 2, 3),
        (make_machine(32, quota=0.5), 1, 1),
    ],
)
def test_threads_of_a_load(machine: Topology, ranks: int, threads: int) -> None:
    for number in range(ranks):
        assert machine.slice_for(Rank(number, ranks)).load_threads == threads


def test_threads_of_a_load_count_cores_not_cpus(system: FakeSystem) -> None:
    system.add_cpus(paired_cores(6))

    assert read(system, "0-11", Rank(0, 2)).load_threads == 3


# --- the object ------------------------------------------------------------------------------------------------------


def test_it_is_frozen_hashable_and_travels(flat: FakeSystem) -> None:
    found = read(flat, "0-15")
    again = pickle.loads(pickle.dumps(found))

    assert again == found == read(flat, "0-15")
    assert hash(again) == hash(found)
    name: Any = "allowed"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(found, name, ())


def test_repr_is_short(system: FakeSystem) -> None:
    system.add_cpus(paired_cores(1024))

    assert repr(read(system, "0-2047")) == (
        "Topology(online=0-2047, n_cores=1024, nodes=0, allowed=0-2047, quota=None, rank=0/1, source=sysfs)"
    )


# --- any machine -----------------------------------------------------------------------------------------------------


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Cores of one to four threads with CPU numbers in any order, nodes of any size, any mask, kinds and quota."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    numbers = draw(st.permutations(range(sum(sizes))))
    cores, place = [], 0
    for size in sizes:
        cores.append(tuple(sorted(numbers[place : place + size])))
        place += size
    homes = draw(st.lists(st.sampled_from([0, 3, 7, None]), min_size=len(cores), max_size=len(cores)))
    strong = draw(st.lists(st.booleans(), min_size=len(cores), max_size=len(cores)))
    kinds = (
        tuple(sorted(cpu for core, kind in zip(cores, strong, strict=True) if kind is wanted for cpu in core))
        for wanted in (True, False)
    )
    performance, efficiency = kinds if len(set(strong)) == 2 else ((), ())
    mask = tuple(sorted(draw(st.sets(st.sampled_from(sorted(numbers)), min_size=1))))
    nodes = tuple(
        Node(n, tuple(sorted(cpu for core, home in zip(cores, homes, strict=True) if home == n for cpu in core)), 1)
        for n in (0, 3, 7)
        if n in homes
    )
    return make_machine(
        1,
        1,
        online=tuple(sorted(numbers)),
        cores=tuple(sorted(cores)),
        nodes=nodes,
        mems=tuple(node.id for node in nodes),
        performance=performance,
        efficiency=efficiency,
        mask=mask,
        allowed=mask,
        quota=draw(st.none() | st.floats(0.01, 60)),
    )


def check_workers(machine: Topology, workers: tuple[int, ...]) -> None:
    """At least one, inside the mask, none twice, at most one on a core."""
    assert workers
    assert set(workers) <= set(machine.allowed)
    assert len(set(workers)) == len(workers)
    assert all(len(set(core) & set(workers)) <= 1 for core in machine.cores)


@given(machines(), st.integers(1, 5), st.booleans(), st.sampled_from([None, 0, 3, 7]))
def test_workers_of_any_machine(machine: Topology, ranks: int, coordinator: bool, near: int | None) -> None:
    for number in range(ranks):
        mine = machine.slice_for(Rank(number, ranks))
        workers = mine.workers(coordinator=coordinator, near=near, cores="all")
        check_workers(mine, workers)
        check_workers(mine, mine.workers(cores="performance"))
        n_cores = len(mine.physical_core_cpus())
        if mine.quota is None:
            assert len(workers) == max(1, n_cores - coordinator)
        else:
            assert len(workers) <= max(1, int(mine.quota / ranks) - coordinator)
        if coordinator and len(mine.physical_core_cpus()) > 1:
            assert mine.coordinator_cpu(near, "all") not in workers
        if mine.performance and set(mine.physical_core_cpus()) & set(mine.performance):
            assert set(mine.workers(cores="performance")) <= set(mine.performance)
        for threads in range(1, len(mine.allowed) + 1):
            chosen = mine.workers(threads, coordinator=coordinator, near=near)
            assert len(set(chosen)) == threads
            assert set(chosen) <= set(mine.allowed)
            if threads <= len(mine.workers(cores="all")):
                check_workers(mine, mine.workers(threads, cores="all"))
        assert str(mine)
        assert mine.why()


@given(machines(), st.integers(1, 16))
def test_slices_of_any_machine(machine: Topology, ranks: int) -> None:
    slices = [machine.slice_for(Rank(number, ranks)) for number in range(ranks)]
    taken = [cpu for part in slices for cpu in part.allowed]
    sizes = [len(part.physical_core_cpus()) for part in slices]

    assert set(taken) == set(machine.mask)
    assert min(sizes) >= 1
    assert min(sizes) * 2 >= max(sizes) - 1
    if ranks <= len(machine.physical_core_cpus()):
        assert len(taken) == len(set(taken))
    else:
        assert max(sizes) == 1
    assert sum(part.load_threads for part in slices) <= max(ranks, len(machine.physical_core_cpus()))
