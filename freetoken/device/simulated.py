"""A device without hardware and without time: events on a clock of its own.

Everything that may happen at the same time on a real machine happens in some order here, drawn from a seed: what runs
on the device, the polls of workers, their work, late threads. Calls that block on a real device (a launch whose nodes
do not fit the queue) let events happen until they need not block; a call that would block for ever, or a pause after
which nothing will ever happen, is a `SimulatedHangError`. Tensors lie in ordinary memory, and operations really are
done.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from freetoken.device.base import Actor, Flag, Graph, Stream, Waits, make_flags, refuse_in_duty
from freetoken.device.sharing import Flow, Sharing
from freetoken.device.simulated_streams import (
    CallersLane,
    LaunchLane,
    Moment,
    Node,
    SimulatedLane,
    SimulatedStream,
)
from freetoken.errors import DeviceError

HANG_S = 3600.0
"""Simulated seconds after which a call that blocks is taken to block for ever."""


class SimulatedHangError(DeviceError):
    """A call would never return."""


@dataclass(frozen=True)
class Speeds:
    """What takes how long. Rates in bytes a second, times in seconds.

    Defaults are near what was measured on an H200 with 16 host cores: copies of 64 KiB, 256 KiB and 1 MiB or more
    reach 5, 18 and 36 to 55 GB/s.
    """

    link_bps: float = 55e9
    host_bps: float = 120e9
    copy_s: float = 10e-6
    launch_s: float = 12e-6
    ring_s: float = 0.5e-6
    wake_s: float = 5e-6
    kernel_s: float = 2e-6
    poll_s: float = 0.3e-6


class SimulatedGraph:
    """Nodes and what each waits for."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._before: list[list[int]] = [[] for _ in nodes]
        for i, node in enumerate(nodes):
            for j in node.after:
                self._before[j].append(i)

    @property
    def nodes(self) -> int:
        """How many operations it has."""
        return len(self._nodes)


class _Run:
    """A graph on its way: nodes below `accepted` are in the device's queue."""

    def __init__(self, graph: SimulatedGraph) -> None:
        self.nodes, self._before = graph._nodes, graph._before
        self.accepted = 0
        self.left = len(self.nodes)
        self.ended = Moment()
        self._missing = [len(node.after) for node in self.nodes]
        self._next = 0
        self._ready: list[int] = []

    def end(self, i: int) -> None:
        """A node has ended."""
        self.left -= 1
        for j in self._before[i]:
            self._missing[j] -= 1
            if not self._missing[j] and j < self._next:
                self._ready.append(j)

    def take_ready(self) -> list[int]:
        """Accepted nodes that can begin now, each once."""
        ready, self._ready = self._ready, []
        ready += [i for i in range(self._next, self.accepted) if not self._missing[i]]
        self._next = self.accepted
        return ready


