"""What /sys and /proc say about a machine, as plain numbers: CPUs, cores, packages, nodes, kinds of cores, PCI devices.

Reads below an injectable root and decides nothing; `topology` does. A file that is missing, unreadable or nonsense
says nothing: the answer is then empty or coarser, never an exception.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from freetoken.cgroup import parse_kernel_int, read_kernel_file

# Above any kernel's limit (8192 on x86) and any core's: what is larger is garbage and must not be expanded.
_MAX_CPUS = 1 << 14
_MAX_THREADS = 64
_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"
_NVIDIA = "proc/driver/nvidia/gpus"
_GPU_MAKERS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
_VGA, _DISPLAY, _ACCELERATOR = 0x0300, 0x03, 0x1200
"""PCI classes: a display with VGA, all displays, accelerators."""
_MASKS = ("thread_siblings", "core_cpus", "cpumap")
_SAME_KIND = 0.85
"""Cores whose clocks differ by less are of one kind: favoured cores of one kind reach 4 % more, an E-core 22 % less."""


@dataclass(frozen=True)
class Node:
    """A NUMA node. cpus: its online CPUs. memory_bytes: what it has, None where that is not said.

    distances: pairs of a node's id and how far it is from this one, 10 to itself (ACPI SLIT); empty where it is not
        said.
    """

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int | None
    distances: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PciDevice:
    """A PCI device. address: "0000:17:00.0". node: its NUMA node, -1 where that is not known.

    gpu: what a GPU or accelerator is called, as far as it is said; "" for other devices.
    """

    address: str
    node: int
    gpu: str = ""


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs of a kernel list such as "0-3,8"; an empty or blank one has none. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        low, dash, high = part.partition("-")
        first, last = int(low), int(high if dash else low)
        if not 0 <= first <= last < _MAX_CPUS:
            raise ValueError(f"{part!r} is not a range of CPUs below {_MAX_CPUS}")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def parse_cpu_mask(text: str) -> frozenset[int]:
    """Return the CPUs of a kernel mask such as "00000000,0000000f" (hexadecimal words, highest first)."""
    bits = int(text.replace(",", "") or "0", 16)
    if not 0 <= bits < 1 << _MAX_CPUS:
        raise ValueError(f"mask of more than {_MAX_CPUS} CPUs")
    return frozenset(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Return CPUs in the kernel's spelling: "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def read_list(*files: Path) -> frozenset[int]:
    """The numbers of the first of these files that holds a list or, if its name is not that of a list, a mask."""
    for file in files:
        parse = parse_cpu_mask if file.name in _MASKS else parse_cpu_list
        try:
            found = parse(read_kernel_file(file))
        except ValueError:
            continue
        if found:
            return found
    return frozenset()


def read_online(root: Path) -> frozenset[int]:
    """Online CPUs; from the cpuN folders where the list is missing (kernels without hot-plug)."""
    folder = root / _CPUS
    return read_list(folder / "online") or frozenset(
        cpu for cpu, path in _numbered(folder, "cpu") if read_kernel_file(path / "online") != "0"
    )


def read_present(root: Path) -> frozenset[int]:
    """CPUs that are there, online or not."""
    folder = root / _CPUS
    return read_list(folder / "present") | frozenset(cpu for cpu, _ in _numbered(folder, "cpu"))


def read_siblings(root: Path, cpu: int) -> frozenset[int]:
    """CPUs of the core of `cpu`; empty where it is not said.

    Core ids are not used: they repeat between clusters and packages.
    """
    folder = root / _CPUS / f"cpu{cpu}" / "topology"
    names = ("thread_siblings_list", "core_cpus_list", "thread_siblings", "core_cpus")
    core = read_list(*(folder / name for name in names))
    return core if len(core) <= _MAX_THREADS else frozenset()


def read_package(root: Path, cpu: int) -> int | None:
    """The number of the package (socket) of `cpu`, or None.

    Lists of a package's CPUs are not used: with Cluster-on-Die some kernels stop them at the node.
    """
    package = parse_kernel_int(read_kernel_file(root / _CPUS / f"cpu{cpu}" / "topology" / "physical_package_id"))
    return None if package is None or package < 0 else package


def group_cores(siblings: Mapping[int, frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    """Disjoint cores that cover every CPU, also where lists are missing or contradict each other."""
    cores: list[tuple[int, ...]] = []
    free = set(siblings)
    for cpu, mates in sorted(siblings.items()):
        if cpu in free:
            core = free & (mates | {cpu})
            free -= core
            cores.append(tuple(sorted(core)))
    return tuple(cores)


def read_nodes(root: Path, online: frozenset[int]) -> tuple[Node, ...]:
    """Online NUMA nodes; none where the system has no folder for them or tells the CPUs of none.

    A CPU that two nodes claim counts in the lower one.
    """
    folder = root / _NODES
    listed = read_list(folder / "online")
    found = dict(_numbered(folder, "node"))
    ids = sorted(found.keys() & listed if listed else found)
    nodes, free = [], set(online)
    for node in ids:
        cpus = free & read_list(found[node] / "cpulist", found[node] / "cpumap")
        free -= cpus
        nodes.append(Node(node, tuple(sorted(cpus)), _read_memory(found[node]), _read_distances(found[node], ids)))
    return tuple(nodes) if len(free) < len(online) else ()


def _read_memory(folder: Path) -> int | None:
    found = re.search(r"MemTotal:\s*(\d{1,15})\s*kB", read_kernel_file(folder / "meminfo"))
    return int(found[1]) * 1024 if found else None


def _read_distances(folder: Path, ids: list[int]) -> tuple[tuple[int, int], ...]:
    """The kernel gives one number for each online node, in ascending order of ids."""
    words = [parse_kernel_int(word) for word in read_kernel_file(folder / "distance").split()]
    numbers = [word for word in words if word is not None and word > 0]
    return tuple(zip(ids, numbers, strict=True)) if len(words) == len(numbers) == len(ids) else ()


def read_pci(root: Path) -> tuple[PciDevice, ...]:
    """PCI devices by address, and GPUs that only NVIDIA's driver names."""
    nodes = {name: _read_node(root / _PCI / name) for name in _names(root / _PCI)}
    named = {name.lower(): _read_nvidia_model(root / _NVIDIA / name) for name in _names(root / _NVIDIA)}
    gpus = {name: _read_gpu(root / _PCI / name) for name in nodes} | named
    return tuple(PciDevice(name, nodes.get(name, -1), gpus[name]) for name in sorted(gpus))


