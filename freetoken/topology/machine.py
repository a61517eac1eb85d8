"""A machine and what of it this process may use: the choice of CPUs that get a worker, and the share of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from freetoken import settings
from freetoken.errors import ConfigError
from freetoken.topology.ranks import Rank
from freetoken.topology.sysfs import Node, format_cpu_list


@dataclass(frozen=True, repr=False)
class Topology:
    """A machine and the part of it that this process may use. All tuples ascend.

    online, offline: CPUs that the system runs, and those that are there but off.
    cores, packages: the online CPUs of each physical core and of each socket.
    nodes: NUMA nodes, empty where the system has no such thing. mems: ids of nodes this process may allocate on.
    performance, efficiency: CPUs of a hybrid processor; both empty where all cores are of one kind.
    pci_nodes: PCI address -> node, -1 where that is not known.
    allowed: CPUs this process may run on; `rank` has its slice of them. quota: CPU time it gets, in CPUs, or None.
    source: "sysfs"; or "psutil" where the system does not say which CPUs share a core. Then `cores` holds as
        many single CPUs as psutil counts cores, and that each has a core of its own is a guess.
    """

    online: tuple[int, ...]
    offline: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    packages: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, ...]
    mems: tuple[int, ...]
    performance: tuple[int, ...]
    efficiency: tuple[int, ...]
    pci_nodes: Mapping[str, int]
    allowed: tuple[int, ...]
    quota: float | None
    rank: Rank
    source: Literal["sysfs", "psutil"]

    @property
    def compute_nodes(self) -> tuple[int, ...]:
        """Nodes with CPUs that this process may use."""
        return tuple(node.id for node in self.nodes if set(node.cpus) & set(self.allowed))

    @property
    def memory_only_nodes(self) -> tuple[int, ...]:
        """Nodes with memory and without online CPUs: HBM beside DDR, CXL, memory of GPUs."""
        return tuple(node.id for node in self.nodes if node.memory_bytes and not node.cpus)

    @property
    def bank_nodes(self) -> tuple[int, ...]:
        """Where banks go by default: compute nodes with memory that this process may use; else any such memory."""
        usable = [n.id for n in self.nodes if n.id in self.mems and n.memory_bytes != 0]
        return tuple(n for n in usable if n in self.compute_nodes) or tuple(usable)

    def physical_core_cpus(self, node: int | None = None) -> tuple[int, ...]:
        """Return one CPU for each physical core this process may use, of one node or of all: the lowest allowed there.

        Raises ConfigError for a node without such CPUs.
        """
        allowed = set(self.allowed)
        if node is not None:
            allowed &= set(self._check_node(node).cpus)
        return tuple(sorted(min(usable) for core in self.cores if (usable := allowed.intersection(core))))

    def node_of(self, cpu: int) -> int | None:
        """Return the node of a CPU, or None where the system does not say."""
        return next((node.id for node in self.nodes if cpu in node.cpus), None)

    def gpu_numa_node(self, device: Any) -> int | None:
        """Return the node whose memory is nearest to a GPU, or None where that is not known.

        device: a PCI address ("0000:17:00.0"), or properties with pci_domain_id, pci_bus_id and pci_device_id, as
        torch.cuda.get_device_properties gives them. On a machine with one node it is that one.
        """
        address = device if isinstance(device, str) else _pci_address(device)
        node = self.pci_nodes.get(address.lower(), -1)
        if node >= 0 and (not self.nodes or any(n.id == node for n in self.nodes)):
            return node
        return self.nodes[0].id if len(self.nodes) == 1 else None

    def workers(
        self,
        threads: int | Literal["auto"] = "auto",
        *,
        coordinator: bool = False,
        near: int | None = None,
        cores: str | None = None,
    ) -> tuple[int, ...]:
        """Return the CPUs that get a worker, in the order of the workers.

        threads: "auto" is one for each allowed physical core, at most the quota rounded down (one thread too
            many stalls the team at each barrier), at least 1. A number is taken as asked, whatever the quota:
            first one for each physical core, then their other threads.
        coordinator: keep one core free for the thread that feeds a GPU, on node `near` where it has one.
        cores: "performance" or "all" cores of a hybrid processor; None is FREETOKEN_CPU_CORES, "auto" the former.
        Raises ConfigError for a number below 1 or above the allowed CPUs.
        """
        first = self._preferred(cores or settings.CPU_CORES.read())
        if threads == "auto":
            free = self.coordinator_cpu(near) if coordinator and len(first) > 1 else None
            first = tuple(cpu for cpu in first if cpu != free)
            return first if self.quota is None else self._spread(first, max(1, int(self.quota)))
        if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= len(self.allowed):
            expected = f'"auto" or a number from 1 to {len(self.allowed)}, the CPUs this process may use'
            raise ConfigError(
                f"threads={threads!r} is not possible here; give {expected}.",
                name="threads",
                value=threads,
                expected=expected,
            )
        every = dict.fromkeys((*first, *self.physical_core_cpus(), *self.allowed))
        return tuple(every)[:threads]

    def coordinator_cpu(self, near: int | None = None) -> int:
        """Return the CPU of the core to keep free for the thread that feeds a GPU: the last, on node `near` if any."""
        cpus = self._preferred("auto")
        return max((cpu for cpu in cpus if near is not None and self.node_of(cpu) == near), default=cpus[-1])

    def slice_for(self, rank: Rank) -> Topology:
        """Return the same machine with the allowed CPUs that this rank should use.

        Whole nodes where their number divides by the ranks or the other way round, else runs of cores of equal length;
        with more ranks than cores they share.
        """
        if rank.count == 1:
            return replace(self, rank=rank)
        by_node: dict[int | None, list[int]] = {}
        for cpu in self.physical_core_cpus():
            by_node.setdefault(self.node_of(cpu), []).append(cpu)
        groups, n = (
            [by_node[node] for node in sorted(by_node, key=lambda node: -1 if node is None else node)],
            rank.count,
        )
        if len(groups) % n == 0:
            mine = _flat(_part(groups, rank.number, n))
        elif n % len(groups) == 0:
            share = n // len(groups)
            mine = _part(groups[rank.number // share], rank.number % share, share)
        else:
            mine = _part(_flat(groups), rank.number, n)
        siblings = {cpu: core for core in self.cores for cpu in core}
        kept = {cpu for first in mine for cpu in siblings.get(first, (first,))} & set(self.allowed)
        return replace(self, allowed=tuple(sorted(kept)), rank=rank)

    def why(self, threads: int | Literal["auto"] = "auto") -> str:
        """Return one line on the limits behind `workers(threads)`: "2 of 2 physical cores; no quota"."""
        workers = self.workers(threads)
        n_workers, n_allowed = len(workers), len(self.physical_core_cpus())
        reasons = [f"{min(n_workers, n_allowed)} of {len(self.cores)} physical cores"]
        if n_workers > n_allowed:
            reasons.append(f"{n_workers - n_allowed} more on second threads")
        if threads != "auto":
            reasons.append(f"{threads} asked for")
        if self.efficiency and not set(workers) & set(self.efficiency):
            reasons.append("no efficiency cores")
        if self.rank.count > 1:
            reasons.append(f"rank {self.rank.number} of {self.rank.count} on this machine")
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

    def _preferred(self, cores: str) -> tuple[int, ...]:
        """One CPU for each physical core that gets a worker by default, for a setting of FREETOKEN_CPU_CORES."""
        every = self.physical_core_cpus()
        strong = tuple(cpu for cpu in every if cpu in set(self.performance))
        return strong if strong and cores != "all" else every

    def _spread(self, cpus: tuple[int, ...], count: int) -> tuple[int, ...]:
        """At most `count` CPUs, as evenly over nodes as they come: every memory controller should serve."""
        if count >= len(cpus):
            return cpus
        place: dict[int | None, int] = {}
        order = []
        for cpu in cpus:
            node = self.node_of(cpu)
            place[node] = place.get(node, 0) + 1
            order.append((place[node], cpu))
        return tuple(sorted(cpu for _, cpu in sorted(order)[:count]))

    def _check_node(self, number: int) -> Node:
        node = next((node for node in self.nodes if node.id == number), None)
        if node is None or number not in self.compute_nodes:
            what = (
                "does not exist" if node is None else ("has no CPUs" if not node.cpus else "has no CPU that is allowed")
            )
            good = ", ".join(map(str, self.compute_nodes)) or "none: this system names no nodes"
            raise ConfigError(
                f"node {number!r} {what}; nodes that can have workers here: {good}.",
                name="node",
                value=number,
                expected=good,
            )
        return node

    def __repr__(self) -> str:
        return (
            f"Topology(online={format_cpu_list(self.online)}, n_cores={len(self.cores)}, nodes={len(self.nodes)}, "
            f"allowed={format_cpu_list(self.allowed)}, quota={self.quota}, rank={self.rank.number}/{self.rank.count}, "
            f"source={self.source})"
        )


def _part(items: list[Any], number: int, count: int) -> list[Any]:
    """Part `number` of `count` parts of nearly equal length; with fewer items than parts, parts share them."""
    if len(items) < count:
        return [items[number * len(items) // count]]
    return items[number * len(items) // count : (number + 1) * len(items) // count]


def _flat(groups: list[list[int]]) -> list[int]:
    return [cpu for group in groups for cpu in group]


def _pci_address(device: Any) -> str:
    try:
        return f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    except (AttributeError, TypeError, ValueError) as error:
        expected = "a PCI address or torch.cuda.get_device_properties of a device"
        raise ConfigError(
            f"device is {device!r}; give {expected}.", name="device", value=device, expected=expected
        ) from error
