"""Which of the processes that share this machine this is, from what launchers say."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from freetoken.cgroup import parse_kernel_int, read_kernel_file

_RANK_NAMES = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun and what is built on it
    ("LOCAL_RANK", "LOCAL_SIZE"),  # DeepSpeed's launcher
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
_SLURM = ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")
"""Of the step, not of the job: a batch script that starts one process has the job's numbers, too."""


@dataclass(frozen=True)
class Rank:
    """Which of the processes that share this machine this is: `number` of `count`.

    pinned: its launcher gave it a mask of its own, so its cores are no other rank's already; a quota they still share.
    """

    number: int = 0
    count: int = 1
    pinned: bool = False


def find_rank(environ: Mapping[str, str] | None = None) -> Rank:
    """Return this process's rank among those of this machine, from what torchrun, DeepSpeed, MPI or Slurm set.

    environ: variables to look at instead of the process's own.
    It is `pinned` where this process's mask is narrower than its launcher's. What is set to nonsense counts as not set.
    """
    variables = os.environ if environ is None else environ
    counts = [(number_name, variables.get(count_name, "")) for number_name, count_name in _RANK_NAMES]
    local, tasks, node = _SLURM
    counts.append((local, _slurm_count(variables.get(tasks, ""), variables.get(node, ""))))
    for name, text in counts:
        number, count = parse_kernel_int(variables.get(name, "")), parse_kernel_int(text)
        if number is not None and count is not None and 0 <= number < count:
            return Rank(number, count, pinned=environ is None and _is_pinned_by_launcher(name))
    return Rank()


def _slurm_count(counts: str, node: str) -> str:
    """The tasks on a node, of "4(x2),3": four on each of the first two nodes, three on the next."""
    place = parse_kernel_int(node) or 0
    for part in counts.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part)
        if match is None:
            break
        place -= int(match[2] or 1)
        if place < 0:
            return match[1]
    return ""


def _is_pinned_by_launcher(variable: str) -> bool:
    """Whether this process's mask is narrower than that of the nearest ancestor to which `variable` was not given.

    Between the two there may be shells and wrappers, which have the rank's variables and mask.
    """
    try:
        pid = os.getppid()
        while f"\0{variable}=" in "\0" + read_kernel_file(Path(f"/proc/{pid}/environ")):
            pid = int(re.findall(r"^PPid:\s*(\d+)", read_kernel_file(Path(f"/proc/{pid}/status")), re.MULTILINE)[0])
        return os.sched_getaffinity(0) < os.sched_getaffinity(pid)
    except (AttributeError, IndexError, OSError):
        return False
