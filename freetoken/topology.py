"""What this process may compute on: CPUs, the physical cores they belong to, its mask and its quota.

Owns reading the machine once, from an injectable root, and the choice of the CPUs that get a worker: one for
each allowed physical core, none on a second thread of a core, no more than the quota pays for. It starts and
pins nothing. Everything that counts cores (pool, loader, benchmarks) asks a `Topology` instead of the system.
"""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from freetoken import cgroup
from freetoken.errors import ConfigError

logger = logging.getLogger(__name__)

# Far above any kernel's limit (8192 on x86): a larger number in a list is garbage and must not be expanded.
_MAX_CPUS = 1 << 16


@dataclass(frozen=True, repr=False)
class Topology:
    """The CPUs of a machine and the part of them that this process may use. All tuples ascend.

    online: CPUs that the system runs, whoever may use them.
    cores: one tuple of SMT siblings for each physical core.
    allowed: CPUs this process may run on.
    quota: CPU time it gets, in CPUs, or None for no limit.
    source: "sysfs"; or "psutil" where the system does not say which CPUs share a core. Then `cores` holds as
        many single CPUs as psutil counts cores, and that each has a core of its own is a guess.
    """

    online: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    allowed: tuple[int, ...]
    quota: float | None
    source: Literal["sysfs", "psutil"]

    def physical_core_cpus(self) -> tuple[int, ...]:
        """Return one CPU for each physical core this process may use: the lowest that is allowed there."""
        allowed = set(self.allowed)
        return tuple(sorted(min(usable) for core in self.cores if (usable := allowed.intersection(core))))

    def workers(self, threads: int | Literal["auto"] = "auto") -> tuple[int, ...]:
        """Return the CPUs that get a worker, in the order of the workers.

        threads: "auto" is one for each allowed physical core, at most the quota rounded down (one thread too
            many stalls the team at each barrier), at least 1. A number is taken as asked, whatever the quota:
            first one for each physical core, then their other threads.
        Raises ConfigError for a number below 1 or above the allowed CPUs.
        """
        first = self.physical_core_cpus()
        if threads == "auto":
            return first if self.quota is None else first[: max(1, int(self.quota))]
        if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= len(self.allowed):
            expected = f'"auto" or a number from 1 to {len(self.allowed)}, the CPUs this process may use'
            raise ConfigError(
                f"threads={threads!r} is not possible here; give {expected}.",
                name="threads",
                value=threads,
                expected=expected,
            )
        others = tuple(cpu for cpu in self.allowed if cpu not in set(first))
        return (first + others)[:threads]

    def why(self, threads: int | Literal["auto"] = "auto") -> str:
        """Return one line on the limits behind `workers(threads)`: "2 of 2 physical cores; no quota"."""
        n_workers, n_allowed = len(self.workers(threads)), len(self.physical_core_cpus())
        reasons = [f"{min(n_workers, n_allowed)} of {len(self.cores)} physical cores"]
        if n_workers > n_allowed:
            reasons.append(f"{n_workers - n_allowed} more on second threads")
        if threads != "auto":
            reasons.append(f"{threads} asked for")
        if len(self.allowed) < len(self.online):
            reasons.append(f"the CPU mask allows {n_allowed} (CPUs {format_cpu_list(self.allowed)})")
        if self.quota is None:
            reasons.append("no quota")
        else:
            note = "" if n_workers <= max(1, int(self.quota)) else ", exceeded as asked"
            reasons.append(f"quota of {self.quota:g} CPUs{note}")
        if self.source == "psutil":
            reasons.append("which CPUs share a core is not known")
        return "; ".join(reasons)

    def __repr__(self) -> str:
        return (
            f"Topology(online={format_cpu_list(self.online)}, n_cores={len(self.cores)}, "
            f"allowed={format_cpu_list(self.allowed)}, quota={self.quota}, source={self.source})"
        )


