"""Whole steps as graphs: they give what layers compute one by one, whatever changes between replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton

from freetoken import formats
from freetoken.device.base import Device
from freetoken.device.simulated import SimulatedDevice
from freetoken.device.simulated_streams import SimulatedStream
from freetoken.errors import ClosedError, DeviceError, FreeTokenError, StepError
from freetoken.executor import Activation, Executor
from freetoken.gpu.tables import MOST_ROUTES
from freetoken.offload.experts import DeviceExperts
from freetoken.offload.room import Asked, choose_room
from freetoken.offload.slots import LayerExperts
from freetoken.offload.split import fetch_table
from tests.test_executor import EXPERTS, HIDDEN, TOP_K, make_bank

pytestmark = pytest.mark.usefixtures("small_reserve")
LAYERS, WIDTH = 2, 32
WITH_CACHE = ("offload", "hybrid")
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


class Step:
    """Layers one after the other on fixed tensors, captured; and what they must give."""

    def __init__(self, device: Device, strategy: str, batch: int = 1, **how: Any) -> None:
        self.dtype = how.pop("dtype", torch.float32)
        self.masked = how.pop("masked", False)
        executor = Executor((0,), self.dtype)
        self.bound = [executor.bind(make_bank(formats.get("q8_0"), width=WIDTH), Activation()) for _ in range(LAYERS)]
        shapes = [LayerExperts.of(layer.bank, TOP_K) for layer in self.bound]
        cache = how.pop("cache", 2 * TOP_K * LAYERS) if strategy in WITH_CACHE else "auto"
        room = choose_room(shapes, 1 << 34, Asked(strategy, cache, how.pop("max_fetch", "auto")))
        self.experts = DeviceExperts(device, self.bound, shapes, room, self.dtype, **how)
        on = device.torch_device
        self.x = torch.zeros(batch, HIDDEN, dtype=self.dtype, device=on)
        self.ids = torch.zeros(LAYERS, TOP_K, batch, dtype=torch.int64, device=on).mT  # as routers may give them
        self.weights = torch.zeros(LAYERS, batch, TOP_K, device=on)
        self.out = torch.zeros(batch, HIDDEN, dtype=self.dtype, device=on)
        self.valid = torch.ones(batch, dtype=torch.bool, device=on) if self.masked else None
        self.random = np.random.default_rng(0)
        self.step = self.experts.capture(self.forward, self.valid)

    def forward(self) -> None:
        x = self.x
        for layer, ids, weights in zip(self.experts.layers, self.ids, self.weights, strict=True):
            x = x + layer.run(x, ids, weights)
        self.out.copy_(x)

    def draw(self) -> torch.Tensor:
        """New input, and what comes of it."""
        batch = len(self.x)
        x = torch.from_numpy(self.random.standard_normal((batch, HIDDEN)).astype(np.float32)).to(self.dtype)
        ids = np.stack([[self.random.permutation(EXPERTS)[:TOP_K] for _ in range(batch)] for _ in range(LAYERS)])
        weights = self.random.random((LAYERS, batch, TOP_K)).astype(np.float32)
        ids[self.random.random(ids.shape) < 0.1] = -1
        self.x.copy_(x)
        self.ids.copy_(torch.from_numpy(ids))
        self.weights.copy_(torch.from_numpy(weights))
        if self.valid is not None:
            valid = self.random.random(batch) < 0.5
            self.valid.copy_(torch.from_numpy(valid))
            ids[:, ~valid] = -1
        for layer, one, w in zip(self.bound, ids, weights, strict=True):
            x = x + layer.run(x, torch.from_numpy(one), torch.from_numpy(w))
        return x

    def run(self, times: int = 1) -> None:
        """Replay it with new input, and compare."""
        for _ in range(times):
            expected = self.draw()
            with self.experts.stepping():
                self.experts.wait(self.experts.launch(self.step))
            found = self.out.cpu()
            error = (found - expected).float().norm() / expected.float().norm()
            assert error <= BOUND[self.dtype], error


@pytest.mark.parametrize(
    ("strategy", "batch"),
    [("cpu", 1), ("cpu", 5), ("cpu", 8), ("offload", 1), ("offload", 5), ("hybrid", 1), ("hybrid", 5), ("hybrid", 8)],
)
def test_replays_are_what_layers_compute(device: Device, strategy: str, batch: int) -> None:
    """With ids of nobody, more tokens than a look-up takes, and experts that come and go."""
    step = Step(device, strategy, batch, masked=batch == 5)
    times = 6 if batch == 1 else 3
    step.run(times)
    usage = step.experts.usage()
    if strategy == "hybrid":
        assert step.experts.calibration is not None and "together" in usage.split
    if strategy == "cpu":
        assert usage.host_work.count == times * LAYERS or step.masked
        assert usage.waits == device.waits.kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["cpu", "hybrid"])
def test_other_numbers(device: Device, strategy: str, dtype: torch.dtype) -> None:
    Step(device, strategy, 2, dtype=dtype).run(2)


def test_resident(device: Device) -> None:
    step = Step(device, "resident", 2)
    step.run(3)
    assert step.experts.usage().waited.count == 0
    assert not step.step.duties


def test_the_split_changes_between_replays(device: Device) -> None:
    """Any table: the same sums, and counts that say who did what."""
    step = Step(device, "hybrid", 2, max_fetch=0)
    step.experts.forget()
    step.experts.reset_statistics()
    step.run(2)
    usage = step.experts.usage()
    assert usage.fetched_per_token == 0 and usage.computed_per_token > 0 and usage.hit_rate == 0
    for fetched in (1, 2, 100):
        step.experts.split_misses(fetch_table(lambda missing: min(missing, fetched)))  # noqa: B023
        step.run(2)
    usage = step.experts.usage()
    assert usage.fetched_per_token > 0 and usage.hit_rate is not None and usage.hit_rate > 0
    step.experts.forget()
    step.experts.reset_statistics()
    step.run()
    statistics = step.experts.usage().statistics
    assert statistics is not None and statistics.computed == 0 and statistics.fetched == statistics.misses > 0
    for _ in range(5):
        step.experts.split_misses(step.random.integers(-3, 12, MOST_ROUTES + 1).tolist())
        step.run()


def test_statistics_are_switched_between_replays(device: Device) -> None:
    step = Step(device, "hybrid", max_fetch=0)
    step.experts.forget()
    for on in (False, True, False):
        before = step.experts.usage()
        step.experts.count(on)
        step.run(2)
        after = step.experts.usage()
        assert before.statistics is not None and after.statistics is not None
        assert (after.statistics.routed > before.statistics.routed) == on
        assert (after.host_work.count > before.host_work.count) == on


def test_layers_that_are_refused_are_the_hosts(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be pinned."""
    monkeypatch.setenv("FREETOKEN_PIN_LIMIT", "0")
    step = Step(device, "hybrid", 2)
    step.run(3)
    assert step.experts.calibration is None and step.experts.usage().computed_per_token == 0
    assert len(step.step.duties) == LAYERS