class SimulatedClock:
    """The device's own time."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def now(self) -> float:
        """Simulated seconds."""
        return self._device.time

    def pause(self, seconds: float) -> None:
        """Let at least this long pass, and at least one event happen."""
        self._device.pause(seconds)


@dataclass(eq=False)
class _Driven:
    """A worker without a thread. driver: as which it is driven. busy: its work goes on."""

    worker: Any
    driver: int
    busy: bool = False
    scheduled: bool = False


class SimulatedDevice:
    """See the module's head, and `Device` for what the methods are.

    seed: of everything that varies. queue_nodes: room for operations that are launched and have not ended; a launch
    returns when its last one is in the queue. jitter: how much times vary, as a factor; preemption: how often a
    poll comes up to 5 ms late.
    """

    name = "simulated"
    torch_device = torch.device("cpu")
    waits = Waits("memory", "simulated")

    def __init__(
        self,
        seed: int = 0,
        *,
        queue_nodes: int = 1024,
        memory_bytes: int = 1 << 40,
        speeds: Speeds | None = None,
        jitter: float = 0.3,
        preemption: float = 0.0,
    ) -> None:
        if queue_nodes < 1:
            raise ValueError(f"queue_nodes is {queue_nodes}, expected at least 1")
        self.speeds = speeds or Speeds()
        self.time = 0.0
        self.clock = SimulatedClock(self)
        self.random = random.Random(seed)
        self.interrupt: BaseException | None = None
        self._jitter, self._preemption = jitter, preemption
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._room = queue_nodes
        self._memory_bytes = memory_bytes
        self._runs: deque[_Run] = deque()
        self._parked: list[tuple[Flag, bool, Callable[[], None]]] = []
        self._driven: list[_Driven] = []
        self._sharing = Sharing({"link": self.speeds.link_bps, "host": self.speeds.host_bps})
        self._flows: dict[Flow, Callable[[], None]] = {}
        self._sharing_version = 0
        self._spent = (0.0, 0)
        self._lanes: weakref.WeakSet[SimulatedLane] = weakref.WeakSet()
        self._faults: dict[str, int] = {}
        self._lost = False

    # -- what tests do with it

    def inject(self, fault: str, count: int = 1) -> None:
        """Let the next `count` operations of a kind fail.

        "launch" raises and launches nothing, "launched" raises after the launch, "register" refuses, "silent bell"
        never rings, "lost" stops the device at the next launch.
        """
        self._faults[fault] = self._faults.get(fault, 0) + count

    def take_fault(self, fault: str) -> bool:
        """Whether this operation is to fail."""
        left = self._faults.get(fault, 0)
        self._faults[fault] = max(0, left - 1)
        return left > 0

    def spend(self, seconds: float = 0.0, nbytes: int = 0) -> None:
        """Inside the work of a duty: it takes this long, then reads so many bytes of the host's memory."""
        before = self._spent
        self._spent = before[0] + seconds, before[1] + nbytes

    # -- Device

    def flags(self, n: int) -> Sequence[Flag]:
        """See `Device`."""
        return make_flags(n)

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        return torch.zeros(*shape, dtype=dtype, device="cpu")

    @contextlib.contextmanager
    def register(self, memory: NDArray[Any]) -> Iterator[None]:
        """See `Device`."""
        refuse_in_duty("register", SimulatedHangError)
        if self.take_fault("register"):
            raise DeviceError(f"{memory.nbytes} bytes cannot be registered: simulated fault", operation="register")
        yield

    def capture(self, build: Callable[[Stream], None], share: Graph | None = None) -> SimulatedGraph:
        """See `Device`."""
        refuse_in_duty("capture", SimulatedHangError)
        nodes: list[Node] = []
        build(SimulatedStream(self, nodes))
        return SimulatedGraph(nodes)

    def launch(self, graph: Graph) -> None:
        """See `Device`."""
        assert isinstance(graph, SimulatedGraph)
        refuse_in_duty("launch", SimulatedHangError)
        if self.take_fault("launch"):
            raise DeviceError("launch failed: simulated fault", operation="launch")
        if self._lost:
            raise DeviceError("the device is lost: simulated fault", operation="launch", lost=True)
        run = _Run(graph)
        self._runs.append(run)
        self.poke()
        self._advance()
        self._lost = self.take_fault("lost")
        end = self.time + self.vary(self.speeds.launch_s)
        self._until(lambda: self.time >= end, "", end)
        self._until(lambda: run.accepted == len(run.nodes), f"launch of {len(run.nodes)} nodes")
        if self.take_fault("launched"):
            raise DeviceError("launch failed late: simulated fault", operation="launch")
        self._deliver_interrupt()

    def replay(self, graph: Graph) -> None:
        """See `Device`. It is done on return, as all is that the caller computes."""
        self.launch(graph)
        self.until(self.last_run(), "replay")

    def launches(self) -> LaunchLane:
        """See `Device`."""
        return LaunchLane(self)

    def current(self) -> CallersLane:
        """See `Device`."""
        return CallersLane(self)

    def lane(self) -> SimulatedLane:
        """See `Device`."""
        lane = SimulatedLane(self)
        self._lanes.add(lane)
        return lane

    def active(self) -> contextlib.AbstractContextManager[None]:
        """See `Device`."""
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        """See `Device`."""
        return self._memory_bytes

    def pointer(self, memory: torch.Tensor) -> int:
        """See `Device`."""
        return memory.data_ptr()

    def synchronize(self) -> None:
        """See `Device`."""
        for lane in self._lanes:
            self.until(lane.mark(), "synchronize")

    def is_idle(self) -> bool:
        """See `Device`."""
        refuse_in_duty("is_idle", SimulatedHangError)
        if self._lost:
            raise DeviceError("the device is lost: simulated fault", operation="is_idle", lost=True)
        return not self._runs

    def spawn(self, actor: Actor) -> None:
        """See `Device`."""
        if hasattr(actor, "look"):
            self._watch(actor)
        else:
            self._driven.append(_Driven(actor, actor.driver))  # type: ignore[attr-defined]
            self.poke()

    def close(self) -> None:
        """See `Device`."""

    # -- time

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Let something happen."""
        heapq.heappush(self._events, (self.time + seconds, next(self._order), event))

    def vary(self, seconds: float) -> float:
        """A time as it is this time."""
        return seconds * (1 + self._jitter * self.random.random())

    def pause(self, seconds: float) -> None:
        """See `SimulatedClock`."""
        self._release()
        self.poke()
        end = self.time + seconds
        if not self._events:
            raise SimulatedHangError(f"nothing will ever happen again; {self.describe()}", operation="pause")
        while True:
            self._happen()
            if not self._events or self._events[0][0] > end:
                break
        self.time = max(self.time, end)
        self._deliver_interrupt()

    def describe(self) -> str:
        """Where everything stands, for a hang."""
        parked = ", ".join(str(flag) for flag, _, _ in self._parked) or "nothing"
        return f"{len(self._runs)} graphs are on their way, the device waits for {parked}"

    def _happen(self) -> None:
        self.time, _, event = heapq.heappop(self._events)
        event()

    def _until(self, condition: Callable[[], bool], operation: str, until: float | None = None) -> None:
        if until is not None:
            self.later(until - self.time, lambda: None)
        end = self.time + HANG_S
        while not condition():
            if not self._events or self.time > end:
                raise SimulatedHangError(f"{operation} blocks for ever; {self.describe()}", operation=operation)
            self._happen()

    def _deliver_interrupt(self) -> None:
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            raise interrupt

    # -- graphs

    def _advance(self) -> None:
        """Accept and start what can be; a graph begins when the one before has ended."""
        if self._lost:
            return
        while self._runs and not self._runs[0].left and self._runs[0].accepted == len(self._runs[0].nodes):
            self._runs.popleft().ended.reach()
        for run in self._runs:
            taken = min(self._room, len(run.nodes) - run.accepted)
            run.accepted += taken
            self._room -= taken
            if not self._room:
                break
        if self._runs:
            run = self._runs[0]
            for i in run.take_ready():
                run.nodes[i].start(lambda run=run, i=i: self._end(run, i))  # type: ignore[misc]

    def _end(self, run: _Run, i: int) -> None:
        run.end(i)
        self._room += 1
        self._advance()

    def park(self, flag: Flag, take: bool, done: Callable[[], None]) -> None:
        """A wait in a graph."""
        self._parked.append((flag, take, done))
        self._release()

    def _release(self) -> None:
        """Waits whose flag is 1 take it."""
        if self._lost:
            return
        for entry in list(self._parked):
            flag, take, done = entry
            if flag.value == 1:
                self._parked.remove(entry)
                if take:
                    flag.value = 0
                    self.poke()
                self.later(self.vary(self.speeds.wake_s), done)

    def last_run(self) -> Moment:
        """When all that was launched has ended."""
        return self._runs[-1].ended if self._runs else Moment(done=True)

    def until(self, moment: Moment, operation: str) -> None:
        """Let events happen until a moment."""
        refuse_in_duty(operation, SimulatedHangError)
        self._until(lambda: moment.done, operation)
        self._deliver_interrupt()

    # -- operations

    def compute(self, work: Callable[[], object], cost: float, done: Callable[[], None]) -> None:
        """A kernel."""

        def end() -> None:
            work()
            done()

        self.later(self.vary(cost or self.speeds.kernel_s), end)

    def now_ns(self) -> int:
        """What a kernel finds when it reads the time."""
        return round(self.time * 1e9)

    def move(self, nbytes: int, done: Callable[[], None]) -> None:
        """A kernel that reads or writes so much memory of the host."""
        through = frozenset({"link", "host"})
        self.later(self.vary(self.speeds.kernel_s), lambda: self._flow(nbytes, through, done))

    def copy(self, target: torch.Tensor, source: torch.Tensor, done: Callable[[], None]) -> None:
        """A copy over the link."""

        def end() -> None:
            target.copy_(source)
            done()

        through = frozenset({"link", "host"})
        self.later(self.vary(self.speeds.copy_s), lambda: self._flow(source.nbytes, through, end))

    def _flow(self, nbytes: int, through: frozenset[str], done: Callable[[], None]) -> None:
        self._flows[self._sharing.begin(self.time, nbytes, through)] = done
        self._next_flow()

    def _next_flow(self) -> None:
        end = self._sharing.end_of_next()
        self._sharing_version += 1
        if end is not None:
            version = self._sharing_version
            self.later(max(0.0, end - self.time), lambda: self._flows_end(version))

    def _flows_end(self, version: int) -> None:
        if version != self._sharing_version:
            return  # something has begun or ended since
        for flow in self._sharing.take_finished(self.time):
            self._flows.pop(flow)()
        self._next_flow()

    # -- workers

    def poke(self) -> None:
        """Something has changed that workers may wait for: they look at it a little later."""
        for driven in self._driven:
            if not (driven.scheduled or driven.busy):
                driven.scheduled = True
                late = self.random.random() < self._preemption
                delay = self.random.random() * (5e-3 if late else self.speeds.poll_s)
                self.later(delay, lambda driven=driven: self._poll(driven))  # type: ignore[misc]

    def _poll(self, driven: _Driven) -> None:
        worker = driven.worker
        driven.scheduled = False
        if worker.driver != driven.driver or (worker.stopped and worker.done == worker.posted):
            self._driven.remove(driven)
            return
        before = worker.moves
        _, turn = worker.poll()
        if turn is not None:
            driven.busy = True
            self._spent = (0.0, 0)
            duty, number, state = turn
            worker.call(duty, number)
            seconds, nbytes = self._spent
            if seconds != float("inf"):  # else it never returns
                self.later(
                    self.vary(seconds),
                    lambda: self._flow(nbytes, frozenset({"host"}), lambda: self._answer(driven, state)),
                )
        if worker.moves != before:
            self._release()
            self.poke()

    def _answer(self, driven: _Driven, state: int) -> None:
        driven.busy = False
        if driven.worker.answer(state):
            self._release()
        else:
            self._driven.remove(driven)
        self.poke()

    def _watch(self, watchdog: Any) -> None:
        def look() -> None:
            if not watchdog.stopped and watchdog.look():
                self.later(watchdog.interval, look)
                self._release()
                self.poke()

        self.later(watchdog.interval, look)
