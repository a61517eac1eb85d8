"""A trip to the host and back on a CUDA device: three kernels (handoff.cu), put on torch's current stream."""

from __future__ import annotations

import ctypes
import importlib.resources
from typing import TYPE_CHECKING

import torch

from freetoken.device.base import MOST_SENT, Flag, Trip
from freetoken.device.histogram import BUCKETS

if TYPE_CHECKING:
    from freetoken.device.cuda import CudaDevice

_THREADS = 512
_NAMES = {torch.float32: "add_float", torch.bfloat16: "add_bf16"}


class Handoff:
    """The operations `ask`, `ready` and `add` of a `Stream`. Raises `DeviceError` where the compiler refuses."""

    def __init__(self, device: CudaDevice) -> None:
        self._pointer = device.pointer
        place = importlib.resources.files("freetoken.device")
        parts = [(place / name).read_text(encoding="utf-8") for name in ("handoff.cuh", "handoff.cu")]
        source = "\n".join([f"#define FT_THREADS {_THREADS}", f"#define FT_BUCKETS {BUCKETS}", *parts])
        self._ask, self._ready, *adds = device.compile(source, "ask", "ready", *_NAMES.values())
        self._add = dict(zip(_NAMES, adds, strict=True))

    def ask(self, trip: Trip) -> None:
        """See `Stream.ask`."""
        sent: list[int | ctypes.c_int] = []
        for target, source in trip.sent:
            sent += [*self._at(target, source), ctypes.c_int(source.nbytes)]
        sent += [0, 0, ctypes.c_int(0)] * (MOST_SENT - len(trip.sent))
        self._ask(
            *self._at(trip.bell, trip.answer, trip.ids),
            ctypes.c_int(trip.ids.numel()),
            *self._at(trip.times, trip.took),
            *sent,
            threads=_THREADS,
        )

    def ready(self, trip: Trip) -> None:
        """See `Stream.ready`."""
        self._ready(*self._at(trip.times))

    def add(self, trip: Trip, out: torch.Tensor) -> None:
        """See `Stream.add`."""
        trip.check_sum(out)
        rows, width = out.shape
        parts = -(-width * out.element_size() // (16 * _THREADS))
        self._add[out.dtype](
            *self._at(out, trip.back, trip.ids),
            ctypes.c_int(trip.ids.shape[1]),
            ctypes.c_int(width),
            *self._at(trip.times, trip.took, trip.waited, trip.counting),
            blocks=(parts, rows),
            threads=_THREADS,
        )

    def _at(self, *memory: torch.Tensor | Flag) -> list[int]:
        return [self._pointer(part) for part in memory]
