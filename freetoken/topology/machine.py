"""A machine and what of it this process may use: the choice of CPUs that get a worker, and the share of a rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from freetoken import settings
from freetoken.errors import ConfigError
from freetoken.topology import describing
from freetoken.topology.ranks import Rank
from freetoken.topology.sysfs import Node, PciDevice, format_cpu_list

_PCI_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_SELF, _ELSEWHERE = 10, 1 << 16
"""Distances where the system gives none: ACPI's of a node to itself, and more than any it can give."""


@dataclass(frozen=True, repr=False)
class Topology:
    """A machine and the part of it that this process may use. All tuples ascend. print() draws it for people.

    online, offline: CPUs that the system runs, and those that are there but off.
    cores, packages: the online CPUs of each physical core and of each socket.
    nodes: NUMA nodes, empty where the system has no such thing. mems: ids of nodes this process may allocate on.
    performance, efficiency: CPUs of a hybrid processor; both empty where all cores are of one kind.
    pci: PCI devices with their nodes, GPUs among them.
    mask: CPUs the system lets this process run on. allowed: those of them that `rank` should use, all with one rank.
    quota: CPU time its control group gets, in CPUs, or None; the ranks share it.
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
    pci: tuple[PciDevice, ...]
    mask: tuple[int, ...]
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

    @property
    def gpus(self) -> tuple[PciDevice, ...]:
        """GPUs and accelerators on the PCI bus."""
        return tuple(device for device in self.pci if device.gpu)

    @property
    def load_threads(self) -> int:
        """How many threads of one rank can load at once, all ranks loading: its part of the mask's cores and quota."""
        cores = len(self._lowest_of_cores(self.mask)) // (1 if self.rank.pinned else self.rank.count)
        quota = self._quota_share()
        return max(1, cores if quota is None else min(cores, quota))

    def physical_core_cpus(self, node: int | None = None) -> tuple[int, ...]:
        """Return one CPU for each physical core this process may use, of one node or of all: the lowest allowed there.

        Raises ConfigError for a node without such CPUs.
        """
        cpus = self._lowest_of_cores(self.allowed)
        if node is None:
            return cpus
        mine = set(self._find_node(node).cpus)
        return self._lowest_of_cores(tuple(cpu for cpu in self.allowed if cpu in mine))

    def node_of(self, cpu: int) -> int | None:
        """Return the node of a CPU, or None where the system does not say."""
        return self._nodes_by_cpu().get(cpu)

    def gpu_numa_node(self, device: Any) -> int | None:
        """Return the node whose memory is nearest to a GPU, or None where that is not known.

        device: a PCI address ("0000:17:00.0"), or properties with pci_domain_id, pci_bus_id and pci_device_id, as
        torch.cuda.get_device_properties gives them. On a machine with one node it is that one, also where the system
        says -1. Raises ConfigError for anything else.
        """
        address = _pci_address(device)
        node = next((found.node for found in self.pci if found.address == address), -1)
        if any(n.id == node for n in self.nodes):
            return node
        return self.nodes[0].id if len(self.nodes) == 1 else None

    def workers(
        self,
        threads: int | Literal["auto"] = "auto",
        *,
        coordinator: bool = False,
        near: int | None = None,
        cores: Literal["performance", "all"] | None = None,
    ) -> tuple[int, ...]:
        """Return the CPUs that get a worker, in the order of the workers.

        threads: "auto" is one for each allowed physical core, at most this rank's share of the quota rounded down
            (one thread too many stalls the team at each barrier), at least 1. A number is taken as asked, whatever
            the quota: first one for each physical core, spread evenly over nodes, then their other threads.
        coordinator: keep one core free for the thread that feeds a GPU, as `coordinator_cpu(near)` names it, and one
            CPU of the quota. With "auto" on a single core they share it.
        cores: "performance" or "all" cores of a hybrid processor; None is FREETOKEN_CPU_CORES, "auto" the former.
        Raises ConfigError for a number below 1 or above the allowed CPUs, or another word.
        """
        first = every = self._preferred(cores)
        if coordinator and len(every) > 1:
            kept = self.coordinator_cpu(near, cores)
            first = tuple(cpu for cpu in every if cpu != kept)
        if threads == "auto":
            quota = self._quota_share()
            return first if quota is None else self._spread(first, max(1, quota - coordinator))
        if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= len(self.allowed):
            expected = f'"auto" or a number from 1 to {len(self.allowed)}, the CPUs this process may use'
            raise ConfigError(
                f"threads={threads!r} is not possible here; give {expected}.",
                name="threads",
                value=threads,
                expected=expected,
            )
        if threads <= len(first):
            return self._spread(first, threads)
        return tuple(dict.fromkeys((*first, *every, *self.physical_core_cpus(), *self.allowed)))[:threads]

    def coordinator_cpu(self, near: int | None = None, cores: Literal["performance", "all"] | None = None) -> int:
        """Return the CPU to keep free for the thread that feeds a GPU: the last core, of those nearest to node `near`.

        A GPU's own node need not have any: then it is one of the node that is the least far from there.
        """
        homes = self._nodes_by_cpu()
        return min(self._preferred(cores), key=lambda cpu: (self._distance(near, homes.get(cpu)), -cpu))

    def slice_for(self, rank: Rank) -> Topology:
        """Return the same machine with the CPUs of `mask` that this rank should use.

        A pinned rank has its own mask, and gets all of it. Else the slices cover the mask and do not meet: whole nodes
        where the number of nodes divides by that of ranks, or equal parts of one node the other way round; but where
        this gives a rank less than half of another's cores, and for other numbers, runs of cores of equal length. Each
        gets its share of the performance cores of a hybrid processor. Only with more ranks than cores, ranks share one.
        """
        if rank.count == 1 or rank.pinned:
            return replace(self, allowed=self.mask, rank=rank)
        nodes: dict[int | None, list[int]] = {}
        homes = self._nodes_by_cpu()
        for cpu in self._lowest_of_cores(self.mask):
            nodes.setdefault(homes.get(cpu), []).append(cpu)
        groups = [nodes[node] for node in sorted(nodes, key=lambda node: -1 if node is None else node)]
        slices = self._slice_by_node(groups, rank.count)
        if not slices or min(map(len, slices)) * 2 < max(map(len, slices)):
            slices = self._slice_cores(_flat(groups), rank.count)
        siblings = {cpu: core for core in self.cores for cpu in core}
        kept = {cpu for first in slices[rank.number] for cpu in siblings.get(first, (first,))} & set(self.mask)
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
        if len(self.mask) < len(self.online):
            n_masked = len(self._lowest_of_cores(self.mask))
            reasons.append(f"the CPU mask allows {n_masked} (CPUs {format_cpu_list(self.mask)})")
        quota = self._quota_share()
        if quota is None:
            reasons.append("no quota")
        else:
            note = f" for {self.rank.count} ranks" if self.rank.count > 1 else ""
            note += "" if n_workers <= quota else ", exceeded as asked"
            reasons.append(f"quota of {self.quota:g} CPUs{note}")
        if self.source == "psutil":
            reasons.append("which CPUs share a core is not known")
        return "; ".join(reasons)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return describing.to_dict(self)

    def _nodes_by_cpu(self) -> dict[int, int]:
        return {cpu: node.id for node in self.nodes for cpu in node.cpus}

    def _lowest_of_cores(self, cpus: tuple[int, ...]) -> tuple[int, ...]:
        """The lowest of these CPUs on each physical core."""
        these = set(cpus)
        return tuple(sorted(min(mine) for core in self.cores if (mine := these.intersection(core))))

    def _preferred(self, cores: str | None) -> tuple[int, ...]:
        """One CPU for each physical core that gets a worker by default."""
        word = settings.CPU_CORES.read() if cores is None else settings.CPU_CORES.check(cores, "cores")
        every, strong = self.physical_core_cpus(), set(self.performance)
        return every if word == "all" else tuple(cpu for cpu in every if cpu in strong) or every

    def _quota_share(self) -> int | None:
        """The threads that this rank's share of the quota can run, at least 1."""
        return None if self.quota is None else max(1, int(self.quota / self.rank.count))

    def _distance(self, node: int | None, other: int | None) -> int:
        if node is None or node == other:
            return _SELF
        distances = next((n.distances for n in self.nodes if n.id == node), ())
        return next((far for number, far in distances if number == other), _ELSEWHERE)

    def _slice_by_node(self, groups: list[list[int]], count: int) -> list[list[int]]:
        """Cores of each of `count` ranks, in whole nodes or equal parts of one; [] where that does not go."""
        if len(groups) % count == 0:
            return [_flat(_part(groups, number, count)) for number in range(count)]
        share, rest = divmod(count, len(groups))
        if rest or min(map(len, groups)) < share:
            return []
        return [part for group in groups for part in self._slice_cores(group, share)]

    def _slice_cores(self, cores: list[int], count: int) -> list[list[int]]:
        """Runs of these cores of equal length for each of `count` ranks, in each kind of core where that goes."""
        strong = [cpu for cpu in cores if cpu in set(self.performance)]
        weak = [cpu for cpu in cores if cpu not in set(strong)]
        if len(strong) >= count:
            return [_part(strong, number, count) + _part(weak, number, count) for number in range(count)]
        return [_part(cores, number, count) or [cores[number * len(cores) // count]] for number in range(count)]

    def _spread(self, cpus: tuple[int, ...], count: int) -> tuple[int, ...]:
        """At most `count` CPUs, as evenly over nodes as they come: every memory controller should serve."""
        if count >= len(cpus):
            return cpus
        place: dict[int | None, int] = {}
        order, homes = [], self._nodes_by_cpu()
        for cpu in cpus:
            node = homes.get(cpu)
            place[node] = place.get(node, 0) + 1
            order.append((place[node], cpu))
        return tuple(sorted(cpu for _, cpu in sorted(order)[:count]))

    def _find_node(self, number: int) -> Node:
        """The node, if this process may use CPUs of it."""
        for node in self.nodes:
            if node.id == number and number in self.compute_nodes:
                return node
        found = next((node for node in self.nodes if node.id == number), None)
        problem = (
            "does not exist"
            if found is None
            else f"has only CPUs this process may not use ({format_cpu_list(found.cpus)})"
            if found.cpus
            else "has memory but no CPUs"
            if found.memory_bytes
            else "has no CPUs"
        )
        good = ", ".join(map(str, self.compute_nodes))
        expected = f"one of nodes {good}" if good else "no node: this system names none"
        raise ConfigError(
            f"node {number!r} {problem}: no worker can run there; give {expected}.",
            name="node",
            value=number,
            expected=expected,
        )

    def __str__(self) -> str:
        return describing.draw(self)

    def __repr__(self) -> str:
        return (
            f"Topology(online={format_cpu_list(self.online)}, n_cores={len(self.cores)}, nodes={len(self.nodes)}, "
            f"allowed={format_cpu_list(self.allowed)}, quota={self.quota}, rank={self.rank.number}/{self.rank.count}, "
            f"source={self.source})"
        )


def _part(items: list[Any], number: int, count: int) -> list[Any]:
    """Part `number` of `count` parts of nearly equal length."""
    return items[number * len(items) // count : (number + 1) * len(items) // count]


def _flat(groups: list[list[int]]) -> list[int]:
    return [cpu for group in groups for cpu in group]


def _pci_address(device: Any) -> str:
    """The address as /sys spells it. NVIDIA's tools write the domain with eight digits."""
    try:
        text = (
            device
            if isinstance(device, str)
            else f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
        )
    except (AttributeError, TypeError, ValueError):
        text = ""
    match = _PCI_ADDRESS.fullmatch(text.lower())
    if match:
        domain, bus, slot, function = match.groups()
        return f"{int(domain, 16):04x}:{bus}:{slot}.{function}"
    expected = "a PCI address (0000:17:00.0) or torch.cuda.get_device_properties of a device"
    raise ConfigError(f"device is {device!r}; give {expected}.", name="device", value=device, expected=expected)
