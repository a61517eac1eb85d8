"""Where the pages of banks go on a machine of several NUMA nodes, who reads them, and what was achieved.

`choose` decides, `Placer` asks the kernel, `locate` reads back. Only banks are placed, before their first touch, and
never bound to a node: one that is full spills to others. Nothing here is process-wide, and a machine with one node,
another system, or one that refuses the calls gets none of them.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from freetoken import settings
from freetoken.cgroup import read_kernel_file
from freetoken.errors import ConfigError
from freetoken.memory import _mempolicy
from freetoken.topology import Topology, format_cpu_list

logger = logging.getLogger(__name__)

_SAMPLES = 256
"""Pages of a mapping whose place is asked for."""


@dataclass(frozen=True)
class Placement:
    """Where banks go and who reads them.

    policy: "shard" (each of `nodes` holds a slice of every expert), "interleave" (pages turn by turn over `nodes`),
        "node" (one), "off" (where they are first touched; `nodes` is empty).
    homes: the node of each worker's CPU, None where the system does not say. teams: which of `nodes` each worker
        serves under "shard", as an index; empty otherwise.
    cpus: node -> its CPUs that this process may use. several: whether there is more than one node with memory.
    """

    policy: Literal["shard", "interleave", "node", "off"]
    nodes: tuple[int, ...]
    why: str
    homes: tuple[int | None, ...]
    teams: tuple[int, ...] = ()
    cpus: Mapping[int, tuple[int, ...]] | None = None
    several: bool = False

    def __str__(self) -> str:
        where = ", ".join(map(str, self.nodes))
        named = {"shard": "shard over nodes ", "interleave": "interleave over nodes ", "node": "node ", "off": "off"}
        return f"{named[self.policy]}{where} ({self.why})"

    @property
    def pieces(self) -> int:
        """In how many mappings a bank lies, if it can be cut."""
        return len(self.nodes) if self.policy == "shard" else 1

    def seats(self, workers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Where the thread of each worker may sit: on the CPUs of the workers of its node."""
        pairs = list(zip(workers, self.homes, strict=True))
        return [tuple(cpu for cpu, other in pairs if other == home) for _, home in pairs]

    def cpus_of(self, node: int | None) -> tuple[int, ...]:
        """CPUs of a node that this process may use; none for no node."""
        return () if node is None or self.cpus is None else self.cpus.get(node, ())


def choose(topology: Topology, workers: tuple[int, ...], request: str | int | None = None) -> Placement:
    """Decide where banks go.

    workers: the CPUs that get a worker. request: "auto", "off", "interleave", "shard" or a node id, as text or
    number; None reads FREETOKEN_CPU_MOE_NUMA. Raises `ConfigError` that lists the good values for any other. Tries the
    kernel's call on a page of its own unless nothing is to be placed; a refusal is logged and leaves "off".
    """
    wanted = _check_request(topology, request)
    homes = tuple(topology.node_of(cpu) for cpu in workers)
    off = Placement(
        "off",
        (),
        "asked for",
        homes,
        cpus={node.id: tuple(sorted(set(node.cpus) & set(topology.allowed))) for node in topology.nodes},
        several=sum(node.memory_bytes != 0 for node in topology.nodes) > 1,
    )
    placement = _decide(topology, wanted, off)
    if placement.policy == "off":
        logger.info("expert banks: no memory policy (%s)", placement.why)
        return placement
    refusal = _try_call(placement.nodes)
    if refusal is not None:
        logger.warning("expert banks get no memory policy: %s; they lie where they are first touched", refusal)
        return replace(off, why=refusal)
    logger.info("expert banks: %s", placement)
    return placement


def _decide(topology: Topology, wanted: str | int, off: Placement) -> Placement:
    nodes = topology.bank_nodes
    asked = "chosen" if wanted == "auto" else "asked for"
    if wanted == "off":
        return off
    if isinstance(wanted, int):
        return replace(off, policy="node", nodes=(wanted,), why=asked)
    if len(nodes) < 2:
        why = "one node" if not off.several else f"of the nodes with memory, CPUs of one are allowed: {nodes[0]}"
        return replace(off, why=why if topology.nodes else "this system has no nodes")
    idle = [node for node in nodes if node not in off.homes]
    if wanted != "interleave" and not idle:
        return replace(off, policy="shard", nodes=nodes, why=asked, teams=_make_teams(topology, nodes, off.homes))
    if wanted != "interleave":
        asked = f"no worker on node {idle[0]} to read a shard there"
    return replace(off, policy="interleave", nodes=nodes, why=asked)


def _make_teams(topology: Topology, nodes: tuple[int, ...], homes: tuple[int | None, ...]) -> tuple[int, ...]:
    """Each worker serves its own node; one whose node has no bank the nearest with the fewest workers for now."""
    sizes = [homes.count(node) for node in nodes]
    far = {node.id: dict(node.distances) for node in topology.nodes}
    teams = []
    for home in homes:
        if home in nodes:
            teams.append(nodes.index(home))
            continue
        distance = {} if home is None else far[home]
        best = min(range(len(nodes)), key=lambda shard: (distance.get(nodes[shard], 0), sizes[shard]))
        sizes[best] += 1
        teams.append(best)
    return tuple(teams)


