"""Reads a machine into a `Topology`, from an injectable root."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from freetoken import cgroup
from freetoken.errors import ConfigError
from freetoken.topology import sysfs
from freetoken.topology.machine import Topology
from freetoken.topology.ranks import Rank, find_rank
from freetoken.topology.sysfs import Node, format_cpu_list, parse_cpu_list, read_siblings

logger = logging.getLogger(__name__)


def read(
    root: str | os.PathLike[str] = "/",
    affinity: Iterable[int] | None = None,
    pid: int | str = "self",
    rank: Rank | None = None,
) -> Topology:
    """Read what process `pid` may compute on. Call it before any pinning: "self" means the calling thread.

    root: folder that holds sys/ and proc/.
    affinity: CPUs to take as the mask instead of asking the system; those that are not online are left out.
    rank: this process among those that share the allowed CPUs; None asks `find_rank` on the real machine.
    Where the system is silent the answer is coarser (`source`, no nodes), never an exception. Raises ConfigError for
    an injected `affinity` without any online CPU, or a rank that is not below its count.
    """
    base = Path(root)
    real = base == Path("/")
    online = sysfs.read_online(base)
    allowed = _read_mask(base, pid, online) if affinity is None else _check_mask(affinity, online)
    everyone = frozenset(online | allowed)
    siblings = {cpu: sysfs.read_siblings(base, cpu) for cpu in everyone}
    known = any(siblings.values())
    nodes = sysfs.read_nodes(base, everyone)
    performance, efficiency = sysfs.read_kinds(base, everyone)
    topology = Topology(
        online=tuple(sorted(everyone)),
        offline=tuple(sorted(sysfs.read_present(base) - everyone)),
        cores=sysfs.group_cores(siblings) if known else _guess_cores(allowed),
        packages=_group_packages(base, everyone),
        nodes=nodes,
        mems=_read_mems(base, pid, nodes),
        performance=tuple(sorted(performance)),
        efficiency=tuple(sorted(efficiency)),
        pci=sysfs.read_pci(base),
        mask=tuple(sorted(allowed)),
        allowed=tuple(sorted(allowed)),
        quota=cgroup.cpu_quota(root, pid=pid),
        rank=Rank(),
        source="sysfs" if known else "psutil",
    )
    if rank is None:
        rank = find_rank() if real and pid == "self" else Rank()
    topology = topology.slice_for(_check_rank(rank))
    logger.debug("%r", topology)
    return topology


def describe(root: str | os.PathLike[str] = "/", allowed: Iterable[int] | None = None) -> dict[str, Any]:
    """Return `Topology.to_dict` of the machine at `root`; with `allowed`, cores and compute nodes are those of them."""
    found = read(root, affinity=allowed)
    facts = found.to_dict()
    if allowed is not None:
        facts["physical_cores"] = list(found.physical_core_cpus())
        facts["nodes_with_cpus"] = list(found.compute_nodes)
    return facts


def _check_rank(rank: Rank) -> Rank:
    if not 0 <= rank.number < rank.count:
        expected = "a number from 0 to its count - 1"
        raise ConfigError(f"{rank} is not possible; give {expected}.", name="rank", value=rank, expected=expected)
    return rank


def _read_mask(base: Path, pid: int | str, online: frozenset[int]) -> frozenset[int]:
    # The kernel leaves offline CPUs out of this mask by itself, so it is not cut to `online`: container file
    # systems (lxcfs) renumber that list, while pinning always goes by the numbers of the mask.
    if base == Path("/"):
        try:
            return frozenset(os.sched_getaffinity(0 if pid == "self" else int(pid)))
        except (AttributeError, OSError):  # not Linux, or no such process
            return online or frozenset(range(os.cpu_count() or 1))
    # A dump's list may name CPUs that are off or were never there, which the calls above leave out.
    listed = _parse_or_none(_read_status(base, pid, "Cpus_allowed_list"))
    running = frozenset(cpu for cpu in listed if cpu in online or read_siblings(base, cpu))
    if running:
        return running
    limited = _parse_or_none(cgroup.cpuset(base, pid=pid)[0]) & online
    return limited or online or frozenset(range(os.cpu_count() or 1))


def _read_mems(base: Path, pid: int | str, nodes: tuple[Node, ...]) -> tuple[int, ...]:
    ids = frozenset(node.id for node in nodes)
    text = _read_status(base, pid, "Mems_allowed_list") or cgroup.cpuset(base, pid=pid)[1]
    return tuple(sorted(ids & _parse_or_none(text) or ids))


def _read_status(base: Path, pid: int | str, field: str) -> str:
    lines = cgroup.read_kernel_file(base / "proc" / str(pid) / "status").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")


def _parse_or_none(text: str) -> frozenset[int]:
    try:
        return parse_cpu_list(text)
    except ValueError:
        return frozenset()


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


def _group_packages(base: Path, online: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """CPUs by socket; empty where that is not said of every CPU."""
    packages: dict[int, list[int]] = {}
    for cpu in sorted(online):
        number = sysfs.read_package(base, cpu)
        if number is None:
            return ()
        packages.setdefault(number, []).append(cpu)
    return tuple(sorted(tuple(cpus) for cpus in packages.values()))


def _guess_cores(allowed: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Return as many single CPUs as psutil counts physical cores, the lowest ones of those allowed."""
    import psutil  # only where /sys is silent: a topology can be read without it

    try:
        n_cores = psutil.cpu_count(logical=False)
    except (OSError, RuntimeError):  # RuntimeError: psutil where it does not know the system
        n_cores = None
    return tuple((cpu,) for cpu in sorted(allowed)[: max(1, n_cores or len(allowed))])
