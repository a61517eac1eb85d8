"""Notices that a step does not get on, says whose fault that is, and lets it end."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from freetoken.duties._worker import Worker
from freetoken.errors import StepError

if TYPE_CHECKING:
    from freetoken.duties.steps import Steps


class Watchdog:
    """Looks at the progress of steps; `deadline` seconds without any is too late.

    Holds them weakly, and returns when they are gone.
    """

    name = "freetoken-watchdog"

    def __init__(self, steps: Steps, deadline: float) -> None:
        self._steps = weakref.ref(steps)
        self._deadline = deadline
        self.interval = deadline / 8
        self._stopped = threading.Event()
        self._seen: dict[object, tuple[object, float]] = {}
        self._released = False

    def run(self) -> None:
        """The body of a thread."""
        while not self._stopped.wait(min(self.interval, 1.0)) and self.look():
            pass

    def stop(self) -> None:
        """Let `run` return."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def look(self) -> bool:
        """Look once; False when there is nothing to look at any more.

        Work is late by itself. The device is late only while no work is running: else it waits for that.
        """
        steps = self._steps()
        if steps is None:
            return False
        now, number = steps.device.clock.now(), steps.number
        states = [(worker, worker.state, worker.moves) for worker in steps.workers]
        working = [(worker, state) for worker, state, _ in states if worker.phase == "run"]
        for worker, state, moves in states:
            if (worker, state) not in working:
                self._seen.pop(worker, None)
            elif (waited := self._unchanged(worker, (state, moves), now)) > self._deadline:
                self._late_work(steps, worker, state, waited)
        if working or steps.finished >= number:
            self._seen.pop("device", None)
            return True
        progress = (number, steps.finished, *(moves for _, _, moves in states))
        if (waited := self._unchanged("device", progress, now)) > self._deadline:
            if not self._released:
                self._late_device(steps, waited)
            self._released = True
            steps.release(number)
        else:
            self._released = False
        return True

    def _unchanged(self, what: object, state: object, now: float) -> float:
        """For how long something has been in this state."""
        before, since = self._seen.get(what, (None, now))
        if before != state:
            since = now
        self._seen[what] = state, since
        return now - since

    def _late_work(self, steps: Steps, worker: Worker, state: int, waited: float) -> None:
        number, duty = worker.number, worker.duty
        if duty is None or worker.state != state:
            return  # it has returned just now
        steps.fail(
            number,
            StepError(
                f"step {number}: {duty}: its work has not returned for {waited:.1f} s, and the graph waits for "
                f"{duty.answer}; the step was given up, the model can be used again when the work has returned",
                step=number,
                side="host",
                layer=duty.layer,
                duty=duty.name,
                waited=waited,
                usable=False,
            ),
        )
        if worker.answer(state, takeover=True):
            steps.device.spawn(worker)

    def _late_device(self, steps: Steps, waited: float) -> None:
        # the device is not asked what it does: that could block behind a launch
        waiting = [(worker.number, worker.phase, worker.duty) for worker in steps.workers if worker.duty is not None]
        number, phase, duty = min(waiting, key=lambda found: found[0], default=(steps.finished + 1, "", None))
        if duty is None:
            what = "all duties are done, and the device has not ended the step"
        elif phase == "bell":
            what = f"{duty}: the device has not rung {duty.bell}"
        else:
            what = f"{duty}: the device has not taken the last answer, {duty.answer},"
        steps.fail(
            number,
            StepError(
                f"step {number}: {what} for {waited:.1f} s; the step was given up, the model can be used again if the "
                "device goes on",
                step=number,
                side="device",
                layer=duty.layer if duty else None,
                duty=duty.name if duty else "",
                waited=waited,
            ),
        )
