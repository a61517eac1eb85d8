from pathlib import Path

import pytest

from freetoken.topology import Node, PciDevice, format_cpu_list, parse_cpu_list, parse_cpu_mask, sysfs
from tests.support.sysfs import CPUS, NODES, FakeSystem, paired_cores, single_cores

EIGHT = frozenset(range(8))
GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    return FakeSystem(tmp_path)


def spell_mask(cpus: frozenset[int]) -> str:
    """As the kernel does: 32-bit words, the highest first."""
    digits = f"{sum(1 << cpu for cpu in cpus):0512x}"
    return ",".join(digits[i : i + 8] for i in range(0, len(digits), 8))


# --- lists and masks -------------------------------------------------------------------------------------------------


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


# --- CPUs and cores --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("online", [None, "\n", "cpus", "0-", "3-1", "-1", "0-4294967295", "0,,1"])
def test_folders_tell_what_is_online_where_the_list_does_not(system: FakeSystem, online: str | None) -> None:
    system.add_cpus(paired_cores(2))
    (system.root / CPUS.lstrip("/") / "online").unlink()
    if online is not None:
        system.write(f"{CPUS}/online", online)
    system.write(f"{CPUS}/cpu1/online", "0\n")
    system.write(f"{CPUS}/cpu2/online", "1\n")
    system.write(f"{CPUS}/cpufreq/policy0", "")

    assert sysfs.read_online(system.root) == {0, 2, 3}
    assert sysfs.read_present(system.root) == {0, 1, 2, 3}


def test_present_but_off(system: FakeSystem) -> None:
    system.add_cpus(single_cores(2))
    system.add_offline_cpu(2)
    system.write(f"{CPUS}/present", "0-3\n")

    assert sysfs.read_online(system.root) == {0, 1}
    assert sysfs.read_present(system.root) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("name", "text", "core"),
    [
        ("thread_siblings_list", "0,2\n", {0, 2}),
        ("core_cpus_list", "0,2\n", {0, 2}),
        ("thread_siblings", "00000000,00000005\n", {0, 2}),
        ("core_cpus", "5\n", {0, 2}),
        ("thread_siblings", "00000100,00000000,00000001\n", {0, 72}),
        ("thread_siblings", spell_mask(frozenset({0, 1024})) + "\n", {0, 1024}),
        ("thread_siblings", spell_mask(frozenset({0, 2047})) + "\n", {0, 2047}),
        *(
            ("thread_siblings_list", garbage, set())
            for garbage in ("", "\n", "x", "-3", "9" * 6000, "\x00", "0-1,", "0-64")
        ),
    ],
)
def test_siblings(system: FakeSystem, name: str, text: str, core: set[int]) -> None:
    system.write(f"{CPUS}/cpu0/topology/{name}", text)

    assert sysfs.read_siblings(system.root, 0) == core


def test_cores_cover_every_cpu_once_also_where_lists_contradict() -> None:
    lists = {0: {0, 1}, 1: {0, 1}, 2: set[int](), 3: {0, 1, 2, 3}}

    assert sysfs.group_cores({cpu: frozenset(core) for cpu, core in lists.items()}) == ((0, 1), (2,), (3,))


@pytest.mark.parametrize(("text", "package"), [("0\n", 0), ("36", 36), ("-1\n", None), ("", None), ("socket", None)])
def test_package(system: FakeSystem, text: str, package: int | None) -> None:
    system.write(f"{CPUS}/cpu0/topology/physical_package_id", text)

    assert sysfs.read_package(system.root, 0) == package
    assert sysfs.read_package(system.root, 1) is None


# --- nodes -----------------------------------------------------------------------------------------------------------


