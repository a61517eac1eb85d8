"""How much host memory this process may still allocate or lock, checked before the first byte of a bank.

Owns the answer to "does it fit": a `Need` against everything that limits it, which is what the system has available,
what each cgroup leaves, and the process's own limits. It allocates nothing and places no pages. Loaders call `choose`
or `require` with what the headers of the files say.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import psutil

from freetoken import cgroup
from freetoken.errors import CapacityError
from freetoken.units import format_bytes

Variant = TypeVar("Variant")
Kind = Literal["memory", "address", "data", "locked"]

_CAP_IPC_LOCK = 14
"""The capability, as a bit of CapEff, with which RLIMIT_MEMLOCK does not count (capabilities(7))."""

_STEPS = {
    "memory": "Raise this limit of the container or job, or choose a smaller model or weight format.",
    "address": "Raise it (ulimit -v), or choose a smaller model or weight format.",
    "data": "Raise it (ulimit -d), or choose a smaller model or weight format.",
    "locked": "Raise it (ulimit -l, LimitMEMLOCK= of a systemd unit, --ulimit memlock=-1 of a container), or set "
    "FREETOKEN_MLOCK=off.",
}
_MAPPINGS = {"address": 2, "data": 1}
"""How often a file is mapped while torch reads from it: once by safetensors, once by torch, privately."""

_THREADS = {"address": 72 << 20, "data": 8 << 20}
"""What glibc takes for a thread on 64 bits: a stack of 8 MiB, and a heap of 64 MiB hardly any of which is in use."""

_OF = {"memory": "host memory", "address": "address space", "data": "private memory", "locked": "locked memory"}


@dataclass(frozen=True)
class Budget:
    """`available_bytes` and what sets them: "MemAvailable", "psutil", a limit file or "RLIMIT_...".

    kind: what counts against it. "memory" is pages in use; "address" is all that is mapped, used or not; "data" is
    what of that is private and may be written; "locked" is what may not be swapped out.
    """

    available_bytes: int
    where: str
    kind: Kind = "memory"


@dataclass(frozen=True)
class Need:
    """Bytes that a load takes.

    banks, dense: stay as long as the model. reserved: of the banks, what lies on explicit huge pages, which the system
    has set aside already and does not count as available. transient: at most so much beside them while loading. pinned:
    of these, how many are locked. mapped: of files, while the dense part is read from them, before there are banks.
    threads: how many run meanwhile. spare: what has to stay free.
    """

    banks: int = 0
    reserved: int = 0
    dense: int = 0
    transient: int = 0
    pinned: int = 0
    mapped: int = 0
    threads: int = 0
    spare: int = 0

    def of(self, budget: Budget) -> int:
        """Bytes that count against a budget, without the spare ones."""
        if budget.kind == "locked":
            return self.pinned
        while_dense = self.mapped * _MAPPINGS.get(budget.kind, 0)
        threads = self.threads * _THREADS.get(budget.kind, 0)
        banks = self.banks - self.reserved if budget.kind == "memory" else self.banks
        return self.dense + max(while_dense, banks + self.transient) + threads

    def left(self, budget: Budget) -> int:
        """What a budget has beyond this; negative where it does not suffice."""
        return budget.available_bytes - self.of(budget) - (self.spare if budget.kind == "memory" else 0)

    def __str__(self) -> str:
        parts = {"banks": self.banks - self.reserved, "dense part": self.dense, "while loading": self.transient}
        return ", ".join(f"{name} {format_bytes(n)}" for name, n in parts.items() if n)


def resident(root: str | os.PathLike[str] = "/") -> Budget:
    """Return what pages can be had without swapping or being killed: the tightest of system and cgroups."""
    system = _read_system(Path(root))
    limit = cgroup.memory_limit(root)
    if limit is not None and limit.headroom_bytes < system.available_bytes:
        return Budget(limit.headroom_bytes, limit.where)
    return system


def available(root: str | os.PathLike[str] = "/") -> Budget:
    """Return what can be allocated: the tightest of `resident` and the process's own limits."""
    own = (limit for limit in _own_limits(Path(root)) if limit.kind != "locked")
    return min((resident(root), *own), key=lambda budget: budget.available_bytes)


def choose(variants: Mapping[Variant, Need], *, what: str, root: str | os.PathLike[str] = "/") -> Variant:
    """Return the first of several ways of doing something, best first, that fits; raise CapacityError if none does.

    Call it before allocating anything. The error is about the last one. `what` opens the message as its subject:
    "loading 48 banks".
    """
    budgets = (available(root), *_own_limits(Path(root)))
    for variant, need in variants.items():
        tightest = min(budgets, key=need.left)
        if need.left(tightest) >= 0:
            return variant
    raise _refusal(need, tightest, what)


def require(need: Need, *, what: str, root: str | os.PathLike[str] = "/") -> Budget:
    """Return what is available if `need` fits into it, raise CapacityError if not. Otherwise as `choose`."""
    choose({None: need}, what=what, root=root)
    return available(root)


def _refusal(need: Need, budget: Budget, what: str) -> CapacityError:
    needed, kind = need.of(budget), budget.kind
    is_system = budget.where in ("MemAvailable", "psutil")
    step = "Free memory on this machine, or choose a smaller model or weight format." if is_system else _STEPS[kind]
    parts = f" ({need})" if kind == "memory" else ""
    spare = f", of which {format_bytes(need.spare)} must stay free" if need.spare and kind == "memory" else ""
    return CapacityError(
        f"{what} needs {format_bytes(needed)} of {_OF[kind]}{parts}, but only "
        f"{format_bytes(budget.available_bytes)} can be had according to {budget.where}{spare}. {step}",
        needed=needed,
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


def _own_limits(base: Path) -> tuple[Budget, ...]:
    """What the process's own limits leave (setrlimit(2)); nothing where there are none or /proc does not say."""
    limits = cgroup.read_kernel_file(base / "proc/self/limits")
    status = cgroup.read_kernel_file(base / "proc/self/status")
    kinds: tuple[tuple[str, str, str, Kind], ...] = (
        ("RLIMIT_AS", "Max address space", "VmSize", "address"),
        ("RLIMIT_DATA", "Max data size", "VmData", "data"),
        ("RLIMIT_MEMLOCK", "Max locked memory", "VmLck", "locked"),
    )
    found = []
    for name, title, used, kind in kinds:
        soft = re.search(rf"^{title} +(\d+) ", limits, re.MULTILINE)
        taken = re.search(rf"^{used}:\s*(\d+) kB", status, re.MULTILINE)
        if soft is None or taken is None or (kind == "locked" and _may_lock_all(base, status)):
            continue
        found.append(Budget(max(0, int(soft[1]) - int(taken[1]) * 1024), name, kind))
    return tuple(found)


def _may_lock_all(base: Path, status: str) -> bool:
    """Whether the process has CAP_IPC_LOCK, and not only inside a user namespace, where the kernel ignores it."""
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if effective is None or not int(effective[1], 16) >> _CAP_IPC_LOCK & 1:
        return False
    mapping = cgroup.read_kernel_file(base / "proc/self/uid_map").split()
    return mapping in ([], ["0", "0", "4294967295"])