def _read_node(folder: Path) -> int:
    node = parse_kernel_int(read_kernel_file(folder / "numa_node"))
    return -1 if node is None or node < 0 else node


def _read_gpu(folder: Path) -> str:
    """Who made a GPU or accelerator; "" for other devices, among them the VGA consoles of servers."""
    kind = _parse_hex(read_kernel_file(folder / "class")) >> 8
    if kind >> 8 != _DISPLAY and kind != _ACCELERATOR:
        return ""
    vendor = read_kernel_file(folder / "vendor")
    maker = _GPU_MAKERS.get(_parse_hex(vendor), "")
    return "" if kind == _VGA and vendor and not maker else maker or "GPU"


def _read_nvidia_model(folder: Path) -> str:
    model = re.search(r"^Model:\s*(\S.{0,99}?)\s*$", read_kernel_file(folder / "information"), re.MULTILINE)
    return model[1] if model else "NVIDIA"


def _parse_hex(text: str) -> int:
    """The value of "0x030200"; 0 for anything else."""
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else 0


def read_kinds(root: Path, online: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
    """(performance, efficiency) CPUs of a hybrid processor; both empty where all cores are of one kind.

    The kernel's own words on x86 (the PMUs cpu_core and cpu_atom), else the part numbers of Arm cores, else clocks.
    """
    performance, efficiency = (
        read_list(root / f"sys/devices/{name}/cpus") & online for name in ("cpu_core", "cpu_atom")
    )
    if performance and efficiency:
        return performance, efficiency
    strength = _read_strengths(root, online)
    if not strength:
        return frozenset(), frozenset()
    parts = _read_parts(root)
    if len({parts.get(cpu) for cpu in online}) > 1 and online <= parts.keys():
        groups = [[cpu for cpu in online if parts[cpu] == part] for part in {parts[cpu] for cpu in online}]
        level = {cpu: max(strength[c] for c in group) for group in groups for cpu in group}
    else:
        level = strength
    top = max(level.values())
    strong = frozenset(cpu for cpu in online if level[cpu] > _SAME_KIND * top)
    return (strong, online - strong) if strong != online else (frozenset(), frozenset())


def _read_strengths(root: Path, online: frozenset[int]) -> dict[int, int]:
    """CPU -> a number that is larger for stronger cores; empty where not every CPU has it."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        found = {cpu: parse_kernel_int(read_kernel_file(root / _CPUS / f"cpu{cpu}" / name)) or 0 for cpu in online}
        if all(value > 0 for value in found.values()):
            return found
    return {}


def _read_parts(root: Path) -> dict[int, str]:
    """CPU -> part number, as /proc/cpuinfo gives it on Arm."""
    text = read_kernel_file(root / "proc/cpuinfo")
    found = re.findall(
        r"^processor\s*:\s*(\d{1,5})$(?:(?!^processor)[\s\S])*?^CPU part\s*:\s*(\w+)", text, re.MULTILINE
    )
    return {int(cpu): part for cpu, part in found}


def _numbered(folder: Path, name: str) -> list[tuple[int, Path]]:
    """What in a folder is called `name` and a number."""
    found = (re.fullmatch(rf"{name}([0-9]{{1,5}})", entry) for entry in _names(folder))
    return [(int(match[1]), folder / match[0]) for match in found if match]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
