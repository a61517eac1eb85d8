"""Builds small fake /sys and /proc trees, so that tests can describe a machine in a few lines."""

from collections.abc import Iterable, Sequence
from pathlib import Path


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
                topology = f"/sys/devices/system/cpu/cpu{cpu}/topology"
                self.write(f"{topology}/thread_siblings_list", ",".join(map(str, core)) + "\n")
        cpus = sorted(cpu for core in cores for cpu in core)
        self.write("/sys/devices/system/cpu/online", (online or ",".join(map(str, cpus))) + "\n")

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
