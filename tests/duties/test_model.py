"""A small model of the protocol, searched through all its interleavings.

What is one atomic operation in worker.h, futex.h and steps.py is one action here. The model has a launching thread, a
device with a queue of bounded length, a worker that parks, and somebody who cancels; layers that the device answers
itself, work that fails, and steps that the device is told of before or after the worker (the old order).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest


class State(NamedTuple):
    """Everything there is. Steps count from 1; nodes through all steps."""

    launcher: str = "room"
    number: int = 0  # the step that was begun last
    accepted: int = 0  # nodes in the device's queue, ever
    executed: int = 0
    finished: int = 0
    posted: int = 0
    count: int = 0  # of the event
    sleepers: int = 0
    dirty: bool = False
    skip: int = 0
    cancels: int = 0
    canceller: str = "idle"
    worker: str = "look"
    seen: int = 0
    done: int = 0
    at: int = 0
    fails: int = 0
    bells: tuple[tuple[int, bool], ...] = ()  # of each layer: step, answered by the device
    answers: tuple[int, ...] = ()  # of each layer: 0, or for which step it is


@dataclass(frozen=True)
class Model:
    """queue: room for nodes. without_bell: the first layer's duty begins when its step is posted. careless: a fault."""

    steps: int = 3
    layers: int = 2
    queue: int = 2
    cancels: int = 1
    fails: int = 1
    without_bell: bool = False
    old_order: bool = False
    careless: str = ""

    @property
    def nodes(self) -> int:
        """Of a step: each layer's ring, wait and kernel, and the end."""
        return 3 * self.layers + 1

    def start(self) -> State:
        return State(bells=((0, False),) * self.layers, answers=(0,) * self.layers)

    def is_end(self, s: State) -> bool:
        idle = s.worker == "asleep" and s.launcher == "end" and s.canceller == "idle"
        return idle and s.finished == self.steps and s.done == s.posted

    def moves(self, s: State) -> Iterator[State]:
        yield from self.launcher_moves(s)
        yield from self.device_moves(s)
        yield from self.worker_moves(s)
        yield from self.canceller_moves(s)

    # -- Steps.launch

    def launcher_moves(self, s: State) -> Iterator[State]:
        if s.launcher == "room":
            if s.number == self.steps:
                yield s._replace(launcher="end")
            elif s.dirty:
                if s.finished == s.number and s.done == s.posted:  # _recover
                    assert not any(s.answers), f"left over: {s}"
                    yield s._replace(dirty=False)
            elif s.number - s.finished < 2 and s.posted - s.done < 2:
                first = "launch" if self.old_order else "post"
                yield s._replace(launcher=first, number=s.number + 1)
        elif s.launcher == "post":
            yield s._replace(launcher="signal", posted=s.posted + 1)
        elif s.launcher == "signal":
            yield s._replace(launcher="wake", count=s.count + 1)
        elif s.launcher == "wake":
            after = "room" if self.old_order else "launch"
            yield self.wake(s)._replace(launcher=after)
        elif s.launcher == "launch":
            if s.accepted < s.number * self.nodes:
                if s.accepted - s.executed < self.queue:
                    yield s._replace(accepted=s.accepted + 1)
            else:
                yield s._replace(launcher="post" if self.old_order else "room")

    @staticmethod
    def wake(s: State) -> State:
        if s.sleepers and s.worker == "asleep":
            return s._replace(worker="awake")
        return s

    # -- a graph

    def device_moves(self, s: State) -> Iterator[State]:
        if s.executed == s.accepted:
            return
        step, node = divmod(s.executed, self.nodes)
        step += 1
        layer, kind = divmod(node, 3)
        done = s._replace(executed=s.executed + 1)
        if node == self.nodes - 1:
            yield done._replace(finished=step)
        elif kind == 0:
            yield done._replace(bells=put(s.bells, layer, (step, False)))
            if layer == self.layers - 1 and not (self.without_bell and layer == 0):  # may have nothing for the host
                yield done._replace(bells=put(s.bells, layer, (step, True)), answers=put(s.answers, layer, step))
        elif kind == 1:
            if s.answers[layer]:
                assert s.answers[layer] == step, f"step {step} took the answer of another: {s}"
                yield done._replace(answers=put(s.answers, layer, 0))
        else:
            yield done

    # -- Worker.drive, ft_worker_poll and ft_event_wait

    def worker_moves(self, s: State) -> Iterator[State]:
        step, at = s.done + 1, s.at
        if s.worker == "look":
            yield s._replace(worker="idle", seen=s.count)
        elif s.worker == "idle":
            if s.posted > s.done:
                yield s._replace(worker="bell", at=0)
            else:
                yield s._replace(worker="park")
        elif s.worker == "park":
            careless = self.careless == "sleeps without a look"
            yield s._replace(worker="asleep" if careless else "sleep", sleepers=s.sleepers + 1)
        elif s.worker == "sleep":  # the system compares the count and sleeps, as one
            yield s._replace(worker="asleep" if s.count == s.seen else "awake")
        elif s.worker == "awake":
            yield s._replace(worker="look" if s.count != s.seen else "sleep", sleepers=s.sleepers - (s.count != s.seen))
        elif s.worker == "bell":
            if self.careless == "skips without a bell" and s.skip >= step:
                yield s._replace(worker="empty")
                return
            rung, answered = s.bells[at]
            if self.without_bell and at == 0:
                yield s._replace(worker="empty")
            elif rung > step or (rung == step and answered):
                yield self.next(s)
            elif rung == step:
                yield s._replace(worker="empty")
        elif s.worker == "empty":
            if not s.answers[at] or self.careless == "answers without a look":
                yield s._replace(worker="answer" if s.skip >= step else "run")
        elif s.worker == "run":
            yield s._replace(worker="answer")
            if s.fails < self.fails:
                yield s._replace(worker="answer", fails=s.fails + 1, dirty=True, skip=max(s.skip, s.number))
        elif s.worker == "answer":
            assert not s.answers[at], f"an answer on top of another: {s}"
            yield self.next(s._replace(answers=put(s.answers, at, step)))

    def next(self, s: State) -> State:
        if s.at + 1 < self.layers:
            return s._replace(worker="bell", at=s.at + 1)
        return s._replace(worker="look", done=s.done + 1, at=0)

    # -- Steps.cancel

    def canceller_moves(self, s: State) -> Iterator[State]:
        if s.canceller == "idle" and s.cancels < self.cancels:
            yield s._replace(canceller="skip", cancels=s.cancels + 1, dirty=True)
        elif s.canceller == "skip":
            yield s._replace(canceller="signal", skip=max(s.skip, s.number))
        elif s.canceller == "signal":
            yield s._replace(canceller="wake", count=s.count + 1)
        elif s.canceller == "wake":
            yield self.wake(s)._replace(canceller="idle")


