"""Whether memory stays where it is: locking it, and what of it was swapped out.

Owns mlock(2) and the reading of /proc/self/smaps. Which memory to lock, and when, is the caller's business.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from freetoken.cgroup import parse_kernel_int, read_kernel_file
from freetoken.errors import CapacityError, UnsupportedError
from freetoken.memory import budget
from freetoken.units import format_bytes

_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


@dataclass(frozen=True)
class Residency:
    """Bytes of some memory that are on swap, and that are locked, as the kernel counts them."""

    swapped_bytes: int = 0
    locked_bytes: int = 0


def lock(array: NDArray[Any]) -> None:
    """Keep an array's pages in memory until its mapping goes; those that are missing are faulted in.

    Raises `CapacityError` naming the limit where the system refuses, `UnsupportedError` where it has no mlock.
    """
    try:
        mlock = ctypes.CDLL(None, use_errno=True).mlock
    except (AttributeError, OSError, TypeError) as error:
        raise UnsupportedError(
            "this system has no mlock: set FREETOKEN_MLOCK=off", feature="FREETOKEN_MLOCK=on", available="off"
        ) from error
    if mlock(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)):
        number = ctypes.get_errno()
        need = budget.Need(pinned=array.nbytes)
        budget.require(need, what="locking a bank")
        have = budget.available()
        raise CapacityError(
            f"the system refused to lock {format_bytes(array.nbytes)} of a bank ({os.strerror(number)}): allow it more "
            "locked memory (ulimit -l), or set FREETOKEN_MLOCK=off",
            needed=array.nbytes,
            available=have.available_bytes,
            where=have.where,
        )


def read(arrays: Iterable[NDArray[Any]], root: str | os.PathLike[str] = "/") -> Residency:
    """Add up what /proc/self/smaps says of the mappings that hold these arrays; zeros where there is no such file.

    A mapping may hold more than arrays asked for: of each, at most as much counts as overlaps with them.
    """
    wanted = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
    found = {"Swap": 0, "Locked": 0}
    overlap = 0
    for line in read_kernel_file(Path(root) / "proc/self/smaps").splitlines():
        edges = _RANGE.match(line)
        if edges:
            first, last = int(edges[1], 16), int(edges[2], 16)
            overlap = sum(max(0, min(last, stop) - max(first, start)) for start, stop in wanted)
        elif overlap:
            name, _, value = line.partition(":")
            if name in found:
                found[name] += min(overlap, (parse_kernel_int(value.removesuffix("kB")) or 0) * 1024)
    return Residency(found["Swap"], found["Locked"])
