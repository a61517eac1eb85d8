"""Builds small fake /sys and /proc trees, so that tests can describe a machine in a few lines."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

CPUS = "/sys/devices/system/cpu"
NODES = "/sys/devices/system/node"


class FakeSystem:
    """A folder that looks like the root of a machine. What is not added is absent."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str, *, append: bool = False) -> None:
        """Write (or append to) a file; `path` is absolute within the fake root."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a" if append else "w") as stream:
            stream.write(text)

    def add_cpus(self, cores: Iterable[Sequence[int]], *, online: str | None = None) -> None:
        """Add CPUs, given as the SMT siblings of each core. All are online unless `online` lists others."""
        cores = [sorted(core) for core in cores]
        for core in cores:
            for cpu in core:
                self.write(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list", ",".join(map(str, core)) + "\n")
        cpus = sorted(cpu for core in cores for cpu in core)
        self.write(f"{CPUS}/online", (online or ",".join(map(str, cpus))) + "\n")

    def add_packages(self, *packages: Iterable[int]) -> None:
        """Say of the CPUs of each package which one they are in."""
        for number, cpus in enumerate(packages):
            for cpu in cpus:
                self.write(f"{CPUS}/cpu{cpu}/topology/physical_package_id", f"{number}\n")

    def add_offline_cpu(self, cpu: int) -> None:
        """Add a CPU that is there and off, as the kernel shows it: without a topology."""
        self.write(f"{CPUS}/cpu{cpu}/online", "0\n")

    def add_node(self, node: int, cpus: str, *, gib: float | None = None, distances: str | None = None) -> None:
        """Add an online NUMA node; `cpus` as the kernel lists them, `distances` in ascending order of the nodes."""
        self.write(f"{NODES}/node{node}/cpulist", cpus + "\n")
        if gib is not None:
            text = f"Node {node} MemTotal:       {int(gib * 2**20)} kB\nNode {node} MemFree:        7 kB\n"
            self.write(f"{NODES}/node{node}/meminfo", "\n" + text)
        if distances is not None:
            self.write(f"{NODES}/node{node}/distance", distances + "\n")

    def add_clocks(self, khz: Mapping[int, int]) -> None:
        """Give CPUs the highest clock they may run at."""
        for cpu, clock in khz.items():
            self.write(f"{CPUS}/cpu{cpu}/cpufreq/cpuinfo_max_freq", f"{clock}\n")

    def add_arm_parts(self, parts: Mapping[int, str]) -> None:
        """Write a /proc/cpuinfo with Arm's part number of each CPU."""
        text = "".join(
            f"processor\t: {cpu}\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\nCPU part\t: {part}\n\n"
            for cpu, part in parts.items()
        )
        self.write("/proc/cpuinfo", text)

    def add_pci(self, address: str, *, node: int | None = -1, kind: str = "0x020000", vendor: str = "0x8086") -> None:
        """Add a PCI device of a class (0x020000 is a network card, 0x030200 a GPU)."""
        folder = f"/sys/bus/pci/devices/{address}"
        self.write(f"{folder}/class", kind + "\n")
        self.write(f"{folder}/vendor", vendor + "\n")
        if node is not None:
            self.write(f"{folder}/numa_node", f"{node}\n")

    def add_status(self, cpus: str, mems: str | None = None) -> None:
        """Give the process a mask of CPUs and of memory nodes."""
        text = f"Name:\tpython\nCpus_allowed:\tffffffff\nCpus_allowed_list:\t{cpus}\n"
        self.write("/proc/self/status", text + ("" if mems is None else f"Mems_allowed_list:\t{mems}\n"))

    def add_cgroup_v2(self, path: str = "/", *, mount: str = "/sys/fs/cgroup", top: str = "/") -> None:
        """Put the process into cgroup `path` of a v2 hierarchy that shows `top` at `mount`."""
        self.write("/proc/self/cgroup", f"0::{path}\n", append=True)
        line = f"30 23 0:26 {top} {mount} rw shared:4 - cgroup2 cgroup2 rw\n"
        self.write("/proc/self/mountinfo", line, append=True)

    def add_cgroup_v1(self, controllers: str, path: str = "/") -> None:
        """Put the process into cgroup `path` of the v1 hierarchy of `controllers` ("cpu,cpuacct")."""
        self.write("/proc/self/cgroup", f"4:{controllers}:{path}\n", append=True)
        line = f"31 23 0:27 / /sys/fs/cgroup/{controllers} rw,nosuid - cgroup cgroup rw,{controllers}\n"
        self.write("/proc/self/mountinfo", line, append=True)

    def add_meminfo(self, available_kib: int) -> None:
        """Add a /proc/meminfo whose MemAvailable is `available_kib`."""
        total = f"MemTotal: {2 * available_kib} kB\nMemFree: 1000 kB\n"
        self.write("/proc/meminfo", f"{total}MemAvailable:   {available_kib} kB\nBuffers: 7 kB\n")


def paired_cores(n_cores: int, *, stride: int | None = None) -> list[tuple[int, int]]:
    """Return cores of two threads each: (0, 1)(2, 3)..., or (n, n + stride)."""
    if stride is None:
        return [(2 * core, 2 * core + 1) for core in range(n_cores)]
    return [(core, core + stride) for core in range(n_cores)]


def single_cores(n_cores: int) -> list[tuple[int]]:
    """Return cores of one thread each."""
    return [(core,) for core in range(n_cores)]
