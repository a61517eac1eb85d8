"""What a CUDA device's graphs are made of: captured graphs, streams that are captured, and lanes outside of graphs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from freetoken.device._host_wait import HostWait
from freetoken.device.base import Flag, Stream, Trip, check_copy

if TYPE_CHECKING:
    from freetoken.device.cuda import CudaDevice


class CudaGraph:
    """A captured graph. It keeps what it reads and writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, nodes: int, capture: Capture) -> None:
        self.graph = graph
        self.waited = tuple(capture.waited)
        self._nodes = nodes
        self._kept = tuple(capture.kept)

    @property
    def nodes(self) -> int:
        """How many operations it has."""
        return self._nodes


class Capture:
    """A graph that is being captured. kept: what it uses; open: streams that were forked and not joined."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.kept: list[object] = []
        self.waited: set[Flag] = set()
        self.open: dict[CudaStream, None] = {}
        self._n = 0

    def next_stream(self) -> CudaStream:
        """One that was not used in this capture."""
        self._n += 1
        return CudaStream(self, self._n)


class CudaStream:
    """A stream that is captured."""

    def __init__(self, capture: Capture, number: int) -> None:
        self._capture, self._device = capture, capture.device
        self._forked = number > 1
        self.stream = self._device.stream_of(number)

    @contextlib.contextmanager
    def _adding(self, *kept: object) -> Iterator[Any]:
        """This stream is torch's current one; yields it as the driver names it."""
        self._capture.kept.extend(kept)
        if self._forked:
            self._capture.open[self] = None
        with torch.cuda.stream(self.stream):
            yield self._device.driver.api.CUstream(self.stream.cuda_stream)

    def kernel(self, work: Callable[[], object], cost: float = 0.0) -> None:
        """See `Stream`. `work` has run before, so that nothing is allocated or compiled for the first time."""
        with self._adding(work):
            work()

    def trace(self, work: Callable[[], object]) -> None:
        """See `Stream`. What `work` reads and is not made by it stays the caller's to keep: that may be a model."""
        with self._adding():
            work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Stream`."""
        check_copy(target, source)
        addresses = [self._device.pointer(tensor) for tensor in (target, source)]
        with self._adding(target, source) as stream:
            self._device.driver.call("cuMemcpyAsync", *addresses, source.nbytes, stream)

    def ring(self, flag: Flag, answered: bool = False) -> None:
        """See `Stream`."""
        with self._adding(flag):
            self._device.ring_kernel(self._device.pointer(flag), ctypes.c_uint(answered))

    def wait(self, flag: Flag, take: bool = True) -> None:
        """See `Stream`. Host functions may run one at a time: no answer may need another forked stream to go on."""
        self._capture.waited.add(flag)
        device = self._device
        if device.waits.kind == "memory":
            operations = device.wait_operations(device.pointer(flag), take)
            with self._adding(flag) as stream:
                device.driver.call("cuStreamBatchMemOp", stream, len(operations), operations, 0)
            return
        wait = HostWait(flag.words, take, device.stop)
        with self._adding(wait):
            device.driver.check("cuLaunchHostFunc", wait.enqueue(device.host_function, self.stream.cuda_stream))

    def take(self, flag: Flag) -> None:
        """See `Stream`."""
        with self._adding(flag):
            self._device.set_kernel(self._device.pointer(flag), ctypes.c_uint(0))

    def ask(self, trip: Trip) -> None:
        """See `Stream`."""
        with self._adding(trip):
            self._device.handoff.ask(trip)

    def ready(self, trip: Trip) -> None:
        """See `Stream`."""
        with self._adding(trip):
            self._device.handoff.ready(trip)

    def add(self, trip: Trip, out: torch.Tensor) -> None:
        """See `Stream`."""
        with self._adding(trip, out):
            self._device.handoff.add(trip, out)

    def fork(self) -> CudaStream:
        """See `Stream`."""
        other = self._capture.next_stream()
        self._capture.open[other] = None
        other.stream.wait_stream(self.stream)
        return other

    def join(self, other: Stream) -> None:
        """See `Stream`."""
        assert isinstance(other, CudaStream)
        self.stream.wait_stream(other.stream)
        self._capture.open.pop(other, None)


class CudaLane:
    """A stream outside of graphs."""

    def __init__(self, device: CudaDevice, stream: torch.cuda.Stream) -> None:
        self._device, self.stream = device, stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaLane) and self.stream.cuda_stream == other.stream.cuda_stream

    __hash__ = None  # type: ignore[assignment]

    def kernel(self, work: Callable[[], object], cost: float = 0.0) -> None:
        """See `Lane`."""
        with self._device.entered("kernel"), torch.cuda.stream(self.stream):
            work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Lane`."""
        check_copy(target, source)
        device = self._device
        with device.entered("copy"):
            addresses = [device.pointer(tensor) for tensor in (target, source)]
            stream = device.driver.api.CUstream(self.stream.cuda_stream)
            device.driver.call("cuMemcpyAsync", *addresses, source.nbytes, stream)

    def mark(self) -> torch.cuda.Event:
        """See `Lane`."""
        with self._device.entered("mark"):
            moment: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            moment.record(self.stream)
            return moment

    def after(self, moment: torch.cuda.Event) -> None:
        """See `Lane`."""
        with self._device.entered("after"):
            if not torch.cuda.is_current_stream_capturing():  # who launches a graph sees to what comes before it
                self.stream.wait_event(moment)
