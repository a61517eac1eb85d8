"""torch's intra-op threads while a model loads: as many as a rank has cores, so that ranks do not fight for them.

Threads of an OpenMP team that find their core taken hold up all others at each barrier, and a load has thousands. A
fixed small number or a passive wait policy would slow down machines with cores enough, so it follows the machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping

import torch

from freetoken.cgroup import parse_kernel_int
from freetoken.topology import Topology

logger = logging.getLogger(__name__)

_LOCK = threading.Lock()
_running: list[tuple[int, int]] = []
"""(before, during) of each load that is going on."""


def count_threads(machine: Topology, before: int, environ: Mapping[str, str] | None = None) -> int:
    """Return the intra-op threads for a load: `machine.load_threads`, never above what the user set, at least 1.

    before: torch's number now. environ: where OMP_NUM_THREADS is looked up instead of the process's environment.
    """
    text = (os.environ if environ is None else environ).get("OMP_NUM_THREADS", "")
    asked = parse_kernel_int(text.partition(",")[0])  # "4,2" is for nested teams, the outer one first
    limit = before if asked is None or asked < 1 else min(before, asked)
    return max(1, min(machine.load_threads, limit))


@contextlib.contextmanager
def clamp_threads(machine: Topology) -> Iterator[int]:
    """Give torch `count_threads` intra-op threads, yield that number, and give back the previous one in any case.

    torch keeps one number for the process and one for each thread that has used it, so loads in several threads may
    see the clamp of another: each gives back what was there before any of them.
    """
    with _LOCK:
        before = torch.get_num_threads()
        before = next((number for number, during in _running if during == before), before)
        during = count_threads(machine, before)
        _running.append((before, during))
        torch.set_num_threads(during)
    ranks = machine.rank.count
    logger.info("torch's intra-op threads: %d while loading instead of %d (ranks here: %d)", during, before, ranks)
    try:
        yield during
    finally:
        with _LOCK:
            _running.remove((before, during))
            torch.set_num_threads(before)
