"""Memory for banks, mapped and given back when dropped: anonymous on huge pages where they can be had, or a file's."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freetoken.cgroup import read_kernel_file
from freetoken.errors import CapacityError
from freetoken.memory import _mempolicy, budget

_PLAIN = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def map_bytes(nbytes: int, place: Callable[[int, int], object] = lambda address, nbytes: None) -> NDArray[np.uint8]:
    """(nbytes,) uint8 zeros in a private mapping of its own; pages appear when first written.

    place: called with address and bytes of the mapping before any page of it exists, to set its memory policy.
    The mapping lives as long as any array that views it and goes back to the system then. Explicit huge pages are taken
    where enough are reserved and free, and these appear at once; else transparent ones are asked for (plain reads
    gained 11 to 37 % from them in the kernel study). A refusal of either changes nothing but speed.
    """
    size = max(nbytes, 1)
    array = _map_reserved(size, place)
    if array is not None:
        return array[:nbytes]
    try:
        mapping = mmap.mmap(-1, size, flags=_PLAIN)
    except (OSError, OverflowError) as error:
        have = budget.available()
        raise CapacityError(
            f"the system refused to map {nbytes} bytes for a bank ({error})",
            needed=nbytes,
            available=have.available_bytes,
            where=have.where,
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapping, np.uint8)
    place(array.ctypes.data, size)
    return array


def map_file(file: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
    """(nbytes,) uint8, read-only: bytes of a file from `offset` on, in pages that all processes which map it share.

    They belong to the page cache: the system may drop them and read them again. Whoever shortens the file meanwhile
    ends this process with SIGBUS. Raises OSError.
    """
    with file.open("rb") as stream:
        mapping = mmap.mmap(stream.fileno(), offset + nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    return np.frombuffer(mapping, np.uint8, count=nbytes, offset=offset)


def _map_reserved(size: int, place: Callable[[int, int], object]) -> NDArray[np.uint8] | None:
    """A mapping on explicit huge pages, or None where there are not enough, or they are so large that much is wasted.

    Its pages are made to appear here: a limit of a control group on them kills who meets it in a page fault, and is an
    ordinary error for who asks the kernel to fault them.
    """
    length = _reserved_length(size, *reserved_pages())
    if not _mempolicy.MAP_HUGETLB or not length:
        return None
    try:
        mapping = mmap.mmap(-1, length, flags=_PLAIN | _mempolicy.MAP_HUGETLB)
        array = np.frombuffer(mapping, np.uint8)
        place(array.ctypes.data, length)
        mapping.madvise(_mempolicy.MADV_POPULATE_WRITE)
    except (OSError, OverflowError):
        return None
    return array


def _reserved_length(size: int, page: int, free: int) -> int:
    """Bytes of the explicit huge pages for a mapping; 0 where it takes ordinary ones."""
    length = -(-size // page) * page if page else 0
    return 0 if free * page < length or length - size > size // 8 else length


def reserved_bytes(sizes: Iterable[int], root: Path = Path("/")) -> int:
    """How many bytes of mappings of these sizes, made in this order, would lie on explicit huge pages."""
    page, free = reserved_pages(root)
    total = 0
    for size in sizes:
        length = _reserved_length(size, page, free) if _mempolicy.MAP_HUGETLB else 0
        if length:
            free -= length // page
            total += size
    return total


def reserved_pages(root: Path = Path("/")) -> tuple[int, int]:
    """(bytes of an explicit huge page of the default size, how many of them are reserved and free)."""
    fields = dict(line.split(":", 1) for line in read_kernel_file(root / "proc/meminfo").splitlines() if ":" in line)

    def number(name: str) -> int:
        word = fields.get(name, "").split()
        return int(word[0]) if word and word[0].isdigit() else 0

    return number("Hugepagesize") * 1024, max(0, number("HugePages_Free") - number("HugePages_Rsvd"))
