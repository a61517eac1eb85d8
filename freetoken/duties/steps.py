"""Steps: graphs that wait for the host, launched so that nothing can wait for ever.

The order that makes it so: a step's duties are posted to workers, whose threads run already, and only then is its
graph launched, by a thread that sets no flag. A launch may block until the device has gone on, which it does, because
the workers answer; the first duty that is not answered has all that it waits for. A step that fails, is cancelled or is
late is skipped: its duties are answered without work, so that its graph ends. Before the next launch all that was
launched has ended and all flags are as at the beginning (`_recover`).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from freetoken import settings
from freetoken.device.base import Actor, Device, Flag, Graph, is_in_duty, refuse_in_duty
from freetoken.duties._worker import RING, Line, Worker
from freetoken.duties.duty import Duty
from freetoken.duties.watchdog import Watchdog
from freetoken.errors import DeviceError, StepError

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
"""Steps that are launched and not finished: while one runs the next is prepared."""
_CLOSE = 5.0
"""Seconds that closing waits for what is on its way."""
_REMEMBERED = 1024
"""Recoveries whose cancelled steps are known."""
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
        if deadline is not None and not 0 <= deadline < float("inf"):
            raise ValueError(f"deadline is {deadline}, expected seconds, or 0 for none")
        self.device = device
        self.workers = tuple(workers)
        self.deadline = settings.STEP_DEADLINE.read() if deadline is None else deadline
        self.finished_flag: Flag = device.flags(1)[0]
        self._graphs: weakref.WeakSet[StepGraph] = weakref.WeakSet()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of a launch
        self._launcher = 0  # the thread inside it
        self._state = threading.RLock()  # of what follows, against the watchdog
        self._number = 0  # the last step that was begun
        self._in_flight: deque[tuple[int, StepGraph]] = deque()  # may be nobody else's any more
        self._base = 0, 0  # a step, and the finished flag's value after it
        self._recovered = 0  # the last step that was begun before the last recovery
        self._cancelled: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # steps from one to the other
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
        before = [duty for step in self._graphs for duty in step.duties]
        taken.update(duty.bell.address for duty in before if duty.bell is not None)
        answers = {duty.answer.address for duty in before}
        for duty in (duty for line in duties.values() for duty in line):
            for flag, own in ((duty.answer, taken), (duty.bell, taken | answers)):
                if flag is None:
                    continue
                if flag.address in own:
                    raise ValueError(f"{duty}: {flag} is used twice, a duty's bell and its graph's answers are its own")
                taken.add(flag.address)
        step = StepGraph(graph, {worker: Line(line) for worker, line in duties.items()})
        self._rebase(step)
        self._graphs.add(step)
        return step

    @property
    def finished(self) -> int:
        """The number of the last step whose graph has ended."""
        number, value = self._base
        return number + ((self.finished_flag.value - value) & 0xFFFFFFFF) // RING

    @property
    def number(self) -> int:
        """The number of the last step that was begun."""
        return self._number

    @property
    def usable(self) -> bool:
        """Whether steps can be launched: the device answers, and no work that was given up is still running."""
        return not (self._closed or self._lost or any(worker.stuck for worker in self.workers))

    def launch(self, step: StepGraph, tail: Graph | None = None) -> int:
        """Launch a step and return its number; waits while `MAX_IN_FLIGHT` are on their way.

        tail: a graph without waits that is launched right behind, as a part of the step; then its last operation rings
        `finished_flag`, not that of the step's own graph.

        Raises the `StepError` of a step before that failed. Whatever is raised, no flag is left waiting.
        """
        self._check("launch")
        if step not in self._graphs:
            raise ValueError("this graph was bound to other steps")
        with self._lock:
            self._launcher = threading.get_ident()
            try:
                self._let_end(lambda: not self._is_full())
                self._post_and_launch(step, tail)
            except BaseException:
                self.cancel()
                if self._closed:
                    self.release(self._number)
                raise
            finally:
                self._launcher = 0
            return self._number

    def _post_and_launch(self, step: StepGraph, tail: Graph | None) -> None:
        while self._in_flight and self._in_flight[0][0] <= self.finished:
            self._in_flight.popleft()
        if not self._number & 0xFFFFF:
            self._count_from(self.finished)
        self._number += 1
        self._in_flight.append((self._number, step))
        step.launches += 1
        bell = RING * step.launches
        for worker, line in step.lines.items():
            worker.post(line, bell & 0xFFFFFFFF, self._number)
        self._check("launch")  # it may have been closed meanwhile
        self.device.launch(step.graph)
        if tail is not None:
            self.device.launch(tail)

    def _is_full(self) -> bool:
        # a worker may be behind the device, which answers itself where the host has nothing to do
        behind = [self._number - self.finished, *(worker.posted - worker.done for worker in self.workers)]
        return max(behind) >= MAX_IN_FLIGHT

    def _let_end(self, enough: Callable[[], bool]) -> None:
        """Recover from what went wrong, if something did, else wait until it is enough."""
        while True:
            self._raise_failure()
            self._check("launch")
            if self._dirty:
                self._recover()
            elif enough():
                return
            else:
                self.device.clock.pause(_POLL)

    def drain(self) -> None:
        """Return when nothing is on its way, and whatever went wrong is over; raises as `launch` does."""
        self._check("drain")
        with self._lock:
            try:
                self._let_end(lambda: self.finished >= self._number)
            except BaseException:
                self.cancel()
                raise

    def wait(self, number: int) -> None:
        """Return when a step has ended; raises `StepError` if it or one before failed or was cancelled.

        Sleeps shortly and often: Ctrl-C arrives, and cancels.
        """
        self._check("wait", closing=True)
        if number > self._number:
            raise ValueError(f"step {number} was never launched, the last one is {self._number}")
        try:
            while not self._has_ended(number):
                self.device.clock.pause(_POLL)
        except BaseException:
            self.cancel()
            raise

    def _has_ended(self, number: int) -> bool:
        finished = self.finished  # looked at first: a step that is skipped ends after it was marked
        with self._state:
            if self._dirty and number > self._valid:
                self._raise_failure()
                raise StepError(f"step {number} was cancelled", step=number)
            if any(first <= number <= last for first, last in self._cancelled):
                raise StepError(f"step {number} was cancelled", step=number)
            return finished >= number

    def cancel(self) -> None:
        """Skip what is left of all steps that were launched. Does not wait; work that has begun ends by itself."""
        with self._state:
            if not self._dirty:
                self._valid = self.finished
                self._dirty = True
            for worker in self.workers:
                worker.skip(self._number)

    def fail(self, number: int, error: StepError) -> bool:
        """Cancel because of what was seen of a step, which the next `launch` or `wait` raises; the first one counts.

        False, and nothing is done, if that step is over by now.
        """
        with self._state:
            if number <= self._recovered or (self._dirty and number <= self._valid):
                return False
            if self._failure is None and not self._dirty:
                self._failure = error
            self.cancel()
            return True

    def release(self, number: int) -> None:
        """Set every flag that graphs of steps up to this one may wait for: the device has ended, or does not go on."""
        with self._state:
            for worker in self.workers:
                worker.drop(number)
            if self.finished < number and number > self._recovered:
                for step in list(self._graphs):
                    for duty in step.duties:
                        duty.answer.value = 1

    def lose(self, why: str) -> None:
        """The device does not answer any more: nothing will be launched."""
        self._lost = self._lost or why

    def close(self) -> None:
        """End: what is on its way is skipped, threads return. May be called again, and while a step is parked.

        What does not end within some seconds is released, and left to itself.
        """
        refuse_in_duty("close")
        self._close(settle=True)

    def _close(self, settle: bool) -> None:
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        if os.getpid() != self._pid:  # its threads and its device are the parent's
            return
        self.cancel()
        if settle and self._launcher != threading.get_ident():  # else a signal's handler, inside a launch
            launching = not self._lock.acquire(blocking=False)
            try:
                self._settle(min(self.deadline or _CLOSE, _CLOSE), launching)
            except (StepError, DeviceError):
                logger.warning("steps were closed that do not end: their flags are released")
            if not launching:
                self._lock.release()
        self.release(self._number)
        actors: tuple[Actor, ...] = (*self.workers, self.watchdog)
        for actor in actors:
            actor.stop()

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "watchdog"):  # else it was never whole
            self._close(settle=not is_in_duty())

    def _check(self, operation: str, closing: bool = False) -> None:
        """Raise where an operation cannot be done: by a duty's work, after a fork, after `close`."""
        refuse_in_duty(operation)
        if os.getpid() != self._pid:
            raise StepError(
                "these steps were made before a fork: load the model in the child instead", step=0, usable=False
            )
        if self._closed and not closing:
            raise StepError("these steps are closed: load the model again", step=self._number, usable=False)

    def _duty_failed(self, duty: Duty, number: int, error: BaseException) -> None:
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - whatever it is, the duty's failure must not be lost
            text = "(its text cannot be had)"
        failure = StepError(
            f"step {number}: {duty} failed: {type(error).__name__}: {text}",
            step=number,
            side="host",
            layer=duty.layer,
            duty=duty.name,
        )
        failure.__cause__ = error
        self.fail(number, failure)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _recover(self) -> None:
        """Wait until everything launched has ended, then put all flags back."""
        if self._lost:
            raise StepError(f"the device is lost ({self._lost}): load the model again", step=self._number, usable=False)
        self._settle(max(2 * self.deadline, 1.0) if self.deadline else 0)  # the watchdog comes first
        stuck = [worker.name for worker in self.workers if worker.stuck]
        if stuck:
            raise StepError(
                f"work that was given up is still running in {', '.join(stuck)}: try again when it has returned",
                step=self._number,
                side="host",
                usable=False,
            )
        with self._state:
            for step in self._graphs:
                for duty in step.duties:
                    duty.answer.value = 0
                self._rebase(step)
            self._cancelled.append((self._valid + 1, self._number))
            self._recovered = self._number
            self._count_from(self._number)
            self._failure = None
            self._dirty = False

    def _count_from(self, number: int) -> None:
        """A step that is the last finished one now."""
        self._base = number, self.finished_flag.value

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
                    self.release(self._number)
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
