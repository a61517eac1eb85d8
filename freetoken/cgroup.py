"""Limits that control groups put on this process: CPU time and memory, cgroup v1 and v2.

Owns finding the process's cgroup below its mounts and reading the limit files of it and of every ancestor.
It decides nothing: `topology` turns the quota into workers, `memory.budget` the limit into a budget. All
paths are below an injectable root. A file that is missing, unreadable or nonsense is no limit.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_V2 = ""  # how /proc/self/cgroup spells the controllers of the v2 hierarchy
_KINDS = ("cgroup", "cgroup2")  # file system types of v1 and v2
_TOP = PurePosixPath("/")

# v1 writes "no limit" as the largest whole number of pages below 2^63, which depends on the page size
# (9223372036854771712 with 4 KiB pages). No machine has 4 EiB, so everything from there on is no limit.
_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True)
class MemoryLimit:
    """A memory limit of one cgroup: `limit_bytes`, what of it is used, and the file that says so.

    `used_bytes` leaves out inactive page cache: the kernel reclaims it before it refuses an allocation.
    """

    limit_bytes: int
    used_bytes: int
    where: str

    @property
    def headroom_bytes(self) -> int:
        """What can still be allocated below this limit; never negative."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class _Mount:
    """A cgroup file system: which hierarchies it shows, and which cgroup lies at the mount point."""

    hierarchies: frozenset[str]
    top: PurePosixPath
    point: Path


