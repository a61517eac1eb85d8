"""Where pages and threads really are on a machine of several nodes. Nothing here imports torch.

Run in guests by .ci/numa; on a machine of one node these tests are skipped.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from freetoken import formats, topology
from freetoken.banks import LayerBank, ShardedBank, make_bank
from freetoken.formats.record import RecordLayout
from freetoken.kernels._experts import ExpertLayer, Scratch
from freetoken.kernels._shards import ShardedLayer
from freetoken.memory import _mempolicy
from freetoken.memory.mapping import map_bytes, reserved_pages
from freetoken.memory.placement import Achieved, Placement, Placer, choose, locate, measure
from freetoken.topology import Topology
from tests.support.experts import make_expert, make_routes, table
from tests.support.seccomp import refuse_policies

pytestmark = pytest.mark.numa

LAYOUT = RecordLayout(formats.get("mxfp4"), 256, 1152)
"""36 granules: they divide by 2 and 4."""
EXPERTS = 40
HUGE = 2 << 20

WORKERS = {
    "2n": (0, 1, 2, 3), "2n-smt": (0, 2), "4n": (0, 1, 2, 3), "2n-cpuless": (0, 1, 2, 3), "2n-memless": (0, 1, 2, 3),
}  # fmt: skip
BANK_NODES = {"2n": (0, 1), "2n-smt": (0, 1), "4n": (0, 1, 2, 3), "2n-cpuless": (0, 1), "2n-memless": (0,)}
"""What the layouts of the guests must come to, by their names in NUMA_VM."""


@pytest.fixture(scope="module")
def machine() -> Topology:
    return topology.read()


@pytest.fixture
def several(machine: Topology) -> tuple[int, ...]:
    nodes = machine.bank_nodes
    if len(nodes) < 2:
        pytest.skip("one node has both CPUs and memory")
    return nodes


def on_node(machine: Topology, node: int, action: Callable[[], object]) -> None:
    """Run in a thread that stays on the CPUs of a node."""
    cpus = next(set(n.cpus) & set(machine.allowed) for n in machine.nodes if n.id == node)
    with ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, cpus)) as pool:
        pool.submit(action).result()


def touch(bank: LayerBank) -> None:
    for shard in bank.shards:
        shard.records[...] = 1


def place(machine: Topology, request: str | int) -> tuple[Placement, LayerBank]:
    """A bank whose pages do not exist yet."""
    placement = choose(machine, machine.workers(), request)
    return placement, make_bank(LAYOUT, EXPERTS, Placer(placement))


def test_workers_and_bank_nodes(machine: Topology) -> None:
    layout = os.environ.get("NUMA_VM")
    if layout not in WORKERS:
        pytest.skip("not in a guest whose layout is known")
    assert machine.workers() == WORKERS[layout]
    assert machine.bank_nodes == BANK_NODES[layout]
    chosen = choose(machine, machine.workers(), "auto")
    assert chosen.policy == ("shard" if len(machine.bank_nodes) > 1 else "off")
    assert chosen.several == (layout != "2n-memless")


def test_auto_puts_each_shard_on_its_node(machine: Topology, several: tuple[int, ...]) -> None:
    """Also when one node's thread touches all pages, which without a policy would get them."""
    _, bank = place(machine, "auto")
    assert isinstance(bank, ShardedBank)
    assert [shard.node for shard in bank.shards] == list(several)
    on_node(machine, several[-1], lambda: touch(bank))
    for shard in bank.shards:
        assert set(locate(shard.records)) == {shard.node}
    found = measure((shard.records, (shard.node,)) for shard in bank.shards)
    assert found is not None
    print("auto:", found)
    assert found.local_share == 1.0
    assert set(found.pages) == set(several)
    assert sum(found.pages.values()) == pytest.approx(bank.nbytes / mmap.PAGESIZE, abs=len(several))


