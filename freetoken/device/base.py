"""What the orchestrator needs of a device: memory that both sides reach, graphs that wait for the host, a clock.

`simulated.py` is a device without hardware, `cuda.py` one with. Tensors are torch's, on `Device.torch_device`.
A graph is captured once, by a function that puts operations on streams, and launched again and again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from freetoken.device.histogram import BUCKETS
from freetoken.errors import DeviceError

FLAG_WORDS = 16
"""Words of 32 bits between two flags: each is alone on its cache line."""


class Flag:
    """A 32-bit word in memory that host and device reach.

    words: (FLAG_WORDS,) uint32, of which the first is the flag; kept alive. number: for messages.
    """

    __slots__ = ("number", "words")

    def __init__(self, words: NDArray[np.uint32], number: int) -> None:
        self.words = words
        self.number = number

    @property
    def address(self) -> int:
        """Where it is in the host's memory."""
        return int(self.words.ctypes.data)

    @property
    def value(self) -> int:
        """What is there now."""
        return int(self.words[0])

    @value.setter
    def value(self, value: int) -> None:
        self.words[0] = value & 0xFFFFFFFF

    def __repr__(self) -> str:
        return f"flag {self.number}"


class Actor(Protocol):
    """Something that goes on beside the caller: the body of a thread."""

    @property
    def name(self) -> str:
        """Of its thread."""

    def run(self) -> None:
        """Return when it is stopped."""

    def stop(self) -> None:
        """Let `run` return."""


def start_thread(actor: Actor) -> None:
    """A thread that does not keep the process alive."""
    threading.Thread(target=actor.run, name=actor.name, daemon=True).start()


class _Thread(threading.local):
    runs_duty = False


_THREAD = _Thread()


@contextlib.contextmanager
def running_duty() -> Iterator[None]:
    """Around the work of a duty, by the worker that does it: this thread must not call a device."""
    _THREAD.runs_duty = True
    try:
        yield
    finally:
        _THREAD.runs_duty = False


def is_in_duty() -> bool:
    """Whether this thread runs the work of a duty."""
    return _THREAD.runs_duty


def refuse_in_duty(operation: str, error: type[DeviceError] = DeviceError) -> None:
    """Raise `error` in a thread that runs the work of a duty."""
    if is_in_duty():
        raise error(
            f"the work of a duty called {operation}: that may block behind a graph which waits for this duty",
            operation=operation,
        )


class Clock(Protocol):
    """Time as everything that belongs to a device sees it, in seconds."""

    def now(self) -> float:
        """Never goes back."""

    def pause(self, seconds: float) -> None:
        """Let others go on for a while."""


class SystemClock:
    """The machine's."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


def make_flags(n: int, memory: NDArray[np.uint8] | None = None) -> list[Flag]:
    """Flags in memory of `n * FLAG_WORDS` words, new and aligned where none is given."""
    if memory is None:
        spare = np.zeros(n * FLAG_WORDS * 4 + 64, np.uint8)
        first = -spare.ctypes.data % 64
        memory = spare[first : first + n * FLAG_WORDS * 4]
    words = memory.view(np.uint32).reshape(n, FLAG_WORDS)
    return [Flag(words[i], i) for i in range(n)]


def check_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise `ValueError` unless one can be copied to the other as it lies."""
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(f"copy of {source.shape} {source.dtype} to {target.shape} {target.dtype}")
    if not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError(f"copy of strides {source.stride()} to {target.stride()}, expected contiguous tensors")


MOST_SENT = 3
"""Pairs of a `Trip`: hidden states, ids, weights."""


@dataclass(frozen=True)
class Trip:
    """One hand-off of a captured step to the host and back. All tensors are contiguous.

    bell, answer: the flags. ids: (B, K) int32 on the device, experts left to the host, -1: none. sent: pairs of a
    tensor of the host and one of the device, which is copied to it, at most `MOST_SENT`. back: (B, H) float32 or
    bfloat16, the host's, what it computed. took: (1,) int64, the host's, nanoseconds of its own work: 0 from the bell
    until it is done.

    The others are the device's. times: (3,) int64, ns, when it asked, when it had nothing else to do, and when it had
    added. waited: (3, BUCKETS) int64, histograms: how long the device waited; the hand-off, which is what a trip took
    beyond the host's work, where that alone lasted longer than all else; the host's work. counting: (1,) int32, whether
    they are added to, if it is not 0. Trips that are done one after the other can share waited and counting.

    Raises `ValueError` for other shapes, types or strides.
    """

    bell: Flag
    answer: Flag
    ids: torch.Tensor
    sent: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    back: torch.Tensor
    took: torch.Tensor
    times: torch.Tensor
    waited: torch.Tensor
    counting: torch.Tensor

    def __post_init__(self) -> None:
        if len(self.sent) > MOST_SENT:
            raise ValueError(f"{len(self.sent)} tensors are sent, expected at most {MOST_SENT}")
        for target, source in self.sent:
            check_copy(target, source)
        if self.ids.dim() != 2 or self.back.dim() != 2 or len(self.ids) != len(self.back):
            raise ValueError(f"ids {tuple(self.ids.shape)} and back {tuple(self.back.shape)}, expected (B, K), (B, H)")
        if self.back.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"back is {self.back.dtype}, expected torch.float32 or torch.bfloat16")
        for name, shape, dtype in (
            ("ids", self.ids.shape, torch.int32),
            ("back", self.back.shape, self.back.dtype),
            ("took", (1,), torch.int64),
            ("times", (3,), torch.int64),
            ("waited", (3, BUCKETS), torch.int64),
            ("counting", (1,), torch.int32),
        ):
            check_tensor(name, getattr(self, name), shape, dtype)

    def check_sum(self, out: torch.Tensor) -> None:
        """Raise `ValueError` unless what came back can be added to `out`."""
        check_tensor("out", out, self.back.shape, self.back.dtype)


