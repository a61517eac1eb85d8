"""Which of the processes that share this machine this is, from what launchers say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from freetoken.cgroup import parse_kernel_int

_RANK_NAMES = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


@dataclass(frozen=True)
class Rank:
    """Which of the processes that share this machine's cores this is: `number` of `count`."""

    number: int = 0
    count: int = 1


def find_rank(environ: Mapping[str, str] | None = None) -> Rank:
    """Return this process's rank among those of this machine, from what torchrun, Open MPI, MPICH or Slurm set.

    A launcher that has given each rank a mask of its own has sliced the machine already: where this process's mask is
    narrower than its parent's, it is rank 0 of 1. What is set to nonsense counts as not set.
    """
    variables = os.environ if environ is None else environ
    for number_name, count_name in _RANK_NAMES:
        number, count = (parse_kernel_int(variables.get(name, "")) for name in (number_name, count_name))
        if number is not None and count is not None and 0 <= number < count:
            return Rank() if environ is None and _is_pinned_by_launcher() else Rank(number, count)
    return Rank()


def _is_pinned_by_launcher() -> bool:
    try:
        return os.sched_getaffinity(0) < os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):
        return False
