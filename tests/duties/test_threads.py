"""Steps with real threads, on a device that is one."""

from __future__ import annotations

import _thread
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from freetoken.duties import Duty, StepGraph, Steps, Worker
from freetoken.errors import StepError
from tests.duties.thread_device import ThreadDevice

LAYERS = 4


class Model:
    """Layers whose input the device writes, whose output the host does, and which the device compares."""

    def __init__(self, queue_nodes: int = 64, deadline: float = 0.0) -> None:
        self.device = ThreadDevice(queue_nodes)
        self.worker = Worker("experts", patience=100)
        self.steps = Steps(self.device, [self.worker], deadline)  # type: ignore[arg-type]
        self.inputs, self.outputs = [0] * LAYERS, [0] * LAYERS
        self.compared = 0
        self.wrong: list[int] = []
        self.work: Callable[[int], None] = lambda layer: None
        self.step = self.bind(self.steps, self.device)

    def bind(self, steps: Steps, device: ThreadDevice) -> StepGraph:
        bells, answers = device.flags(LAYERS), device.flags(LAYERS)

        def build(stream: Any) -> None:
            for i in range(LAYERS):
                stream.kernel(lambda i=i: self.fill(i))
                stream.ring(bells[i])
                stream.wait(answers[i])
                stream.kernel(lambda i=i: self.compare(i))
            stream.ring(steps.finished_flag)

        duties = [
            Duty("experts", i, lambda i=i: self.do(i), answers[i], bells[i])  # type: ignore[misc]
            for i in range(LAYERS)
        ]
        return steps.bind(device.capture(build), {self.worker: duties})

    def fill(self, i: int) -> None:
        self.inputs[i] += i + 1

    def do(self, i: int) -> None:
        self.work(i)
        self.outputs[i] = 3 * self.inputs[i]

    def compare(self, i: int) -> None:
        if not self.steps._dirty:
            self.compared += 1
            if self.outputs[i] != 3 * self.inputs[i]:
                self.wrong.append(i)

    def run(self, n: int) -> None:
        """Two in flight."""
        before = None
        for _ in range(n):
            number = self.steps.launch(self.step)
            if before is not None:
                self.steps.wait(before)
            before = number
        if before is not None:
            self.steps.wait(before)
        assert not self.wrong


@pytest.fixture
def make() -> Iterator[Callable[..., Model]]:
    models: list[Model] = []

    def make_model(*args: Any, **options: Any) -> Model:
        models.append(Model(*args, **options))
        return models[-1]

    yield make_model
    for model in models:
        model.steps.close()
        model.device.close()


@pytest.mark.parametrize("queue_nodes", [1, 6, 64])
def test_steps_run(make: Callable[..., Model], queue_nodes: int) -> None:
    model = make(queue_nodes)
    model.run(100)
    assert model.compared == 100 * LAYERS
    assert model.worker.done == 100


def test_a_failure_surfaces_and_is_over(make: Callable[..., Model]) -> None:
    model = make(6)
    model.run(3)

    def fail(layer: int) -> None:
        if layer == 2:
            raise OSError("the disk is gone")

    model.work = fail
    with pytest.raises(StepError, match=r"step 4: layer 2, experts failed: OSError: the disk is gone") as caught:
        model.run(3)
    assert isinstance(caught.value.__cause__, OSError)
    model.work = lambda layer: None
    model.run(20)


def test_late_work_is_given_up_and_waited_for(make: Callable[..., Model]) -> None:
    model = make(6, deadline=0.3)
    release = threading.Event()
    model.work = lambda layer: release.wait() and None if layer == 1 else None
    with pytest.raises(StepError, match="layer 1, experts: its work has not returned") as caught:
        model.run(1)
    assert caught.value.facts["side"] == "host" and not caught.value.facts["usable"]
    with pytest.raises(StepError, match="work that was given up is still running in experts"):
        model.run(1)
    assert not model.steps.usable
    model.work = lambda layer: None
    release.set()
    end = time.monotonic() + 10
    while not model.steps.usable:
        assert time.monotonic() < end
        time.sleep(0.01)
    model.run(20)


def test_ctrl_c_in_a_wait(make: Callable[..., Model]) -> None:
    model = make(64)
    release = threading.Event()
    model.work = lambda layer: release.wait() and None
    number = model.steps.launch(model.step)
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        model.steps.wait(number)
    release.set()
    model.work = lambda layer: None
    model.run(20)


def test_closing_while_a_step_is_parked(make: Callable[..., Model]) -> None:
    model = make(2)
    model.work = lambda layer: time.sleep(0.2)
    blocked = threading.Thread(target=lambda: model.steps.launch(model.step), daemon=True)
    blocked.start()
    time.sleep(0.05)
    model.steps.close()
    blocked.join(10)
    assert not blocked.is_alive()
    end = time.monotonic() + 10
    while not model.device.is_idle():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_threads_end_with_their_steps() -> None:
    before = set(threading.enumerate())
    model = Model(deadline=5.0)
    model.run(5)
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"experts", "freetoken-watchdog", "device"}
    model.device.close()
    del model
    end = time.monotonic() + 10
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() < end, threads
        gc.collect()  # the worker lets go of the last step when it goes to sleep
        time.sleep(0.01)


PARKED = """
import time
from tests.duties.test_threads import Model
model = Model(64, deadline=30.0)
model.work = lambda layer: time.sleep(0.3)
model.steps.launch(model.step)
print("launched", flush=True)
"""


def test_a_process_ends_with_a_step_on_its_way() -> None:
    result = subprocess.run([sys.executable, "-c", PARKED], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "launched\n", "")


FORKED = """
import os, sys
from freetoken.errors import StepError
from tests.duties.test_threads import Model
model = Model(64, deadline=30.0)
model.run(3)
child = os.fork()
if not child:
    for call in (lambda: model.steps.launch(model.step), lambda: model.steps.wait(3), model.steps.drain):
        try:
            call()
        except StepError as error:
            assert "before a fork" in str(error), error
        else:
            os._exit(1)
    model.steps.close()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_use_after_a_fork_is_refused() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