def test_nodes_with_gaps_memory_and_distances_by_id(system: FakeSystem) -> None:
    system.add_node(0, "0-3", gib=2, distances="10 40 80")
    system.add_node(8, "4-7", gib=4, distances="40 10 80")
    system.add_node(250, "", gib=15, distances="80 80 10")
    system.write(f"{NODES}/online", "0,8,250\n")

    assert sysfs.read_nodes(system.root, EIGHT) == (
        Node(0, (0, 1, 2, 3), 2 * GIB, ((0, 10), (8, 40), (250, 80))),
        Node(8, (4, 5, 6, 7), 4 * GIB, ((0, 40), (8, 10), (250, 80))),
        Node(250, (), 15 * GIB, ((0, 80), (8, 80), (250, 10))),
    )


def test_offline_node_and_offline_cpus(system: FakeSystem) -> None:
    """The kernel gives no distance for a node that is off, whose folder may still be there."""
    system.add_node(0, "", gib=0)
    system.add_node(1, "0-3,100", gib=1, distances="10 21")
    system.add_node(3, "4-7", gib=1, distances="21 10")
    system.write(f"{NODES}/online", "1,3\n")

    nodes = sysfs.read_nodes(system.root, EIGHT)
    assert [(node.id, node.cpus) for node in nodes] == [(1, (0, 1, 2, 3)), (3, (4, 5, 6, 7))]
    assert nodes[1].distances == ((1, 21), (3, 10))


def test_node_of_2048_cpus_by_mask(system: FakeSystem) -> None:
    high = frozenset(range(1024, 2048))
    system.write(f"{NODES}/node0/cpumap", spell_mask(frozenset(range(1024))) + "\n")
    system.write(f"{NODES}/node1/cpumap", spell_mask(high) + "\n")

    nodes = sysfs.read_nodes(system.root, frozenset(range(2048)))
    assert [len(node.cpus) for node in nodes] == [1024, 1024]
    assert set(nodes[1].cpus) == high


@pytest.mark.parametrize("text", ["", "MemTotal", "Node 0 MemTotal: much kB", "Node 0 MemTotal: " + "9" * 40 + " kB"])
def test_memory_that_is_not_said(system: FakeSystem, text: str) -> None:
    system.add_node(0, "0-7")
    system.write(f"{NODES}/node0/meminfo", text)

    assert sysfs.read_nodes(system.root, EIGHT)[0].memory_bytes is None


@pytest.mark.parametrize("text", ["", "10", "10 20 30", "10 far", "10 -1", "10 0"])
def test_distances_that_say_nothing(system: FakeSystem, text: str) -> None:
    system.add_node(0, "0-3", distances=text)
    system.add_node(1, "4-7", distances="20 10")

    first, second = sysfs.read_nodes(system.root, EIGHT)
    assert first.distances == ()
    assert second.distances == ((0, 20), (1, 10))


def test_nodes_whose_cpus_nobody_tells_are_no_nodes(system: FakeSystem) -> None:
    assert sysfs.read_nodes(system.root, EIGHT) == ()
    system.add_node(0, "garbage", gib=1)
    system.add_node(1, "", gib=1)
    assert sysfs.read_nodes(system.root, EIGHT) == ()


def test_a_cpu_of_two_nodes_counts_in_the_lower(system: FakeSystem) -> None:
    system.add_node(0, "0-4")
    system.add_node(1, "3-7")

    assert [node.cpus for node in sysfs.read_nodes(system.root, EIGHT)] == [(0, 1, 2, 3, 4), (5, 6, 7)]


# --- kinds of cores --------------------------------------------------------------------------------------------------


def test_hybrid_by_the_kernels_own_words(system: FakeSystem) -> None:
    """They win over clocks, which here would make two cores of four strong ones weak."""
    system.write("/sys/devices/cpu_core/cpus", "0-3\n")
    system.write("/sys/devices/cpu_atom/cpus", "4-9\n")
    system.add_clocks({cpu: 5_000_000 if cpu < 2 else 3_000_000 for cpu in range(8)})

    assert sysfs.read_kinds(system.root, EIGHT) == ({0, 1, 2, 3}, {4, 5, 6, 7})


def test_one_kind_where_the_kernel_names_only_one(system: FakeSystem) -> None:
    system.write("/sys/devices/cpu_core/cpus", "0-7\n")

    assert sysfs.read_kinds(system.root, EIGHT) == (frozenset(), frozenset())