def check_tensor(name: str, found: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise `ValueError` unless a tensor is contiguous and what it should be."""
    if tuple(found.shape) != tuple(shape) or found.dtype != dtype or not found.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(found.shape)} {found.dtype} of strides {found.stride()}, "
            f"expected {tuple(shape)} {dtype}, contiguous"
        )


@dataclass(frozen=True)
class Waits:
    """How a graph waits for the host, for reports: by "memory" operations or by "host function", and why."""

    kind: str
    why: str


class Stream(Protocol):
    """Operations in their order. All of them can be captured; none waits for the host in the calling thread."""

    def kernel(self, work: Callable[[], object], cost: float = 0.0) -> None:
        """Run what `work` enqueues on this stream; cost: what a simulated device takes for it, in seconds."""

    def trace(self, work: Callable[[], object]) -> None:
        """Capture what torch computes in `work`, in its order; `work` may put operations on this stream meanwhile.

        It has run before. It runs once now and the host's decisions are those of now; waiting for values raises.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between contiguous tensors of the same shape and type, one of which may be registered host memory."""

    def ring(self, flag: Flag, answered: bool = False) -> None:
        """Count the flag up by 2, after all before; its lowest bit says whether nothing is left to do."""

    def wait(self, flag: Flag, take: bool = True) -> None:
        """Wait until the flag is 1, and write 0 if it is taken with that."""

    def take(self, flag: Flag) -> None:
        """Write 0: what was waited for has been used."""

    def ask(self, trip: Trip) -> None:
        """Send what the host needs and ring; where all ids are -1, answer and ring as answered instead."""

    def ready(self, trip: Trip) -> None:
        """All else is done, what comes next waits for the trip's answer: note the time."""

    def add(self, trip: Trip, out: torch.Tensor) -> None:
        """Add what came back to out (B, H), in float32 and rounded once, after the answer; add to histograms.

        Rows of tokens none of whose ids are left to the host are neither read nor written.
        """

    def fork(self) -> Stream:
        """Another stream, which begins after what is on this one."""

    def join(self, other: Stream) -> None:
        """What comes after waits for what is on the other stream."""


class Lane(Protocol):
    """Operations in their order that are put on the device at once: a stream outside of graphs.

    Two of the same order are equal.
    """

    def kernel(self, work: Callable[[], object], cost: float = 0.0) -> None:
        """See `Stream.kernel`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Stream.copy`."""

    def mark(self) -> Any:
        """A moment: when all that is on this lane now is done."""

    def after(self, moment: Any) -> None:
        """What comes next waits for a moment of any lane."""


class Graph(Protocol):
    """A captured graph."""

    @property
    def nodes(self) -> int:
        """How many operations it has."""


class Device(Protocol):
    """One device, used by one launching thread at a time.

    Everything but flags, `clock` and `spawn` is out of bounds for a thread that must set a flag: a call may block
    behind a launched graph which waits for that flag.
    """

    name: str
    torch_device: torch.device
    waits: Waits

    @property
    def clock(self) -> Clock:
        """Its time."""

    def flags(self, n: int) -> Sequence[Flag]:
        """New flags, 0."""

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in host memory that the device reaches."""

    def register(self, memory: NDArray[Any]) -> AbstractContextManager[None]:
        """Let the device reach host memory that is there already, until the context ends; `DeviceError` if refused."""

    def pointer(self, memory: torch.Tensor) -> int:
        """Where the device finds memory; `DeviceError` for memory of the host that is not registered."""

    def capture(self, build: Callable[[Stream], None], share: Graph | None = None) -> Graph:
        """The graph of what `build` puts on the stream that it is given.

        share: a graph that is there already, whose memory for what lies between two operations may be used again:
        neither's tensors are looked at after the other was launched.
        """

    def launch(self, graph: Graph) -> None:
        """Launch it after all that was launched before. May block until the device has gone on."""

    def replay(self, graph: Graph) -> None:
        """Launch a graph that waits for nothing of the host on this thread's `current` lane."""

    def launches(self) -> Lane:
        """The lane of launched graphs."""

    def current(self) -> Lane:
        """The lane on which torch puts what this thread computes."""

    def lane(self) -> Lane:
        """A new one, beside all others."""

    def active(self) -> AbstractContextManager[None]:
        """Around kernels that others than this device launch: it is the one that they run on."""

    def free_bytes(self) -> int:
        """Of the device's memory, what torch can still allocate."""

    def synchronize(self) -> None:
        """Return when all lanes are done with what they have. No graph may be on its way that waits for the host."""

    def is_idle(self) -> bool:
        """Whether all that was launched is done; `DeviceError` if the device has failed."""

    def spawn(self, actor: Actor) -> None:
        """Let an actor go on beside the caller, until it is stopped. It does not keep the process alive."""

    def close(self) -> None:
        """Give back what the device holds."""