def test_interleave_splits_evenly(machine: Topology, several: tuple[int, ...]) -> None:
    """To the page, or to the huge page where the kernel gave those; whoever touches them."""
    for huge in (False, True):
        placer = Placer(choose(machine, machine.workers(), "interleave"))
        array = map_bytes(16 * HUGE, placer.place)
        if not huge:
            _without_huge_pages(array)
        on_node(machine, several[0], lambda array=array: array.fill(1))
        found = locate(array, samples=16 * HUGE // mmap.PAGESIZE)
        print("interleave, huge pages:" if huge else "interleave, small pages:", found)
        assert sum(found.values()) == 16 * HUGE // mmap.PAGESIZE
        slack = 2 * HUGE // mmap.PAGESIZE if huge else 1
        for node in several:
            assert found[node] == pytest.approx(sum(found.values()) / len(several), abs=slack)


def _without_huge_pages(array: np.ndarray) -> None:
    """Undo the advice; a mapping keeps its memory policy."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    no_huge_page = 15
    assert libc.madvise(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), no_huge_page) == 0


def test_a_node_that_is_asked_for_gets_the_pages(machine: Topology) -> None:
    for node in [n.id for n in machine.nodes if n.memory_bytes]:
        _, bank = place(machine, node)
        on_node(machine, machine.compute_nodes[0], lambda bank=bank: touch(bank))
        assert set(locate(bank.shards[0].records)) == {node}


def test_off_is_first_touch(machine: Topology, several: tuple[int, ...]) -> None:
    for node in several:
        _, bank = place(machine, "off")
        on_node(machine, node, lambda bank=bank: touch(bank))
        assert set(locate(bank.shards[0].records)) == {node}


def test_no_call_where_auto_finds_one_node(machine: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask within one node, and what remains of a machine whose other nodes have no memory."""
    calls: list[object] = []
    for name in ("mbind", "set_mempolicy"):
        monkeypatch.setattr(_mempolicy, name, lambda *args: calls.append(args))
    first = next(node for node in machine.nodes if node.cpus and node.memory_bytes)
    narrow = topology.read(affinity=first.cpus)
    placement, bank = place(narrow, "auto")
    touch(bank)
    assert (placement.policy, calls) == ("off", [])
    assert set(narrow.workers()) <= set(first.cpus)
    if len(machine.bank_nodes) == 1:
        assert place(machine, "auto")[0].policy == "off"
        assert calls == []


def test_a_full_node_spills(machine: Topology) -> None:
    """A bank larger than what its node has left goes on elsewhere; nobody is killed."""
    free = {n.id: _free_bytes(n.id) for n in machine.nodes if n.memory_bytes}
    node = min(free, key=lambda n: free[n])
    size = free[node] + (64 << 20)
    if len(free) < 2 or size > 900 << 20 or sum(free.values()) < size + (700 << 20):
        pytest.skip(f"no node is small enough beside the others: {free}")
    placer = Placer(choose(machine, machine.workers(), node))
    array = map_bytes(size, placer.place)
    array[:: mmap.PAGESIZE] = 1
    found = locate(array, samples=4096)
    print(f"a bank of {size >> 20} MiB on node {node} of {free[node] >> 20} MiB free:", found)
    assert found[node] > 0.5 * sum(found.values())
    assert len(found) > 1
    assert sum(found.values()) == min(4096, -(-size // mmap.PAGESIZE))


def _free_bytes(node: int) -> int:
    lines = Path(f"/sys/devices/system/node/node{node}/meminfo").read_text().splitlines()
    return next(int(line.split()[-2]) * 1024 for line in lines if "MemFree:" in line)


def test_a_scope_places_what_appears_within_it(machine: Topology, several: tuple[int, ...]) -> None:
    placer = Placer(choose(machine, machine.workers(), "interleave"))
    before = _mempolicy.get_mempolicy()
    with placer.scope(several[-1]):
        array = map_bytes(8 * mmap.PAGESIZE)
        array[:] = 1
    assert set(locate(array)) == {several[-1]}
    assert _mempolicy.get_mempolicy() == before


@pytest.fixture
def reserved(machine: Topology) -> Iterator[int]:
    """Eight huge pages on each node with memory, in a guest only: how many there are in all."""
    if "NUMA_VM" not in os.environ:
        pytest.skip("huge pages are reserved in guests only")
    files = [
        Path(f"/sys/devices/system/node/node{node.id}/hugepages/hugepages-2048kB/nr_hugepages")
        for node in machine.nodes
        if node.memory_bytes
    ]
    for file in files:
        file.write_text("8")
    yield reserved_pages()[1]
    for file in files:
        file.write_text("0")


def test_reserved_huge_pages_are_used_and_placed(machine: Topology, reserved: int) -> None:
    nodes = [node.id for node in machine.nodes if node.memory_bytes]
    assert reserved == 8 * len(nodes)
    placer = Placer(choose(machine, machine.workers(), nodes[-1]))
    array = map_bytes(8 * HUGE - 5, placer.place)
    assert reserved_pages() == (HUGE, reserved - 8)  # they appear at once
    array[:] = 1
    assert set(locate(array)) == {nodes[-1]}
    more = map_bytes((reserved - 7) * HUGE, placer.place)  # one more than are left: ordinary pages
    small = map_bytes(HUGE // 2, placer.place)  # half of one would be wasted
    assert reserved_pages() == (HUGE, reserved - 8)
    more[:: mmap.PAGESIZE] = small[:] = 1
    del array
    assert reserved_pages() == (HUGE, reserved)


def masks() -> dict[str, str]:
    """Thread -> CPUs it may run on."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        found[task.name] = next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))
    return found


def test_threads_sit_on_the_cores_of_their_node(machine: Topology, several: tuple[int, ...]) -> None:
    """On those with a worker, so on no second thread of a core; the caller is left alone."""
    workers = machine.workers()
    placement, bank = place(machine, "auto")
    bank.put(0, make_expert(LAYOUT.format, LAYOUT.hidden, LAYOUT.intermediate))
    kernel = table(LAYOUT.format)[0]
    layers = [ExpertLayer(shard.records, shard.layout, kernel) for shard in bank.shards]
    layer = ShardedLayer(layers, placement.teams, placement.seats(workers))
    x = np.ones((1, LAYOUT.hidden), np.float32)

    def use() -> tuple[list[str], set[int]]:
        """From a thread that has no OpenMP team yet: the CPUs of the threads that came, and its own."""
        before = masks()
        layer.run(x, *make_routes(1, 1, 1), np.empty_like(x), Scratch(), len(workers))
        return sorted(cpus for task, cpus in masks().items() if task not in before), os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        new, own = pool.submit(use).result()
    seats = {n: topology.format_cpu_list(c for c in workers if machine.node_of(c) == n) for n in machine.compute_nodes}
    print("threads on CPUs", new)
    assert new == sorted(seats[machine.node_of(cpu)] for cpu in workers[1:])  # type: ignore[index]
    assert own == set(machine.allowed)


def test_a_refused_call_degrades_with_one_warning(
    machine: Topology, several: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """In a thread whose calls the kernel really refuses."""

    def use() -> tuple[Placement, LayerBank, Achieved | None]:
        refuse_policies()
        placement, bank = place(machine, "auto")
        touch(bank)
        with Placer(placement).scope():
            found = measure((shard.records, placement.homes) for shard in bank.shards)
        return placement, bank, found

    with ThreadPoolExecutor(1) as pool:
        placement, bank, found = pool.submit(use).result()
    assert (placement.policy, len(bank.shards)) == ("off", 1)
    ((name, level, message),) = caplog.record_tuples
    assert (name, level) == ("freetoken.memory.placement", logging.WARNING)
    assert "the system refused mbind (Operation not permitted)" in message
    assert found is not None  # from numa_maps: the query is refused, too
    assert set(found.pages) <= set(several)
