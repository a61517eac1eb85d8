"""A topology as plain data and as text for people."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from freetoken.topology.machine import Topology
from freetoken.topology.reading import read
from freetoken.topology.sysfs import Node, format_cpu_list
from freetoken.units import format_bytes


def describe(root: str | os.PathLike[str] = "/", allowed: Iterable[int] | None = None) -> dict[str, Any]:
    """Return the topology as plain data ready for JSON: of the machine at `root`, or of the CPUs `allowed` there.

    What this process may use of it stands under allowed_cpus, allowed_mems, bank_nodes and workers.
    """
    found = read(root, affinity=allowed)
    chosen = set(found.online if allowed is None else found.allowed)
    nodes = {n.id: n for n in found.nodes}
    return {
        "online_cpus": list(found.online),
        "offline_cpus": list(found.offline),
        "physical_cores": sorted(min(usable) for core in found.cores if (usable := chosen & set(core))),
        "smt_siblings": {cpu: list(core) for core in found.cores for cpu in core},
        "packages": [list(cpus) for cpus in found.packages],
        "numa_nodes": {
            n.id: {
                "cpus": list(n.cpus),
                "mem_total_kb": None if n.memory_bytes is None else n.memory_bytes // 1024,
                "distances": dict(n.distances),
            }
            for n in nodes.values()
        },
        "nodes_with_memory": [n.id for n in nodes.values() if n.memory_bytes],
        "nodes_with_cpus": [n.id for n in nodes.values() if chosen & set(n.cpus)],
        "performance_cores": list(found.performance),
        "efficiency_cores": list(found.efficiency),
        "pci_numa_nodes": dict(found.pci_nodes),
        "allowed_cpus": list(found.allowed),
        "allowed_mems": list(found.mems),
        "bank_nodes": list(found.bank_nodes),
        "workers": list(found.workers()),
        "why": found.why(),
        "quota": found.quota,
        "rank": found.rank.number,
        "ranks": found.rank.count,
        "source": found.source,
    }


def draw(found: Topology) -> str:
    """Lines for people: each node with its memory and cores, what is used, and why the rest is not."""
    workers = set(found.workers())
    lines = [f"{len(found.online)} CPUs online ({format_cpu_list(found.online)}), {len(found.cores)} cores"]
    if found.packages:
        lines[0] += f", {len(found.packages)} packages"
    if found.offline:
        lines.append(f"offline    {format_cpu_list(found.offline)}")
    for node in found.nodes or (Node(-1, found.online, None, {}),):
        name = f"node {node.id}" if node.id >= 0 else "no nodes"
        memory = "memory not known" if node.memory_bytes is None else format_bytes(node.memory_bytes)
        memory = memory if node.memory_bytes != 0 else "no memory"
        mine = [cpu for cpu in sorted(workers) if cpu in node.cpus]
        cpus = (
            f"CPUs {format_cpu_list(node.cpus)}, workers on {format_cpu_list(mine) or 'none'}"
            if node.cpus
            else "no CPUs"
        )
        notes = []
        if found.nodes and node.memory_bytes != 0 and node.id not in found.mems:
            notes.append("its memory is not allowed")
        elif found.nodes and node.id in found.bank_nodes:
            notes.append("holds banks")
        elif node.id in found.memory_only_nodes:
            notes.append("memory only")
        if node.distances:
            notes.append("distances " + " ".join(f"{other}:{far}" for other, far in node.distances.items()))
        lines.append(f"{name:<11}" + ", ".join([memory, cpus, *notes]))
    siblings = {cpu for core in found.cores for cpu in core} & set(found.allowed) - workers
    unused = {
        "not allowed": set(found.online) - set(found.allowed),
        "efficiency cores": siblings & set(found.efficiency) if found.performance else set(),
    }
    rest = siblings - unused["efficiency cores"]
    firsts = {min(set(core) & set(found.allowed)) for core in found.cores if set(core) & set(found.allowed)}
    unused |= {"over the quota": rest & firsts, "second threads of cores": rest - firsts}
    lines += [f"not used   {format_cpu_list(cpus)} ({why})" for why, cpus in unused.items() if cpus]
    lines.append(f"workers    {len(workers)}: {found.why()}")
    return "\n".join(lines)
