"""Where banks go, on fake machines; what is asked of the kernel, and what happens when it says no."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken import settings, topology
from freetoken.errors import ConfigError
from freetoken.memory import _mempolicy, mapping, placement
from freetoken.memory.mapping import map_bytes
from freetoken.memory.placement import Placement, Placer, bind_thread, choose, locate, measure
from freetoken.topology import Topology
from tests.support.mempolicy import FakeKernel
from tests.support.seccomp import CALLS, refuse_policies
from tests.support.sysfs import FakeSystem

Nodes = Mapping[int, tuple[str, int]]
"""Id -> (CPUs, GiB of memory)."""

ONE: Nodes = {0: ("0-3", 8)}
TWO: Nodes = {0: ("0-1", 8), 1: ("2-3", 8)}
APART: Nodes = {0: ("0-1", 8), 2: ("2-3", 8)}
MEMORY_ONLY: Nodes = {0: ("0-1", 64), 1: ("2-3", 64), 2: ("", 16), 3: ("", 16)}
CPUS_ONLY: Nodes = {0: ("0", 8), 1: ("1", 0), 2: ("2-3", 8)}


def machine(root: Path, nodes: Nodes, mask: str = "0-3", distances: Mapping[int, str] | None = None) -> Topology:
    """Four CPUs, each a core."""
    system = FakeSystem(root)
    system.add_cpus([(cpu,) for cpu in range(4)])
    for node, (cpus, gib) in nodes.items():
        folder = f"/sys/devices/system/node/node{node}"
        system.write(f"{folder}/cpulist", f"{cpus}\n")
        system.write(f"{folder}/meminfo", f"Node {node} MemTotal: {gib << 20} kB\n")
        if distances:
            system.write(f"{folder}/distance", f"{distances[node]}\n")
    return topology.read(root, affinity=topology.parse_cpu_list(mask))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.delenv("FREETOKEN_CPU_MOE_NUMA", raising=False)
    return FakeKernel(monkeypatch)


# --- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "mask", "request_", "policy", "on"),
    [
        pytest.param(TWO, "0-3", "auto", "shard", (0, 1), id="auto"),
        pytest.param(APART, "0-3", "auto", "shard", (0, 2), id="ids with a gap"),
        pytest.param(MEMORY_ONLY, "0-3", "auto", "shard", (0, 1), id="nodes without CPUs hold no banks"),
        pytest.param(CPUS_ONLY, "0-3", "auto", "shard", (0, 2), id="nodes without memory hold no banks"),
        pytest.param(TWO, "0-3", "off", "off", (), id="off"),
        pytest.param(TWO, "0-3", "interleave", "interleave", (0, 1), id="interleave"),
        pytest.param(TWO, "0-3", "shard", "shard", (0, 1), id="shard"),
        pytest.param(TWO, "0-3", 0, "node", (0,), id="number"),
        pytest.param(TWO, "0-3", "1", "node", (1,), id="number as text"),
        pytest.param(TWO, "0-3", " Shard ", "shard", (0, 1), id="spelling"),
        pytest.param(MEMORY_ONLY, "0-3", 2, "node", (2,), id="memory alone may be asked for"),
        pytest.param(TWO, "2-3", "auto", "off", (), id="a mask within one node"),
        pytest.param(TWO, "2-3", 0, "node", (0,), id="the other node's memory"),
        pytest.param(ONE, "0-3", "auto", "off", (), id="one node"),
        pytest.param(ONE, "0-3", "shard", "off", (), id="one node cannot be cut"),
        pytest.param({}, "0-3", "interleave", "off", (), id="no nodes"),
    ],
)
def test_policies(
    tmp_path: Path, kernel: FakeKernel, nodes: Nodes, mask: str, request_: str | int, policy: str, on: tuple[int, ...]
) -> None:
    found = machine(tmp_path, nodes, mask)
    chosen = choose(found, found.workers(), request_)

    assert (chosen.policy, chosen.nodes) == (policy, on)
    assert chosen.pieces == (2 if policy == "shard" else 1)
    assert bool(kernel.calls) == (policy != "off")
    assert set(found.workers()) == topology.parse_cpu_list(mask)  # never confined
    assert str(chosen).startswith(f"{policy} over nodes {on[0]}, " if len(on) > 1 else f"{policy}")


def test_the_setting_is_read_and_the_argument_wins(
    tmp_path: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = machine(tmp_path, TWO)
    monkeypatch.setenv("FREETOKEN_CPU_MOE_NUMA", "1")
    assert choose(found, found.workers()).nodes == (1,)
    assert choose(found, found.workers(), "interleave").policy == "interleave"


@pytest.mark.parametrize("value", ["yes", "true", "on", "node1", "-1", "2", "1.5", "³", True, False, 7, -1, 1.0, "0,1"])
def test_bad_values_list_the_good_ones(tmp_path: Path, kernel: FakeKernel, value: Any) -> None:
    found = machine(tmp_path, TWO)
    with pytest.raises(ConfigError) as caught:
        choose(found, found.workers(), value)
    message = str(caught.value)
    assert message.startswith(f"placement={value!r} is not one of auto, off, interleave, shard, or a node")
    assert "(0, 1)" in message and "\n" not in message
    assert kernel.calls == []


@pytest.mark.parametrize("value", ["yes", "2", "-1"])
def test_bad_settings_name_the_variable(
    tmp_path: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FREETOKEN_CPU_MOE_NUMA", value)
    found = machine(tmp_path, TWO)
    with pytest.raises(ConfigError, match=rf"^FREETOKEN_CPU_MOE_NUMA='{value}' is not one of auto, off, interleave"):
        choose(found, found.workers())


@pytest.mark.parametrize(
    ("nodes", "value"), [(CPUS_ONLY, 1), ({}, 0), (MEMORY_ONLY, 4)], ids=["no memory", "no nodes", "no such node"]
)
def test_a_node_that_cannot_hold_banks_is_refused(tmp_path: Path, kernel: FakeKernel, nodes: Nodes, value: int) -> None:
    found = machine(tmp_path, nodes)
    with pytest.raises(ConfigError, match=f"placement={value} is not one of"):
        choose(found, found.workers(), value)


def test_memory_that_the_cpuset_forbids_is_not_used(tmp_path: Path, kernel: FakeKernel) -> None:
    FakeSystem(tmp_path).write("/proc/self/status", "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n")
    found = machine(tmp_path, TWO)
    assert choose(found, found.workers(), "auto").policy == "off"
    with pytest.raises(ConfigError, match=r"\(0\)"):
        choose(found, found.workers(), 1)


def test_a_node_without_a_worker_gets_pages_but_no_shard(tmp_path: Path, kernel: FakeKernel) -> None:
    found = machine(tmp_path, TWO)
    for request in ("auto", "shard"):
        chosen = choose(found, found.workers(1), request)
        assert (chosen.policy, chosen.nodes) == ("interleave", (0, 1))
        assert "no worker on node 1" in chosen.why


def test_teams_and_homes(tmp_path: Path, kernel: FakeKernel) -> None:
    """Workers of a node without memory help the nearest node, or where all are as near the one with fewest workers."""
    found = machine(tmp_path, CPUS_ONLY)
    chosen = choose(found, found.workers(), "auto")
    assert (chosen.homes, chosen.teams) == ((0, 1, 2, 2), (0, 0, 1, 1))
    far = machine(tmp_path, CPUS_ONLY, distances={0: "10 40 20", 1: "40 10 20", 2: "20 20 10"})
    assert choose(far, far.workers(), "auto").teams == (0, 1, 1, 1)
    assert chosen.cpus_of(2) == (2, 3)
    assert chosen.cpus_of(None) == chosen.cpus_of(9) == ()


# --- no call where none helps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "mask"), [(ONE, "0-3"), ({}, "0-3"), (TWO, "0-1")])
def test_auto_asks_nothing_and_says_so_once(
    tmp_path: Path, kernel: FakeKernel, nodes: Nodes, mask: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = machine(tmp_path, nodes, mask)
    with caplog.at_level(logging.INFO, "freetoken.memory"):
        placer = Placer(choose(found, found.workers()))
        array = map_bytes(3 * mmap.PAGESIZE, placer.place)
        with placer.scope():
            array[:] = 1
    assert kernel.calls == []
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "no memory policy" in caplog.text


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
@pytest.mark.parametrize("request_", ["auto", "interleave", 1])
def test_a_refused_call_is_the_last(
    tmp_path: Path, kernel: FakeKernel, number: int, request_: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.refuses = dict.fromkeys(("mbind", "set_mempolicy", "get_mempolicy"), number)
    found = machine(tmp_path, TWO)
    with caplog.at_level(logging.INFO, "freetoken.memory"):
        chosen = choose(found, found.workers(), request_)
        placer = Placer(chosen)
        placer.place(0, mmap.PAGESIZE)
        with placer.scope():
            pass
    assert (chosen.policy, chosen.nodes) == ("off", ())
    assert os.strerror(number) in chosen.why
    assert len(kernel.calls) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_refusal_later_on_is_the_last_call_too(
    tmp_path: Path, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
) -> None:
    found = machine(tmp_path, TWO)
    placer = Placer(choose(found, found.workers(), "auto"))
    kernel.refuses = {"mbind": errno.EPERM}
    kernel.calls.clear()
    arrays = [map_bytes(mmap.PAGESIZE, placer.place) for _ in range(3)]
    with placer.scope():
        arrays[0][:] = 1
    assert len(kernel.calls) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.skipif(platform.machine() not in CALLS, reason="the numbers of the calls are not known here")
def test_a_kernel_that_really_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As under the default filter of container runtimes; in a thread, which it ends with."""
    found = machine(tmp_path, TWO)

    def use() -> tuple[Placement, int]:
        refuse_policies()
        chosen = choose(found, found.workers(), "auto")
        array = map_bytes(1 << 20, Placer(chosen).place)
        array[:] = 1
        return chosen, int(array[-1])

    with ThreadPoolExecutor(1) as pool:
        chosen, last = pool.submit(use).result()
    assert (chosen.policy, last) == ("off", 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Operation not permitted" in caplog.text or not _mempolicy.SUPPORTED


def test_an_unknown_system_is_asked_nothing(
    tmp_path: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_mempolicy, "SUPPORTED", False)
    found = machine(tmp_path, TWO)
    assert choose(found, found.workers()).policy == "off"
    assert kernel.calls == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# --- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "node", "asked"),
    [
        ("shard", 1, (_mempolicy.PREFERRED, (1,))),
        ("shard", None, (_mempolicy.INTERLEAVE, (0, 1))),
        ("interleave", None, (_mempolicy.INTERLEAVE, (0, 1))),
        (1, None, (_mempolicy.PREFERRED, (1,))),
    ],
)
def test_a_policy_is_set_on_fresh_pages_only(
    tmp_path: Path, kernel: FakeKernel, request_: str | int, node: int | None, asked: tuple[int, tuple[int, ...]]
) -> None:
    """And never binds: a full node must spill."""
    found = machine(tmp_path, TWO)
    placer = Placer(choose(found, found.workers(), request_))
    kernel.calls.clear()
    touched: list[int] = []

    def place(address: int, nbytes: int) -> None:
        touched.append(_resident(address, nbytes))
        placer.place(address, nbytes, node)

    array = map_bytes(5 * mmap.PAGESIZE, place)
    ((name, address, nbytes, *policy),) = kernel.calls
    assert touched == [0]
    assert (name, address) == ("mbind", array.ctypes.data)
    assert nbytes >= array.nbytes == 5 * mmap.PAGESIZE
    assert tuple(policy) == asked


