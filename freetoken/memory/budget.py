"""How much host memory this process may still allocate, checked before the first byte of a bank.

Owns the answer to "does it fit": the least of what the system has available and what each cgroup leaves. It
allocates nothing and places no pages. Loaders call `require` with what the headers of the files say.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from freetoken import cgroup
from freetoken.errors import CapacityError
from freetoken.units import format_bytes


@dataclass(frozen=True)
class Budget:
    """`available_bytes` of host memory and what sets it: "MemAvailable", "psutil" or a limit file."""

    available_bytes: int
    where: str


def available(root: str | os.PathLike[str] = "/") -> Budget:
    """Return what can be allocated without swapping or being killed: the tightest of system and cgroups."""
    system = _read_system(Path(root))
    limit = cgroup.memory_limit(root)
    if limit is not None and limit.headroom_bytes < system.available_bytes:
        return Budget(limit.headroom_bytes, limit.where)
    return system


def require(needed_bytes: int, *, what: str, root: str | os.PathLike[str] = "/") -> Budget:
    """Return the budget if `needed_bytes` fit into it, raise CapacityError if not.

    Call it before allocating anything. `what` opens the message as its subject: "loading 48 banks".
    """
    budget = available(root)
    if needed_bytes <= budget.available_bytes:
        return budget
    is_system = budget.where in ("MemAvailable", "psutil")
    step = "Free memory on this machine" if is_system else "Raise this limit of the container or job"
    raise CapacityError(
        f"{what} needs {format_bytes(needed_bytes)} of host memory, but only "
        f"{format_bytes(budget.available_bytes)} can be had according to {budget.where}. "
        f"{step}, or choose a smaller model or weight format.",
        needed=needed_bytes,
        available=budget.available_bytes,
        where=budget.where,
    )


def _read_system(base: Path) -> Budget:
    for line in cgroup.read_kernel_file(base / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            kib = cgroup.parse_kernel_int(line.removeprefix("MemAvailable:").removesuffix("kB"))
            if kib is not None and kib >= 0:
                return Budget(kib * 1024, "MemAvailable")
    return Budget(psutil.virtual_memory().available, "psutil")