def test_hybrid_by_arm_parts(system: FakeSystem) -> None:
    """Strong cores may have several capacities; a kind is as strong as its strongest core."""
    system.add_arm_parts({cpu: "0xd85" if cpu in (2, 3, 6, 7) else "0xd87" for cpu in range(8)})
    for cpu, capacity in enumerate((718, 718, 997, 800, 718, 731, 1024, 997)):
        system.write(f"{CPUS}/cpu{cpu}/cpu_capacity", f"{capacity}\n")

    assert sysfs.read_kinds(system.root, EIGHT) == ({2, 3, 6, 7}, {0, 1, 4, 5})


def test_arm_parts_of_the_same_strength_are_one_kind(system: FakeSystem) -> None:
    system.add_arm_parts({cpu: "0xd40" if cpu < 4 else "0xd41" for cpu in range(8)})
    system.add_clocks(dict.fromkeys(range(8), 3_000_000))

    assert sysfs.read_kinds(system.root, EIGHT) == (frozenset(), frozenset())


@pytest.mark.parametrize(
    ("clocks", "strong"),
    [
        pytest.param([5_400] * 2 + [5_200] * 2 + [4_100] * 4, {0, 1, 2, 3}, id="favoured cores and weak ones"),
        pytest.param([5_400] * 2 + [5_200] * 6, set(), id="favoured cores alone"),
        pytest.param([5_200] * 8, set(), id="all alike"),
        pytest.param([5_200] * 7 + [0], set(), id="one is not said"),
    ],
)
def test_kinds_by_clocks(system: FakeSystem, clocks: list[int], strong: set[int]) -> None:
    system.add_clocks({cpu: 1000 * clock for cpu, clock in enumerate(clocks)})

    assert sysfs.read_kinds(system.root, EIGHT) == (strong, EIGHT - strong if strong else frozenset())


# --- PCI -------------------------------------------------------------------------------------------------------------


def test_pci_devices_and_gpus(system: FakeSystem) -> None:
    system.add_pci("0000:00:02.0", kind="0x030000", vendor="0x8086")
    system.add_pci("0000:02:00.0", node=0, kind="0x030000", vendor="0x1a03")  # the console of a server
    system.add_pci("0000:17:00.0", node=1, kind="0x030200", vendor="0x10de")
    system.add_pci("0000:18:00.0", node=1, kind="0x020000", vendor="0x10de")
    system.add_pci("0000:63:00.0", node=None, kind="0x120000", vendor="0x1002")
    system.add_pci("0000:64:00.0", node=-7, kind="0x030200", vendor="0xffff")
    system.add_pci("0000:65:00.0", kind="garbage")

    assert sysfs.read_pci(system.root) == (
        PciDevice("0000:00:02.0", -1, "Intel"),
        PciDevice("0000:02:00.0", 0),
        PciDevice("0000:17:00.0", 1, "NVIDIA"),
        PciDevice("0000:18:00.0", 1),
        PciDevice("0000:63:00.0", -1, "AMD"),
        PciDevice("0000:64:00.0", -1, "GPU"),
        PciDevice("0000:65:00.0", -1),
    )


def test_gpus_that_the_driver_names(system: FakeSystem) -> None:
    system.add_pci("0000:17:00.0", node=1, kind="0x030200", vendor="0x10de")
    system.write("/proc/driver/nvidia/gpus/0000:17:00.0/information", "Model: \t\t NVIDIA H200\nIRQ:   \t\t 55\n")
    system.write("/proc/driver/nvidia/gpus/0000:3D:00.0/information", "no such word\n")

    assert sysfs.read_pci(system.root) == (
        PciDevice("0000:17:00.0", 1, "NVIDIA H200"),
        PciDevice("0000:3d:00.0", -1, "NVIDIA"),
    )


def test_no_pci_bus(system: FakeSystem) -> None:
    assert sysfs.read_pci(system.root) == ()