def read(
    root: str | os.PathLike[str] = "/", affinity: Iterable[int] | None = None, pid: int | str = "self"
) -> Topology:
    """Read what process `pid` may compute on. Call it before any pinning: "self" means the calling thread.

    root: folder that holds sys/ and proc/.
    affinity: CPUs to take as the mask instead of asking the system; those that are not online are left out.
    Where the system is silent the answer is coarser (`source`), never an exception. Raises ConfigError for an
    injected `affinity` without any online CPU, and only then.
    """
    folder = Path(root) / "sys/devices/system/cpu"
    online = _read_online(folder)
    allowed = _read_mask(pid, online) if affinity is None else _check_mask(affinity, online)
    siblings = {cpu: _read_siblings(folder / f"cpu{cpu}" / "topology") for cpu in sorted(online | allowed)}
    known = any(siblings.values())
    topology = Topology(
        online=tuple(sorted(online or allowed)),
        cores=_group_cores(siblings) if known else _guess_cores(allowed),
        allowed=tuple(sorted(allowed)),
        quota=cgroup.cpu_quota(root, pid=pid),
        source="sysfs" if known else "psutil",
    )
    logger.debug("%r", topology)
    return topology


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


def _read_online(folder: Path) -> frozenset[int]:
    """Return the online CPUs; from the cpuN folders where the list is missing (kernels without hot-plug)."""
    try:
        online = parse_cpu_list(cgroup.read_kernel_file(folder / "online"))
    except ValueError:
        online = frozenset()
    if online:
        return online
    return frozenset(
        int(path.name.removeprefix("cpu"))
        for path in folder.glob("cpu[0-9]*")
        if re.fullmatch(r"cpu\d{1,4}", path.name) and cgroup.read_kernel_file(path / "online") != "0"
    )


def _read_mask(pid: int | str, online: frozenset[int]) -> frozenset[int]:
    # The kernel leaves offline CPUs out of this mask by itself, so it is not cut to `online`: container file
    # systems (lxcfs) renumber that list, while pinning always goes by the numbers of the mask.
    try:
        return frozenset(os.sched_getaffinity(0 if pid == "self" else int(pid)))
    except (AttributeError, OSError):  # not Linux, or no such process
        return online or frozenset(range(os.cpu_count() or 1))


def _check_mask(affinity: Iterable[int], online: frozenset[int]) -> frozenset[int]:
    asked = frozenset(affinity)
    allowed = asked & online if online else asked
    if not allowed:
        expected = f"at least one online CPU ({format_cpu_list(online) or 'the system names none'})"
        raise ConfigError(
            f"affinity={format_cpu_list(asked)!r} leaves no CPU to run on; give {expected}.",
            name="affinity",
            value=tuple(sorted(asked)),
            expected=expected,
        )
    return allowed


def _read_siblings(folder: Path) -> frozenset[int]:
    """Return the CPUs of one core from a cpuN/topology folder; empty where it does not say.

    Core ids are not used: they repeat between clusters and packages.
    """
    for name, parse in (
        ("thread_siblings_list", parse_cpu_list),
        ("core_cpus_list", parse_cpu_list),
        ("thread_siblings", parse_cpu_mask),
        ("core_cpus", parse_cpu_mask),
    ):
        try:
            cpus = parse(cgroup.read_kernel_file(folder / name))
        except ValueError:
            continue
        if cpus:
            return cpus
    return frozenset()


def _group_cores(siblings: Mapping[int, frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    """Return disjoint cores that cover every CPU, also where lists are missing or contradict each other."""
    cores: list[tuple[int, ...]] = []
    free = set(siblings)
    for cpu, mates in sorted(siblings.items()):
        if cpu in free:
            core = free & (mates | {cpu})
            free -= core
            cores.append(tuple(sorted(core)))
    return tuple(cores)


def _guess_cores(allowed: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Return as many single CPUs as psutil counts physical cores, the lowest ones of those allowed."""
    try:
        n_cores = psutil.cpu_count(logical=False)
    except OSError:
        n_cores = None
    return tuple((cpu,) for cpu in sorted(allowed)[: max(1, n_cores or len(allowed))])