def test_products_wait_for_what_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes; those of experts that were there do not."""
    fork, kernel = SimulatedStream.fork, SimulatedStream.kernel

    def slow(self: SimulatedStream) -> SimulatedStream:
        side = fork(self)
        monkeypatch.setattr(side, "kernel", lambda work, cost=0.0: kernel(side, work, 1.0), raising=False)
        return side

    monkeypatch.setattr(SimulatedStream, "fork", slow)
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles for the GPU here")
    step = Step(SimulatedDevice(3), "offload", 2)
    step.experts.forget()
    step.run(3)


def test_eager_calls_between_replays(device: Device) -> None:
    """They look up in the same slots."""
    step = Step(device, "hybrid", 2, max_fetch=0.5)
    for _ in range(4):
        step.run()
        expected = step.draw()
        step.forward()
        assert (step.out.cpu() - expected).norm() <= 1e-5 * expected.norm()


def test_a_step_that_is_cancelled(device: Device) -> None:
    """The wait says so; then all is well again."""
    step = Step(device, "cpu")
    step.run()
    step.experts.host.steps.cancel()
    step.draw()
    with step.experts.stepping():
        number = step.experts.launch(step.step)
        step.experts.host.steps.cancel()
        with pytest.raises(StepError, match="cancelled"):
            step.experts.wait(number)
    step.run(2)


def test_what_cannot_be_captured(device: Device) -> None:
    """The model is as it was."""
    step = Step(device, "hybrid", max_fetch=1)

    def waits() -> None:
        step.forward()
        if step.out.sum().item() > 0:
            step.forward()

    with pytest.raises((DeviceError, RuntimeError)):
        step.experts.capture(waits)
    with pytest.raises(FreeTokenError, match="inside a capture"):
        step.experts.capture(lambda: step.experts.capture(step.forward))
    step.run(2)


def test_closed(device: Device) -> None:
    step = Step(device, "hybrid", max_fetch=1)
    step.run()
    step.experts.close()
    with pytest.raises(ClosedError):
        step.experts.launch(step.step)
    with pytest.raises(ClosedError):
        step.experts.capture(step.forward)


def test_slots_do_not_leak_what_was_not_counted(device: Device) -> None:
    """Rows that do not count are nobody's: no fetch, no work of the host, no statistics."""
    step = Step(device, "hybrid", 4, masked=True, max_fetch=1)
    step.experts.forget()
    step.experts.reset_statistics()
    assert step.valid is not None
    step.draw()
    step.valid.zero_()
    with step.experts.stepping():
        step.experts.wait(step.experts.launch(step.step))
    usage = step.experts.usage()
    assert usage.statistics is not None and usage.statistics.routed == usage.host_work.count == 0
    assert torch.equal(step.out, step.x)
