"""Steps: graphs that wait for the host, launched so that nothing can wait for ever.

The order that makes it so: a step's duties are posted to workers, whose threads run already, and only then is its
graph launched, by a thread that sets no flag. A launch may block until the device has gone on, which it does, because
the workers answer; the first duty that is not answered has all that it waits for. A step that fails, is cancelled or is
late is skipped: its duties are answered without work, so that its graph ends. Before the next launch all that was
launched has ended and all flags are as at the beginning (`_recover`).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence

from freetoken import settings
from freetoken.device.base import Actor, Device, Flag, Graph
from freetoken.duties._worker import RING, Line, Worker
from freetoken.duties.duty import Duty
from freetoken.duties.watchdog import Watchdog
from freetoken.errors import DeviceError, StepError

MAX_IN_FLIGHT = 2
"""Steps that are launched and not finished: while one runs the next is prepared."""
_CLOSE = 5.0
"""Seconds that closing waits for what is on its way."""
_POLL = 20e-6
"""Seconds between looks at a flag by a thread that has nothing else to do."""


class StepGraph:
    """A captured graph and, for each worker, its duties in the order in which the graph waits for them.

    Its last operation rings `Steps.finished`. Made by `Steps.bind`.
    """

    def __init__(self, graph: Graph, lines: Mapping[Worker, Line]) -> None:
        self.graph = graph
        self.lines = dict(lines)
        self.launches = 0

    @property
    def duties(self) -> list[Duty]:
        """Of all workers."""
        return [duty for line in self.lines.values() for duty in line.kept]


class Steps:
    """Launches steps on a device and sees that they end.

    workers: of these steps only, started here, stopped by `close`. deadline: seconds without progress until a step is
    given up; 0 for none, None for FREETOKEN_STEP_DEADLINE. `launch` and `wait` are for one thread at a time, `cancel`
    is for any.
    """

    def __init__(self, device: Device, workers: Sequence[Worker], deadline: float | None = None) -> None:
        taken = [worker.name for worker in workers if worker.on_failure is not None]
        if taken or len(set(workers)) < len(workers):
            raise ValueError(f"workers {taken or [w.name for w in workers]}: each is for one Steps, and once")
        self.device = device
        self.workers = tuple(workers)
        self.deadline = settings.STEP_DEADLINE.read() if deadline is None else deadline
        self.finished_flag: Flag = device.flags(1)[0]
        self._graphs: weakref.WeakSet[StepGraph] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._number = 0  # the last step that was begun
        self._in_flight: deque[tuple[int, StepGraph]] = deque()  # may be nobody else's any more
        self._base = 0  # the step after which the finished flag was `_base_value`
        self._base_value = 0
        self._failure: StepError | None = None
        self._dirty = False  # something is to be recovered from
        self._valid = 0  # when it is: steps up to this one had ended before
        self._lost = ""
        self._closed = False
        failed = weakref.WeakMethod(self._duty_failed)
        for worker in self.workers:
            worker.on_failure = lambda *args: (method := failed()) and method(*args)
            device.spawn(worker)
        self.watchdog = Watchdog(self, self.deadline)
        if self.deadline:
            device.spawn(self.watchdog)
        _OPEN.add(self)

    def bind(self, graph: Graph, duties: Mapping[Worker, Sequence[Duty]]) -> StepGraph:
        """A graph and its duties, ready to be launched. The graph's last operation must ring `finished_flag`.

        Raises `ValueError` for a worker that is not one of these, or a flag that stands for two things.
        """
        strange = [worker.name for worker in duties if worker not in self.workers]
        if strange:
            raise ValueError(f"workers {strange} are not among {[worker.name for worker in self.workers]}")
        taken = {self.finished_flag.address}
        taken.update(duty.bell.address for step in self._graphs for duty in step.duties if duty.bell is not None)
        for duty in (duty for line in duties.values() for duty in line):
            for flag in (duty.answer, duty.bell):
                if flag is not None and flag.address in taken:
                    raise ValueError(f"{duty}: {flag} is used twice, a duty's bell and its graph's answers are its own")
                if flag is not None:
                    taken.add(flag.address)
        step = StepGraph(graph, {worker: Line(line) for worker, line in duties.items()})
        self._rebase(step)
        self._graphs.add(step)
        return step

    @property
    def finished(self) -> int:
        """The number of the last step whose graph has ended."""
        return self._base + ((self.finished_flag.value - self._base_value) & 0xFFFFFFFF) // RING

    @property
    def number(self) -> int:
        """The number of the last step that was begun."""
        return self._number

    @property
    def usable(self) -> bool:
        """Whether steps can be launched: the device answers, and no work that was given up is still running."""
        return not (self._closed or self._lost or any(worker.stuck for worker in self.workers))

    def launch(self, step: StepGraph) -> int:
        """Launch a step and return its number; waits while `MAX_IN_FLIGHT` are on their way.

        Raises the `StepError` of a step before that failed. Whatever is raised, no flag is left waiting.
        """
        with self._lock:
            self._raise_failure()
            if self._closed:
                raise StepError("these steps are closed: load the model again", step=self._number, usable=False)
            try:
                while self._dirty or self._is_full():
                    self._raise_failure()
                    if self._dirty:
                        self._recover()
                    else:
                        self.device.clock.pause(_POLL)
                while self._in_flight and self._in_flight[0][0] <= self.finished:
                    self._in_flight.popleft()
                self._number += 1
                self._in_flight.append((self._number, step))
                step.launches += 1
                bell = RING * step.launches
                for worker, line in step.lines.items():
                    worker.post(line, bell & 0xFFFFFFFF, self._number)
                self.device.launch(step.graph)
            except BaseException:
                self.cancel()
                raise
            return self._number

    def _is_full(self) -> bool:
        # a worker may be behind the device, which answers itself where the host has nothing to do
        behind = [self._number - self.finished, *(worker.posted - worker.done for worker in self.workers)]
        return max(behind) >= MAX_IN_FLIGHT

    def wait(self, number: int) -> None:
        """Return when a step has ended; raises `StepError` if it or one before failed or was cancelled.

        Sleeps shortly and often: Ctrl-C arrives, and cancels.
        """
        if number > self._number:
            raise ValueError(f"step {number} was never launched, the last one is {self._number}")
        try:
            while True:
                finished = self.finished  # looked at first: a step that is skipped ends after it was marked
                if self._dirty and number > self._valid:
                    self._raise_failure()
                    raise StepError(f"step {number} was cancelled", step=number)
                if finished >= number:
                    return
                self.device.clock.pause(_POLL)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Skip what is left of all steps that were launched. Does not wait; work that has begun ends by itself."""
        if not self._dirty:
            self._valid = self.finished
            self._dirty = True
        for worker in self.workers:
            worker.skip(self._number)

    def release(self) -> None:
        """Set every flag that a graph may wait for: the device has ended, or does not go on."""
        for worker in self.workers:
            worker.drop(self._number)
        for step in list(self._graphs):
            for duty in step.duties:
                duty.answer.value = 1

    def fail(self, error: StepError) -> None:
        """Cancel because of an error, which the next `launch` or `wait` raises; the first one counts."""
        if self._failure is None and not self._dirty:
            self._failure = error
        self.cancel()

    def lose(self, why: str) -> None:
        """The device does not answer any more: nothing will be launched."""
        self._lost = self._lost or why

    def close(self) -> None:
        """End: what is on its way is skipped, threads return. May be called again, and while a step is parked."""
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        self.cancel()
        launching = not self._lock.acquire(blocking=False)
        with contextlib.suppress(StepError, DeviceError):
            self._settle(min(self.deadline or _CLOSE, _CLOSE), launching)
        if not launching:
            self._lock.release()
        actors: tuple[Actor, ...] = (*self.workers, self.watchdog)
        for actor in actors:
            actor.stop()

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "watchdog"):  # else it was never whole
            self.close()

    def _duty_failed(self, duty: Duty, number: int, error: BaseException) -> None:
        failure = StepError(
            f"step {number}: {duty} failed: {type(error).__name__}: {error}",
            step=number,
            side="host",
            layer=duty.layer,
            duty=duty.name,
        )
        failure.__cause__ = error
        self.fail(failure)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _recover(self) -> None:
        """Wait until everything launched has ended, then put all flags back."""
        if self._lost:
            raise StepError(f"the device is lost ({self._lost}): load the model again", step=self._number, usable=False)
        self._settle(2 * self.deadline)  # the watchdog comes first
        stuck = [worker.name for worker in self.workers if worker.stuck]
        if stuck:
            raise StepError(
                f"work that was given up is still running in {', '.join(stuck)}: try again when it has returned",
                step=self._number,
                side="host",
                usable=False,
            )
        for step in self._graphs:
            for duty in step.duties:
                duty.answer.value = 0
            self._rebase(step)
        self._base, self._base_value = self._number, self.finished_flag.value
        self._failure = None
        self._dirty = False

    def _rebase(self, step: StepGraph) -> None:
        """Count launches as its bells do: a step may have been posted and never launched."""
        bells = {duty.bell.value // RING for duty in step.duties if duty.bell is not None}
        if len(bells) > 1:
            raise StepError(f"bells of one graph differ: {sorted(bells)}", step=self._number, usable=False)
        step.launches = bells.pop() if bells else 0

    def _settle(self, deadline: float, launching: bool = False) -> None:
        """Wait until the device and all workers are idle. launching: another thread may be inside a launch."""
        self.cancel()
        clock = self.device.clock
        end = clock.now() + (deadline or float("inf"))
        while True:
            try:
                busy = [worker.name for worker in self.workers if worker.done != worker.posted]
                if not busy and self.finished >= self._number:
                    return
                # a step that was posted may never have been launched; only the device knows
                if not launching and self.device.is_idle():
                    self.release()
                    if not busy:
                        return
            except DeviceError as error:
                self.lose(str(error))
                raise
            if clock.now() >= end:
                if not busy:
                    self.lose(f"it did not end within {deadline:g} s")
                raise StepError(
                    f"steps that were given up do not end within {deadline:g} s: {', '.join(busy) or 'the device'} is "
                    f"still busy; {'try again later' if busy else 'load the model again'}",
                    step=self._number,
                    usable=False,
                )
            clock.pause(_POLL)


_OPEN: weakref.WeakSet[Steps] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for steps in list(_OPEN):
        steps.close()
