"""What this process may compute on: CPUs and their cores, NUMA nodes, its mask and quota, its share among ranks.

The machine is read once, from an injectable root; everything that counts cores (pool, banks, loader, benchmarks) asks
the `Topology` instead of the system. It starts and pins nothing.

    sysfs       files of /sys and /proc as numbers          ranks        this process among those of this machine
    reading     read(), describe(): one Topology            machine      Topology: which CPUs get a worker
    describing  a Topology as data and as text
"""

from freetoken.topology.machine import Topology
from freetoken.topology.ranks import Rank, find_rank
from freetoken.topology.reading import describe, read
from freetoken.topology.sysfs import Node, PciDevice, format_cpu_list, parse_cpu_list, parse_cpu_mask

__all__ = [
    "Node", "PciDevice", "Rank", "Topology", "describe", "find_rank", "format_cpu_list", "parse_cpu_list",
    "parse_cpu_mask", "read",
]  # fmt: skip
