"""Streams and lanes of the simulated device: what is put on them, and when it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from freetoken.device.base import Flag, Stream, Trip, check_copy
from freetoken.device.histogram import bucket
from freetoken.device.tape import Tape

if TYPE_CHECKING:
    from freetoken.device.simulated import SimulatedDevice


@dataclass(eq=False)
class Node:
    """An operation of a graph."""

    start: Callable[[Callable[[], None]], None]
    """Begins the operation; calls back at its end."""
    after: tuple[int, ...]
    label: str


class Moment:
    """When something is done."""

    def __init__(self, done: bool = False) -> None:
        self.done = done
        self._then: list[Callable[[], None]] = []

    def reach(self) -> None:
        """It is done."""
        self.done = True
        then, self._then = self._then, []
        for event in then:
            event()

    def then(self, event: Callable[[], None]) -> None:
        """Let something happen when it is done, or now."""
        if self.done:
            event()
        else:
            self._then.append(event)


class SimulatedStream:
    """A stream that is captured."""

    def __init__(self, device: SimulatedDevice, nodes: list[Node], last: tuple[int, ...] = ()) -> None:
        self._device, self._nodes, self._last = device, nodes, last

    def _add(self, label: str, start: Callable[[Callable[[], None]], None]) -> None:
        self._nodes.append(Node(start, self._last, label))
        self._last = (len(self._nodes) - 1,)

    def kernel(self, work: Callable[[], object], cost: float = 0.0) -> None:
        """See `Stream`."""
        device = self._device

        self._add("kernel", lambda done: device.compute(work, cost, done))

    def trace(self, work: Callable[[], object]) -> None:
        """See `Stream`."""
        with Tape(self.kernel, lambda: len(self._nodes)):
            work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Stream`."""
        check_copy(target, source)
        device = self._device
        self._add("copy", lambda done: device.copy(target, source, done))

    def ring(self, flag: Flag, answered: bool = False) -> None:
        """See `Stream`."""
        self._add(f"ring {flag}", lambda done: self._ring(flag, answered, done))

    def _ring(self, flag: Flag, answered: bool, done: Callable[[], None]) -> None:
        device = self._device

        def end() -> None:
            flag.value = (flag.value & ~1) + 2 + answered
            device.poke()
            done()

        if not device.take_fault("silent bell"):
            device.later(device.vary(device.speeds.ring_s), end)

    def wait(self, flag: Flag, take: bool = True) -> None:
        """See `Stream`."""
        self._add(f"wait for {flag}", lambda done: self._device.park(flag, take, done))

    def take(self, flag: Flag) -> None:
        """See `Stream`."""
        device = self._device

        def start(done: Callable[[], None]) -> None:
            def end() -> None:
                flag.value = 0
                device.poke()
                done()

            device.later(device.vary(device.speeds.ring_s), end)

        self._add(f"take {flag}", start)

    def ask(self, trip: Trip) -> None:
        """See `Stream`."""
        device = self._device

        def start(done: Callable[[], None]) -> None:
            trip.times[0] = device.now_ns()
            wanted = bool((trip.ids >= 0).any())

            def end() -> None:
                if wanted:
                    trip.took.zero_()
                    for target, source in trip.sent:
                        target.copy_(source)
                else:
                    trip.answer.value = 1
                self._ring(trip.bell, not wanted, done)

            device.move(sum(source.nbytes for _, source in trip.sent) if wanted else 0, end)

        self._add(f"ask with {trip.bell}", start)

    def ready(self, trip: Trip) -> None:
        """See `Stream`."""

        def note() -> None:
            trip.times[1] = self._device.now_ns()

        self.kernel(note)

    def add(self, trip: Trip, out: torch.Tensor) -> None:
        """See `Stream`."""
        trip.check_sum(out)
        device = self._device

        def start(done: Callable[[], None]) -> None:
            rows = (trip.ids >= 0).any(1)

            def end() -> None:
                out[rows] = (out[rows].float() + trip.back[rows].float()).to(out.dtype)
                trip.times[2] = device.now_ns()
                if rows.any() and trip.counting.any():
                    _count(trip)
                done()

            device.move(int(rows.sum()) * trip.back[:1].nbytes, end)

        self._add("add", start)

    def fork(self) -> SimulatedStream:
        """See `Stream`."""
        return SimulatedStream(self._device, self._nodes, self._last)

    def join(self, other: Stream) -> None:
        """See `Stream`."""
        assert isinstance(other, SimulatedStream)
        self._last = tuple(sorted({*self._last, *other._last}))


def _count(trip: Trip) -> None:
    """Add a trip that has come back to its histograms."""
    asked, ready, now = trip.times.tolist()
    took = int(trip.took)
    if not took:
        return  # it was answered without work
    trip.waited[0, bucket(now - ready)] += 1
    if asked + took > ready:
        trip.waited[1, bucket(now - asked - took)] += 1
    trip.waited[2, bucket(took)] += 1


class SimulatedLane:
    """A lane beside the caller's: its operations are done as time passes."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._last = Moment(done=True)

    def _add(self, start: Callable[[Callable[[], None]], None]) -> None:
        before, self._last = self._last, Moment()
        end = self._last.reach
        before.then(lambda: start(end))

    def kernel(self, work: Callable[[], object], cost: float = 0.0) -> None:
        """See `Lane`."""
        self._add(lambda done: self._device.compute(work, cost, done))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Lane`."""
        check_copy(target, source)
        self._add(lambda done: self._device.copy(target, source, done))

    def mark(self) -> Moment:
        """See `Lane`."""
        return self._last

    def after(self, moment: Moment) -> None:
        """See `Lane`."""
        self._add(moment.then)


class CallersLane:
    """What the caller computes itself, with torch on ordinary memory: what is put here is done on return."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallersLane)

    __hash__ = None  # type: ignore[assignment]

    def kernel(self, work: Callable[[], object], cost: float = 0.0) -> None:
        """See `Lane`."""
        self._now(lambda done: self._device.compute(work, cost, done), "kernel")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Lane`."""
        check_copy(target, source)
        self._now(lambda done: self._device.copy(target, source, done), "copy")

    def mark(self) -> Moment:
        """See `Lane`."""
        return Moment(done=True)

    def after(self, moment: Moment) -> None:
        """See `Lane`."""
        self._now(moment.then, "after")

    def _now(self, start: Callable[[Callable[[], None]], None], operation: str) -> None:
        moment = Moment()
        start(moment.reach)
        self._device.until(moment, operation)


class LaunchLane(CallersLane):
    """The lane of launched graphs."""

    def mark(self) -> Moment:
        """See `Lane`."""
        return self._device.last_run()