def cpu_quota(root: str | os.PathLike[str] = "/", *, pid: int | str = "self") -> float | None:
    """Return the CPU quota of process `pid` in CPUs (7.65 is 765 ms each 100 ms), or None for no quota.

    The tightest of the process's cgroup and its ancestors, over v1 and v2. Never raises.
    """
    quotas = (_read_quota(folder) for folder in _folders(root, pid, "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit(root: str | os.PathLike[str] = "/", *, pid: int | str = "self") -> MemoryLimit | None:
    """Return the memory limit with the least headroom over the cgroup of `pid` and its ancestors, or None.

    A parent with a larger limit can leave less, because its other children use some of it. Never raises.
    """
    limits = (_read_memory_limit(folder) for folder in _folders(root, pid, "memory"))
    found = (limit for limit in limits if limit is not None)
    return min(found, key=lambda limit: limit.headroom_bytes, default=None)


def cpuset(root: str | os.PathLike[str] = "/", *, pid: int | str = "self") -> tuple[str, str]:
    """Return the CPUs and memory nodes that the cpuset of process `pid` leaves it, as kernel lists; "" for no limit.

    Of v2, of v1, or of the file system that was before them. Never raises.
    """
    base = Path(root)
    folders = list(_folders(root, pid, "cpuset"))
    group = read_kernel_file(base / "proc" / str(pid) / "cpuset").lstrip("/")
    folders += [base / point / group for point in _find_old_cpusets(base)]
    names = ("{}.effective", "effective_{}", "{}")
    return _first_text(folders, names, "cpus"), _first_text(folders, names, "mems")


def _first_text(folders: list[Path], names: tuple[str, ...], what: str) -> str:
    files = (
        folder / f"{prefix}{name.format(what)}" for folder in folders for name in names for prefix in ("cpuset.", "")
    )
    return next((text for file in files if (text := read_kernel_file(file))), "")


def _find_old_cpusets(base: Path) -> list[str]:
    text = read_kernel_file(base / "proc/self/mounts") or read_kernel_file(base / "proc/mounts")
    fields = (line.split() for line in text.splitlines())
    return [_unescape(f[1]).lstrip("/") for f in fields if len(f) >= 3 and f[2] == "cpuset"]


def pressure_files(root: str | os.PathLike[str] = "/", *, pid: int | str = "self") -> tuple[Path, ...]:
    """Return the files that tell how long tasks waited for memory: the system's, then those of the cgroup of `pid` and
    its ancestors (v2 only). Files that do not exist or hold nothing are left out. Never raises.
    """
    files = (folder / "memory.pressure" for folder in _folders(root, pid, _V2))
    system = Path(root) / "proc/pressure/memory"
    return tuple(file for file in dict.fromkeys((system, *files)) if read_kernel_file(file))


def read_kernel_file(path: Path) -> str:
    """Return the stripped text of a file in /sys or /proc; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):  # ValueError: a NUL in a path that came from a damaged table
        return ""


def parse_kernel_int(text: str) -> int | None:
    """Return `text` as an integer, or None where it is not one that fits in 64 bits ("max", garbage)."""
    try:
        value = int(text)
    except ValueError:
        return None
    return value if abs(value) < 1 << 64 else None


def _read_quota(folder: Path) -> float | None:
    quota, _, period = read_kernel_file(folder / "cpu.max").partition(" ")
    if not quota:
        quota = read_kernel_file(folder / "cpu.cfs_quota_us")
        period = read_kernel_file(folder / "cpu.cfs_period_us")
    quota_us, period_us = parse_kernel_int(quota), parse_kernel_int(period)
    if quota_us is None or period_us is None or quota_us <= 0 or period_us <= 0:
        return None
    return quota_us / period_us


def _read_memory_limit(folder: Path) -> MemoryLimit | None:
    """The tightest limit of one group. Above memory.high nothing is killed, but everything is slowed to a halt."""
    limits = []
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.high", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = parse_kernel_int(read_kernel_file(folder / limit_name))
        if limit is not None and 0 <= limit < _UNLIMITED_BYTES:
            used = parse_kernel_int(read_kernel_file(folder / used_name)) or 0
            used -= _read_reclaimable_bytes(folder)
            limits.append(MemoryLimit(limit, max(0, used), str(folder / limit_name)))
    return min(limits, key=lambda limit: limit.limit_bytes, default=None)


def _read_reclaimable_bytes(folder: Path) -> int:
    """Page cache that goes when memory is wanted: what is inactive, and half of what is active.

    Files that were read twice (a checkpoint, a library) count as active; the kernel's own MemAvailable takes part of
    them as free, too.
    """
    stat = dict(
        line.split(maxsplit=1)
        for line in read_kernel_file(folder / "memory.stat").splitlines()
        if len(line.split()) == 2
    )
    # In v1 the plain name leaves the children out, while usage_in_bytes counts them.

    def cache(kind: str) -> int:
        return max(0, parse_kernel_int(stat.get(f"total_{kind}_file", stat.get(f"{kind}_file", ""))) or 0)

    return cache("inactive") + cache("active") // 2


def _folders(root: str | os.PathLike[str], pid: int | str, controller: str) -> Iterator[Path]:
    """Yield the folders whose files limit `pid`: its own cgroup, then its ancestors up to the mount point.

    Folders may not exist: inside a container the path that /proc shows can be the host's. The mount point is
    always among them.
    """
    base = Path(root)
    paths = _read_memberships(base / "proc" / str(pid) / "cgroup")
    mounts = _find_mounts(base)
    for hierarchy in (controller, _V2):
        path = paths.get(hierarchy, _TOP)
        here = [mount for mount in mounts if hierarchy in mount.hierarchies]
        # A mount may show a part of the tree that this process is not in. It is left out, unless it is all
        # there is (a mount made outside this cgroup namespace).
        holding = [(mount, rel) for mount in here if (rel := _relative(path, mount.top)) is not None]
        for mount, rel in holding or [(mount, PurePosixPath()) for mount in here]:
            yield from (mount.point / part for part in (rel, *rel.parents))


def _relative(path: PurePosixPath, top: PurePosixPath) -> PurePosixPath | None:
    """Return `path` relative to `top`, or None where it is not below it ("/../x": outside this namespace)."""
    if not path.is_relative_to(top):
        return None
    rel = path.relative_to(top)
    return None if ".." in rel.parts else rel


def _read_memberships(path: Path) -> dict[str, PurePosixPath]:
    """Return controller name -> cgroup path from /proc/<pid>/cgroup; the v2 hierarchy has the name ""."""
    found = {}
    for line in read_kernel_file(path).splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                found[controller] = PurePosixPath(fields[2])
    return found


def _find_mounts(base: Path) -> list[_Mount]:
    """Return the cgroup mounts, or the customary ones where /proc names none."""
    return (
        _read_mountinfo(base)
        or _read_mounts(base)
        or [
            _Mount(frozenset(names), _TOP, base / "sys/fs/cgroup" / folder)
            for names, folder in (
                ({_V2}, "."),
                ({_V2}, "unified"),
                ({"cpu"}, "cpu"),
                ({"cpu"}, "cpu,cpuacct"),
                ({"memory"}, "memory"),
                ({"cpuset"}, "cpuset"),
            )
        ]
    )


def _read_mountinfo(base: Path) -> list[_Mount]:
    # proc(5), with any number of optional fields before the dash:
    # 31 23 0:28 /docker/ab /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
    mounts = []
    for line in read_kernel_file(base / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        where, what = left.split(), right.split()
        if len(where) >= 5 and len(what) >= 3 and what[0] in _KINDS:
            mounts.append(_make_mount(base, what[0], where[3], where[4], what[2]))
    return mounts


def _read_mounts(base: Path) -> list[_Mount]:
    text = read_kernel_file(base / "proc/self/mounts") or read_kernel_file(base / "proc/mounts")
    fields = (line.split() for line in text.splitlines())
    return [_make_mount(base, f[2], "/", f[1], f[3]) for f in fields if len(f) >= 4 and f[2] in _KINDS]


def _make_mount(base: Path, kind: str, top: str, point: str, options: str) -> _Mount:
    hierarchies = {_V2} if kind == "cgroup2" else set(options.split(","))
    return _Mount(frozenset(hierarchies), PurePosixPath(_unescape(top)), base / _unescape(point).lstrip("/"))


def _unescape(text: str) -> str:
    """Undo the octal escapes of blanks and backslashes in mount tables."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