def put(values: tuple, i: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:i], value, *values[i + 1 :])


class DeadlockError(AssertionError):
    """Nothing can move, and it is not the end."""


def search(model: Model) -> int:
    """Visit every state; how many there are. Raises `DeadlockError` with the one that has no way out."""
    start = model.start()
    seen, todo = {start}, deque([start])
    ends = 0
    while todo:
        state = todo.popleft()
        stuck = True
        for after in model.moves(state):
            stuck = False
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if stuck:
            if not model.is_end(state):
                raise DeadlockError(f"{state}")
            ends += 1
            assert not any(state.answers), f"an answer that nobody took: {state}"
    assert ends
    return len(seen)


@pytest.mark.parametrize("without_bell", [False, True])
@pytest.mark.parametrize("upsets", [0, 1])  # cancelling wakes, so it could hide a wake-up that is lost
@pytest.mark.parametrize("queue", [1, 2, 4, 30])
def test_the_new_order_has_no_deadlock_and_loses_no_wake_up(queue: int, upsets: int, without_bell: bool) -> None:
    states = search(Model(queue=queue, cancels=upsets, fails=upsets, without_bell=without_bell))
    print(f"queue of {queue}, {upsets} cancels and failures, without bell {without_bell}: {states} states")
    assert states > (10_000 if upsets else 200)


@pytest.mark.parametrize("queue", [1, 2, 4, 5])
def test_the_old_order_has_a_deadlock(queue: int) -> None:
    """The launch waits for room behind a wait whose duty comes after it: the queue is shorter than a step."""
    with pytest.raises(DeadlockError, match="launcher='launch'"):
        search(Model(queue=queue, old_order=True, cancels=0, fails=0))


def test_the_old_order_has_none_where_a_step_fits_the_queue() -> None:
    assert search(Model(queue=30, old_order=True, cancels=0, fails=0, steps=1)) > 20


@pytest.mark.parametrize(
    ("careless", "found"),
    [
        ("sleeps without a look", "worker='asleep'"),
        ("skips without a bell", "on top of another"),
        ("answers without a look", "on top of another"),
    ],
)
def test_faults_are_found(careless: str, found: str) -> None:
    upset = careless == "skips without a bell"
    model = Model(careless=careless, cancels=int(upset), fails=0, without_bell=not upset, layers=1, queue=30)
    with pytest.raises(AssertionError, match=found):
        search(model)