def _resident(address: int, nbytes: int) -> int:
    """Bytes of a mapping that are there, from smaps."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        head = line.split()[0]
        if "-" in head:
            low, high = (int(word, 16) for word in head.split("-"))
            if low <= address < high:
                size = next(int(rest.split()[1]) for rest in lines if rest.startswith("Rss:"))
                return size * 1024 if (low, high) == (address, address + nbytes) else 0
    raise AssertionError(f"no mapping at {address:#x}")


def test_a_scope_restores_the_policy_of_the_thread(tmp_path: Path, kernel: FakeKernel) -> None:
    found = machine(tmp_path, TWO)
    placer, before = Placer(choose(found, found.workers(), "interleave")), kernel.thread
    with placer.scope():
        assert kernel.thread == (_mempolicy.INTERLEAVE, (0, 1))
    assert kernel.thread == before
    seen: list[tuple[int, tuple[int, ...]]] = []
    with pytest.raises(KeyError), placer.scope(1):
        _note_and_fail(seen, lambda: kernel.thread)
    assert seen == [(_mempolicy.PREFERRED, (1,))]
    assert kernel.thread == before


def _note_and_fail(seen: list[Any], look: Callable[[], Any]) -> None:
    seen.append(look())
    raise KeyError


def test_a_scope_that_is_refused_runs_its_body(tmp_path: Path, kernel: FakeKernel) -> None:
    found = machine(tmp_path, TWO)
    placer, before = Placer(choose(found, found.workers(), "interleave")), kernel.thread
    kernel.refuses = {"set_mempolicy": errno.EPERM}
    ran = []
    with placer.scope():
        ran.append(kernel.thread)
    assert ran == [before] and kernel.thread == before


def test_a_real_scope_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        before = _mempolicy.get_mempolicy()
        _mempolicy.set_mempolicy(*before)
    except OSError as error:
        pytest.skip(f"memory policies are refused here: {error}")
    placer = Placer(Placement("interleave", (topology.read().bank_nodes[0],), "asked for", ()))
    seen: list[tuple[int, tuple[int, ...]]] = []
    with pytest.raises(KeyError), placer.scope():
        _note_and_fail(seen, _mempolicy.get_mempolicy)
    assert [mode for mode, _ in seen] == [_mempolicy.INTERLEAVE]
    assert _mempolicy.get_mempolicy() == before


# --- what is read back -----------------------------------------------------------------------------------------------


def fake_locate(monkeypatch: pytest.MonkeyPatch, of: Mapping[int, int]) -> None:
    """Page number of the array at each address -> node."""

    def answer(pages: np.ndarray, nodes: np.ndarray) -> None:
        first = int(pages[0]) if len(pages) else 0
        nodes[:] = [of.get((int(page) - first) // mmap.PAGESIZE, -2) for page in pages]

    monkeypatch.setattr(_mempolicy, "locate_pages", answer)


def test_pages_are_counted_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    array = map_bytes(8 * mmap.PAGESIZE)
    fake_locate(monkeypatch, {0: 0, 1: 0, 2: 3, 3: 3, 4: 3, 7: 5})
    assert locate(array) == {0: 2, 3: 3, 5: 1}
    assert locate(array, 2) == {0: 1, 5: 1}  # the first and the last
    assert locate(array[:0]) == {}


def test_shares_weigh_banks_by_their_size_and_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = map_bytes(30 * mmap.PAGESIZE), map_bytes(10 * mmap.PAGESIZE)
    fake_locate(monkeypatch, {page: page % 2 for page in range(30)})
    found = measure([(large, (0, 0, 0, 1)), (small, (1,))])
    assert found is not None
    assert found.pages == {0: 20, 1: 20}
    assert found.local_share == pytest.approx((15 * 0.75 + 15 * 0.25 + 5) / 40)
    fake_locate(monkeypatch, {})
    assert measure([(large, (0,))]) is None


def test_numa_maps_answers_where_the_query_is_refused(tmp_path: Path, kernel: FakeKernel) -> None:
    kernel.refuses = {"locate_pages": errno.EPERM}
    text = "7f0000000000 default anon=9 N0=9\n7f0000001000 prefer:1 anon=5 dirty=5 N0=1 N1=4 kernelpagesize_kB=4\n"
    FakeSystem(tmp_path).write("/proc/self/numa_maps", text + "7f0000009000 default anon=3 N3=3\n")
    assert placement._read_numa_maps(0x7F0000001000, tmp_path) == {0: 1, 1: 4}
    assert placement._read_numa_maps(0x7F0000003000, tmp_path) == {0: 1, 1: 4}
    assert placement._read_numa_maps(0x1000, tmp_path) == {}
    array = map_bytes(1 << 20)
    array[:] = 1
    if Path("/proc/self/numa_maps").exists():
        assert sum(locate(array).values()) > 0


# --- threads and huge pages ------------------------------------------------------------------------------------------


def test_binding_a_thread_that_may_not_run_there_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    bind_thread(())
    bind_thread((4000,))
    assert os.sched_getaffinity(0) == before


def test_reserved_huge_pages_that_are_not_there_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapping or its population fails, and plain memory serves."""
    places: list[int] = []
    size = (20 << 20) - 7
    monkeypatch.setattr(mapping, "reserved_pages", lambda: (2 << 20, 10**6))
    array = map_bytes(size, lambda address, nbytes: places.append(nbytes))
    array[:] = 7
    assert array.nbytes == size
    assert places in ([size], [20 << 20, size], [20 << 20])


