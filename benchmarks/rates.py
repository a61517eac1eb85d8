"""What a machine can do, measured when it is asked for, and the limits that follow for a step of decoding."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from layers import roof
from numpy.typing import NDArray

_SMALL = 64 << 20
"""Banks of fewer bytes say nothing of memory: so many others are read in their place."""
_LINK_BYTES = 256 << 20
_COPY_BYTES = 1 << 30
_PRODUCT = 8192
"""Rows, columns and depth of the product whose rate counts."""
_ROUNDS = 5
_LOOKS = 3
"""At the roof of host memory, whose fastest counts: others on the machine take their share, differently each time."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second, and operations per second; None where the device has no such thing.

    host: the fastest plain read of the banks by all workers. link: a copy from pinned host memory to the device.
    device: its own memory, read and written bytes of a copy counted. product: of a large matrix product in the dense
    part's dtype, two operations for each multiplication.
    """

    host: float
    link: float | None = None
    device: float | None = None
    product: float | None = None


def wait_for(device: torch.device) -> None:
    """Until all that was launched on it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(device: torch.device, memory: Sequence[NDArray[np.uint8]], threads: int, dtype: torch.dtype) -> Rates:
    """Medians of some rounds, the host's the best of some. memory: the banks. On the device 2.8 GiB are used."""
    small = sum(part.nbytes for part in memory) < _SMALL
    host = max(roof([np.ones(_SMALL, np.uint8)] if small else memory, threads) for _ in range(_LOOKS))
    if device.type != "cuda":
        return Rates(host)

    def seconds(run: Callable[[], Any]) -> float:
        found = []
        for _ in range(_ROUNDS + 1):
            wait_for(device)
            start = time.perf_counter()
            run()
            wait_for(device)
            found.append(time.perf_counter() - start)
        return statistics.median(found[1:])

    pinned = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    link = _LINK_BYTES / seconds(lambda: there.copy_(pinned, non_blocking=True))
    first, second = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    copy = 2 * _COPY_BYTES / seconds(lambda: second.copy_(first))
    a, b = (torch.randn(_PRODUCT, _PRODUCT, device=device, dtype=dtype) for _ in range(2))
    product = 2 * _PRODUCT**3 / seconds(lambda: a @ b)
    return Rates(host, link, copy, product)


def byte_seconds(strategy: str, routed: float, fetched: float | None, missing: float, rates: Rates) -> float | None:
    """The least time in which a strategy can move the bytes of its experts, None where a figure for it is missing.

    routed: bytes of experts that are computed with. missing: of these, what is in no slot; fetched: what crosses the
    link. `cpu` reads all from host memory, `resident` from the device's; `offload` fetches some and reads all on the
    device, at the same time; for `hybrid` what is missing leaves host memory at the rate of all cores, or of the link.
    """
    if strategy == "cpu":
        return routed / rates.host
    if rates.device is None:
        return None
    if strategy == "resident":
        return routed / rates.device
    if strategy == "hybrid" and rates.link is not None:
        return max(missing / max(rates.host, rates.link), routed / rates.device)
    if strategy != "offload" or rates.link is None or fetched is None:
        return None
    return max(fetched / rates.link, routed / rates.device)
