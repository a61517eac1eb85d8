"""What this process may compute on: CPUs and their cores, NUMA nodes, its mask and quota, its share among ranks.

The machine is read once, from an injectable root; everything that counts cores (pool, banks, loader, benchmarks) asks
the `Topology` instead of the system. It starts and pins nothing.

    sysfs       files of /sys and /proc as numbers          ranks        this process among those of this machine
    reading     read(): all of it as one Topology           machine      Topology: which CPUs get a worker
    describing  describe(), draw(): as data and as text
"""

from freetoken.topology.describing import describe, draw
from freetoken.topology.machine import Topology
from freetoken.topology.ranks import Rank, find_rank
from freetoken.topology.reading import read
from freetoken.topology.sysfs import Node, format_cpu_list, parse_cpu_list, parse_cpu_mask

__all__ = [
    "Node", "Rank", "Topology", "describe", "draw", "find_rank", "format_cpu_list", "parse_cpu_list", "parse_cpu_mask",
    "read",
]  # fmt: skip
