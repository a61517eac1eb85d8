"""Steps on a CUDA device: what test_proofs.py shows on the simulated one, where a real one can be made to do it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from freetoken.device.base import Stream
from freetoken.device.cuda import WAITS, CudaDevice
from freetoken.duties import Duty, Steps, Worker
from freetoken.errors import StepError

pytestmark = pytest.mark.gpu
N = 256


class Model:
    """Layers whose duty turns what the device sends into what it waits for, and rows without a bell.

    wrong: () int64, on the device: how many values it found that were not the answers to its questions.
    """

    def __init__(self, device: CudaDevice, *, layers: int = 1, kernels: int = 20, deadline: float = 0.0) -> None:
        self.device = device
        self.experts, self.rows = Worker("experts"), Worker("rows")
        self.steps = Steps(device, [self.experts, self.rows], deadline)
        self.before: Callable[[], object] = lambda: None
        self.questions = device.host_tensor((layers, N), torch.int64)
        self.answers = device.host_tensor((layers, N), torch.int64)
        self.row = device.host_tensor((1,), torch.int64)
        on = device.torch_device
        self.x = torch.zeros(N, dtype=torch.int64, device=on)
        self.y = torch.zeros(N, dtype=torch.int64, device=on)
        self.read, self.last = torch.zeros(2, 1, dtype=torch.int64, device=on)
        self.wrong = torch.zeros((), dtype=torch.int64, device=on)
        self._compare()
        self._compare_row()
        self.x.add_(1)
        torch.cuda.synchronize()
        for tensor in (self.x, self.wrong, self.last):
            tensor.zero_()
        torch.cuda.synchronize()
        bells, answers = device.flags(layers), device.flags(layers)
        row_answer = device.flags(1)[0]

        def build(stream: Stream) -> None:
            side = stream.fork()
            side.kernel(lambda: self.y.sum())
            stream.wait(row_answer, take=False)
            stream.copy(self.read, self.row)
            stream.take(row_answer)
            stream.kernel(self._compare_row)
            stream.join(side)
            for i in range(layers):
                stream.kernel(lambda: self.x.add_(1))
                stream.copy(self.questions[i], self.x)
                stream.ring(bells[i])
                stream.wait(answers[i])
                stream.copy(self.y, self.answers[i])
                stream.kernel(self._compare)
                for _ in range(kernels):
                    stream.kernel(lambda: self.y.add_(1))
            stream.ring(self.steps.finished_flag)

        self.graph = device.capture(build)
        duties = [Duty("experts", i, lambda i=i: self._do(i), answers[i], bells[i]) for i in range(layers)]  # type: ignore[misc]
        self.step = self.steps.bind(
            self.graph, {self.experts: duties, self.rows: [Duty("rows", None, self._read, row_answer)]}
        )

    def _compare(self) -> None:
        self.wrong.add_((self.y != self.x * 31 + 7).sum())

    def _compare_row(self) -> None:
        """Rows of steps that were skipped are those of a step before."""
        self.wrong.add_((self.read < self.last).sum())
        self.last.copy_(self.read)

    def _do(self, layer: int) -> None:
        self.before()
        torch.add(self.questions[layer] * 31, 7, out=self.answers[layer])

    def _read(self) -> None:
        self.row[0] = self.rows.number

    def run(self, n: int) -> None:
        """n steps, two at once."""
        before = None
        for _ in range(n):
            number = self.steps.launch(self.step)
            if before is not None:
                self.steps.wait(before)
            before = number
        self.steps.wait(before or 0)

    def check(self, n: int = 3) -> None:
        """From now on all is well."""
        torch.cuda.synchronize()
        self.wrong.zero_()
        torch.cuda.synchronize()
        self.run(n)
        torch.cuda.synchronize()
        assert self.wrong.item() == 0
        assert self.last.item() == self.steps.number
        assert all(duty.answer.value == 0 for duty in self.step.duties if duty.bell is not None)
        assert self.steps.usable


@pytest.fixture(params=WAITS)
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    device = CudaDevice(waits=request.param)
    yield device
    device.close()


def test_every_answer_is_waited_for_and_used_once(device: CudaDevice) -> None:
    model = Model(device, layers=4)
    model.check(500)
    model.steps.close()


def test_the_check_sees_a_wrong_answer(device: CudaDevice) -> None:
    model = Model(device, layers=2)
    model.before = lambda: model.questions[1].add_(1)
    with pytest.raises(AssertionError):
        model.check()
    model.steps.close()


def test_a_launch_may_block_because_its_graph_is_larger_than_the_queue(device: CudaDevice) -> None:
    model = Model(device, kernels=6000)
    model.before = lambda: time.sleep(0.3)
    model.check()
    model.steps.close()


def test_the_old_order_blocks(device: CudaDevice) -> None:
    """The reason for all this: the launch of a large graph returns only when it was answered."""
    model = Model(device, kernels=6000)
    launch = threading.Thread(target=device.launch, args=(model.graph,), daemon=True)
    launch.start()
    launch.join(1.0)
    blocked = launch.is_alive()
    for worker, line in model.step.lines.items():
        worker.post(line, 2, 1)
    launch.join(20)
    assert not launch.is_alive()
    while not device.is_idle():
        time.sleep(1e-3)
    model.steps.close()
    if not blocked:
        pytest.skip("the queue of this device takes the graph")


def test_a_failed_duty_is_named_and_the_next_generation_works(device: CudaDevice) -> None:
    model = Model(device, layers=3)

    def fail() -> None:
        if model.experts.number == 5 and model.experts.duty.layer == 1:  # type: ignore[union-attr]
            raise OSError("no room")

    model.before = fail
    with pytest.raises(StepError, match="step 5: layer 1, experts failed: OSError: no room"):
        model.run(10)
    model.check(50)
    model.steps.close()


def test_a_duty_that_calls_the_device_is_refused(device: CudaDevice) -> None:
    model = Model(device)
    model.before = device.is_idle
    with pytest.raises(StepError, match="experts failed: DeviceError: the work of a duty called is_idle"):
        model.run(1)
    model.before = lambda: None
    model.check()
    model.steps.close()


@pytest.mark.parametrize("kernels", [20, 6000])
def test_a_duty_that_never_returns_is_given_up(device: CudaDevice, kernels: int) -> None:
    """Also where the launch itself waits for it."""
    model = Model(device, kernels=kernels, deadline=0.5)
    release = threading.Event()
    model.before = release.wait
    with pytest.raises(StepError, match="layer 0, experts: its work has not returned") as caught:
        model.run(2)
    assert caught.value.facts["side"] == "host" and not caught.value.facts["usable"]
    assert not model.steps.usable
    with pytest.raises(StepError, match="work that was given up is still running in experts"):
        model.steps.launch(model.step)
    release.set()
    end = time.monotonic() + 20
    while not model.steps.usable:
        assert time.monotonic() < end
        time.sleep(1e-3)
    model.check()
    model.steps.close()


def test_ctrl_c_in_a_wait_cancels_at_once(device: CudaDevice) -> None:
    model = Model(device)
    release = threading.Event()
    model.before = release.wait
    number = model.steps.launch(model.step)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        model.steps.wait(number)
    assert not device.is_idle(), "it waited for the step"
    release.set()
    model.check()
    model.steps.close()


def test_closing_while_a_step_is_parked_releases_it(device: CudaDevice) -> None:
    model = Model(device, layers=3)
    model.before = lambda: time.sleep(0.2)
    model.steps.launch(model.step)
    number = model.steps.launch(model.step)
    model.steps.close()
    assert model.steps.finished == number and device.is_idle()
    with pytest.raises(StepError, match="closed"):
        model.steps.launch(model.step)


def test_a_step_that_was_posted_and_not_launched_is_recovered_from(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(device, layers=2)
    model.run(2)

    def refuse(graph: object) -> None:
        raise MemoryError("no launch")

    with monkeypatch.context() as patch:
        patch.setattr(device, "launch", refuse)
        with pytest.raises(MemoryError, match="no launch"):
            model.run(1)
    model.check()
    model.steps.close()