def test_free_reserved_pages_are_those_not_spoken_for(tmp_path: Path) -> None:
    assert mapping.reserved_pages(tmp_path) == (0, 0)
    text = "MemTotal: 100 kB\nHugePages_Total: 9\nHugePages_Free: 8\nHugePages_Rsvd: 3\nHugepagesize: 2048 kB\n"
    FakeSystem(tmp_path).write("/proc/meminfo", text)
    assert mapping.reserved_pages(tmp_path) == (2 << 20, 5)


@pytest.mark.skipif(not _mempolicy.MAP_HUGETLB, reason="this system has no explicit huge pages")
def test_what_would_lie_on_reserved_pages(tmp_path: Path) -> None:
    """In turn, as long as they last; what wastes more than an eighth of them takes ordinary ones."""
    huge = 2 << 20
    FakeSystem(tmp_path).write("/proc/meminfo", "HugePages_Free: 8\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n")
    assert mapping.reserved_bytes([3 * huge, huge // 2, 4 * huge - 64, 2 * huge, huge], tmp_path) == 8 * huge - 64
    assert mapping.reserved_bytes([9 * huge], tmp_path) == 0
    assert mapping.reserved_bytes([9 * huge, huge], tmp_path / "nothing") == 0


def test_the_setting_takes_words_and_numbers() -> None:
    for text in ("auto", "off", "interleave", "shard", "0", "17"):
        assert settings.CPU_MOE_NUMA.read({"FREETOKEN_CPU_MOE_NUMA": text}) == text
    with pytest.raises(ConfigError, match="auto, off, interleave, shard, the number of a node"):
        settings.CPU_MOE_NUMA.read({"FREETOKEN_CPU_MOE_NUMA": "yes"})