def _check_request(topology: Topology, request: str | int | None) -> str | int:
    """A word of the setting, or the id of a node with memory that this process may use."""
    setting = settings.CPU_MOE_NUMA
    name = setting.name if request is None else "placement"
    value = setting.read() if request is None else request
    text = str(value).strip().lower()
    usable = [n.id for n in topology.nodes if n.id in topology.mems and n.memory_bytes != 0]
    if not isinstance(value, bool) and setting.takes(text):
        if text in setting.choices:
            return text
        if int(text) in usable:
            return int(text)
    numbers = f"or a node with memory that this process may use ({', '.join(map(str, usable)) or 'there are none'})"
    expected = f"{', '.join(setting.choices)}, {numbers}"
    raise ConfigError(
        f"{name}={value!r} is not one of {expected}: {setting.meaning}", name=name, value=value, expected=expected
    )


def _try_call(nodes: tuple[int, ...]) -> str | None:
    """Why the kernel does not take a policy over these nodes, or None if it does."""
    if not _mempolicy.SUPPORTED:
        return "this system has no calls for it"
    page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    try:
        _mempolicy.mbind(page.ctypes.data, page.nbytes, _mempolicy.INTERLEAVE, nodes)
    except OSError as error:
        return _refused("mbind", error)
    return None


def _refused(call: str, error: OSError) -> str:
    return f"the system refused {call} ({os.strerror(error.errno or 0)})"


class Placer:
    """Asks the kernel for a placement, mapping by mapping; after the first refusal, which it logs, no more.

    Used from one thread at a time.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._open = placement.policy != "off"

    def place(self, address: int, nbytes: int, node: int | None = None) -> None:
        """Set the policy of a mapping that has no pages yet: prefer `node`; without one, what the placement says."""
        mode, nodes = self._policy(node)
        self._ask("mbind", lambda: _mempolicy.mbind(address, nbytes, mode, nodes))

    @contextlib.contextmanager
    def scope(self, node: int | None = None) -> Iterator[None]:
        """The same for all that this thread allocates meanwhile: for memory whose pages appear when it is mapped.

        The thread's policy from before is restored, also on error.
        """
        before: tuple[int, tuple[int, ...]] | None = None

        def enter() -> None:
            nonlocal before
            old = _mempolicy.get_mempolicy()
            _mempolicy.set_mempolicy(*self._policy(node))
            before = old

        self._ask("set_mempolicy", enter)
        try:
            yield
        finally:
            if before is not None:
                _mempolicy.set_mempolicy(*before)

    def _policy(self, node: int | None) -> tuple[int, tuple[int, ...]]:
        if node is None and self.placement.policy == "node":
            (node,) = self.placement.nodes
        if node is None:
            return _mempolicy.INTERLEAVE, self.placement.nodes
        return _mempolicy.PREFERRED, (node,)

    def _ask(self, call: str, ask: Callable[[], None]) -> None:
        if not self._open:
            return
        try:
            ask()
        except OSError as error:
            self._open = False
            logger.warning("expert banks get no memory policy from here on: %s", _refused(call, error))


def bind_thread(cpus: tuple[int, ...]) -> None:
    """Keep the calling thread on these CPUs, if the system lets it; for threads of our own."""
    if cpus and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
            logger.debug("loader thread on CPUs %s", format_cpu_list(cpus))


def locate(array: NDArray[np.uint8], samples: int = _SAMPLES) -> dict[int, int]:
    """Node -> how many of up to `samples` pages of a mapping lie there, at equal distances from its start to its end.

    Pages that were never touched do not count. Where the kernel's query is refused, the counts of the whole mapping
    from numa_maps; empty where that cannot be read either.
    """
    pages = -(-array.nbytes // mmap.PAGESIZE)
    taken = (
        np.unique(np.linspace(0, pages - 1, min(samples, pages)).astype(np.uintp)) if pages else np.empty(0, np.uintp)
    )
    nodes = np.full(len(taken), -1, np.int32)
    try:
        _mempolicy.locate_pages(np.uintp(array.ctypes.data) + taken * np.uintp(mmap.PAGESIZE), nodes)
    except OSError:
        return _read_numa_maps(array.ctypes.data)
    found, counts = np.unique(nodes[nodes >= 0], return_counts=True)
    return {int(node): int(count) for node, count in zip(found, counts, strict=True)}


def _read_numa_maps(address: int, root: Path = Path("/")) -> dict[int, int]:
    """Pages by node of the mapping that holds an address: the last line that does not start above it."""
    best: tuple[int, str] = (-1, "")
    for line in read_kernel_file(root / "proc/self/numa_maps").splitlines():
        start = re.match(r"[0-9a-f]+", line)
        if start and best[0] < int(start[0], 16) <= address:
            best = int(start[0], 16), line
    return {int(node): int(count) for node, count in re.findall(r"\bN(\d+)=(\d+)", best[1])}


@dataclass(frozen=True)
class Achieved:
    """What the kernel says of pages. pages: node -> pages of banks there, scaled up from samples.

    local_share: how many bytes of banks, of those that their readers fetch, lie on the reader's own node.
    """

    pages: Mapping[int, int]
    local_share: float


def measure(pieces: Iterable[tuple[NDArray[np.uint8], tuple[int | None, ...]]]) -> Achieved | None:
    """Read back where mappings lie, each with the nodes of the workers that read it; None where nothing can be said."""
    pages: dict[int, float] = {}
    local = total = 0.0
    for array, readers in pieces:
        found = locate(array)
        for node, count in found.items():
            share = array.nbytes * count / sum(found.values())
            pages[node] = pages.get(node, 0) + share / mmap.PAGESIZE
            total += share
            local += share * readers.count(node) / max(1, len(readers))
    if not total:
        return None
    return Achieved({node: round(pages[node]) for node in sorted(pages)}, local / total)
