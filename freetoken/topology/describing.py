"""A topology as plain data and as text for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from freetoken.topology.sysfs import Node, format_cpu_list
from freetoken.units import format_bytes

if TYPE_CHECKING:
    from freetoken.topology.machine import Topology


def to_dict(found: Topology) -> dict[str, Any]:
    """Return what the machine has and, from allowed_cpus on, what this process may use of it, ready for JSON."""
    return {
        "online_cpus": list(found.online),
        "offline_cpus": list(found.offline),
        "physical_cores": [min(core) for core in found.cores],
        "smt_siblings": {cpu: list(core) for core in found.cores for cpu in core},
        "packages": [list(cpus) for cpus in found.packages],
        "numa_nodes": {
            node.id: {
                "cpus": list(node.cpus),
                "mem_total_kb": None if node.memory_bytes is None else node.memory_bytes // 1024,
                "distances": dict(node.distances),
            }
            for node in found.nodes
        },
        "nodes_with_memory": [node.id for node in found.nodes if node.memory_bytes],
        "nodes_with_cpus": [node.id for node in found.nodes if node.cpus],
        "performance_cores": list(found.performance),
        "efficiency_cores": list(found.efficiency),
        "pci_numa_nodes": {device.address: device.node for device in found.pci},
        "gpus": {gpu.address: {"name": gpu.gpu, "node": found.gpu_numa_node(gpu.address)} for gpu in found.gpus},
        "allowed_cpus": list(found.allowed),
        "allowed_mems": list(found.mems),
        "bank_nodes": list(found.bank_nodes),
        "workers": list(found.workers()),
        "why": found.why(),
        "not_used": {why: list(cpus) for why, cpus in _find_unused(found).items()},
        "quota": found.quota,
        "rank": found.rank.number,
        "ranks": found.rank.count,
        "load_threads": found.load_threads,
        "source": found.source,
    }


def draw(found: Topology) -> str:
    """Lines for people: each node with its memory and cores, each GPU's node, what is used, and why the rest is not."""
    packages = f" in {len(found.packages)} packages" if len(found.packages) > 1 else ""
    lines = [f"CPUs       {_cpus(found.online)} on {_count(len(found.cores), 'core')}{packages}"]
    if found.efficiency:
        lines.append(f"kinds      performance {_cpus(found.performance)}, efficiency {_cpus(found.efficiency)}")
    if found.offline:
        lines.append(f"offline    {_cpus(found.offline)}")
    lines += [_draw_node(found, node) for node in found.nodes]
    homeless = set(found.online).difference(*(node.cpus for node in found.nodes))
    if not found.nodes:
        lines.append("nodes      not known: taken as one")
    elif homeless:
        lines.append(f"no node    {_cpus(homeless)}")
    for gpu in found.gpus:
        node = found.gpu_numa_node(gpu.address)
        lines.append(f"GPU        {gpu.address} {gpu.gpu}, {'node not known' if node is None else f'node {node}'}")
    if found.rank.count > 1:
        lines.append(f"rank       {found.rank.number} of {found.rank.count}: {_cpus(found.allowed)}")
    lines += [f"not used   {_cpus(cpus)}: {why}" for why, cpus in _find_unused(found).items()]
    workers = found.workers()
    lines.append(f"workers    {len(workers)} on {_cpus(workers)} ({found.why()})")
    return "\n".join(lines)


def _draw_node(found: Topology, node: Node) -> str:
    mine = set(node.cpus)
    facts = [
        "memory not known"
        if node.memory_bytes is None
        else format_bytes(node.memory_bytes)
        if node.memory_bytes
        else "no memory",
        f"{_cpus(mine)} on {_count(sum(bool(mine & set(core)) for core in found.cores), 'core')}"
        if mine
        else "no CPUs",
    ]
    if mine:
        facts.append(_count(len(mine.intersection(found.workers())), "worker"))
    if node.memory_bytes != 0 and node.id not in found.mems:
        facts.append("its memory is not allowed")
    elif node.id in found.bank_nodes:
        facts.append("banks")
    elif node.memory_bytes:
        facts.append("no banks")
    if len(node.distances) > 1:
        facts.append("distances " + " ".join(f"{other}:{far}" for other, far in node.distances))
    return f"{f'node {node.id}':<10} {', '.join(facts)}"


def _find_unused(found: Topology) -> dict[str, tuple[int, ...]]:
    """Online CPUs without a worker, by why they have none."""
    workers, firsts, allowed = set(found.workers()), set(found.physical_core_cpus()), set(found.allowed)
    weak = set(found.efficiency)
    efficiency = set() if workers & weak else allowed & weak
    rest = allowed - workers - efficiency
    reasons = {
        "not allowed": set(found.online) - set(found.mask),
        "other ranks": set(found.mask) - allowed,
        "efficiency cores": efficiency,
        "over the quota": rest & firsts,
        "second threads of cores": rest - firsts,
    }
    return {why: tuple(sorted(cpus)) for why, cpus in reasons.items() if cpus}


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _cpus(cpus: Iterable[int]) -> str:
    return f"CPU {text}" if (text := format_cpu_list(cpus)).isdigit() else f"CPUs {text}"
