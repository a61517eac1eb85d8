"""Steps whose layers go to the host only where the device finds that they must: data decides, replay by replay."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from freetoken.device.base import Stream, Trip
from freetoken.device.cuda import WAITS, CudaDevice
from freetoken.device.histogram import BUCKETS
from freetoken.device.simulated import SimulatedDevice
from freetoken.duties import Duty, Steps, Worker
from freetoken.duties._layer import LayerWork
from freetoken.errors import StepError
from freetoken.executor import as_numpy
from freetoken.kernels._experts import Scratch
from tests.duties.test_layer import E, H, K, make_layer

LAYERS, B = 3, 2


@pytest.fixture(params=["simulated", *(pytest.param(kind, marks=pytest.mark.gpu) for kind in WAITS)])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    device = SimulatedDevice(3, queue_nodes=5) if request.param == "simulated" else CudaDevice(waits=request.param)
    yield device
    device.close()


class Model:
    """Layers one after the other: each adds what the host computed of it to its own output."""

    def __init__(self, device: Any) -> None:
        self.device, self.worker, self.scratch = device, Worker("experts", 2), Scratch()
        self.steps = Steps(device, [self.worker])
        on = device.torch_device
        self.layers = [make_layer(i) for i in range(LAYERS)]
        self.waited = torch.zeros(3, BUCKETS, dtype=torch.int64, device=on)
        self.counting = torch.ones(1, dtype=torch.int32, device=on)
        self.out = torch.zeros(LAYERS, B, H, dtype=torch.bfloat16, device=on)
        self.trips = [self._trip() for _ in self.layers]
        duties = [Duty("experts", i, self._work(i), trip.answer, trip.bell) for i, trip in enumerate(self.trips)]
        if on.type == "cuda":
            torch.cuda.synchronize()
        self.step = self.steps.bind(device.capture(self._build), {self.worker: duties})

    def _trip(self) -> Trip:
        kinds = [((B, H), torch.bfloat16), ((B, K), torch.int32), ((B, K), torch.float32)]
        on = self.device.torch_device
        sent = tuple(
            (self.device.host_tensor(shape, kind), torch.zeros(*shape, dtype=kind, device=on)) for shape, kind in kinds
        )
        back, took = self.device.host_tensor(*kinds[0]), self.device.host_tensor((1,), torch.int64)
        times = torch.zeros(3, dtype=torch.int64, device=on)
        return Trip(*self.device.flags(2), sent[1][1], sent, back, took, times, self.waited, self.counting)

    def _work(self, i: int) -> LayerWork:
        trip = self.trips[i]
        x, ids, weights = (target for target, _ in trip.sent)
        return LayerWork(
            self.layers[i], as_numpy(x), ids.numpy(), weights.numpy(), as_numpy(trip.back), self.scratch, 2,
            trip.took.numpy(),
        )  # fmt: skip

    def _build(self, stream: Stream) -> None:
        for trip, out in zip(self.trips, self.out, strict=True):
            stream.ask(trip)
            side = stream.fork()
            side.kernel(lambda out=out: out.add_(1))  # type: ignore[misc]
            stream.join(side)
            stream.ready(trip)
            stream.wait(trip.answer)
            stream.add(trip, out)
        stream.ring(self.steps.finished_flag)

    def fill(self, rng: np.random.Generator) -> int:
        """New inputs; returns how many layers are the host's."""
        for trip in self.trips:
            (_, x), (_, ids), (_, weights) = trip.sent
            x.copy_(torch.from_numpy(rng.standard_normal((B, H), np.float32)))
            chosen = rng.integers(-1, E, (B, K))
            chosen[rng.random(B) < 0.4] = -1
            ids.copy_(torch.from_numpy(chosen))
            weights.copy_(torch.from_numpy(rng.random((B, K), np.float32)))
        self.out.copy_(torch.from_numpy(rng.standard_normal(self.out.shape, np.float32)))
        if self.out.is_cuda:
            torch.cuda.synchronize()
        return sum(bool((trip.ids >= 0).any()) for trip in self.trips)

    def expected(self) -> torch.Tensor:
        """What a step makes of out."""
        found = (self.out + 1).cpu()
        for layer, trip, out in zip(self.layers, self.trips, found, strict=True):
            x, ids, weights = (source.cpu() for _, source in trip.sent)
            back = torch.zeros(B, H, dtype=torch.bfloat16)
            layer.run(as_numpy(x), ids.numpy(), weights.numpy(), as_numpy(back), Scratch(), 1)
            rows = (ids >= 0).any(1)
            out[rows] = (out[rows].float() + back[rows].float()).to(out.dtype)
        return found


def test_each_layer_goes_to_the_host_where_it_must(device: Any) -> None:
    model, rng = Model(device), np.random.default_rng(0)
    done = 0
    for step in range(40):
        counting = step % 3 > 0
        model.counting.fill_(int(counting))
        n = model.fill(rng)
        expected = model.expected()
        number = model.steps.launch(model.step)
        model.steps.wait(number)
        assert torch.equal(model.out.cpu(), expected), f"step {step}"
        done += n * counting
        assert model.waited[0].sum() == model.waited[2].sum() == done
    assert model.waited[1].sum() <= done and 20 < done < 27 * LAYERS
    model.steps.close()


def test_trips_that_are_skipped_are_not_counted_and_the_next_step_is_right() -> None:
    device = SimulatedDevice(5, preemption=0.1)
    model, rng, chance = Model(device), np.random.default_rng(1), random.Random(1)
    ended = cancelled = most = 0
    for _ in range(200):
        n = model.fill(rng)
        expected = model.expected()
        if chance.random() < 0.3:
            device.later(chance.random() * 100e-6, model.steps.cancel)
        try:
            model.steps.wait(model.steps.launch(model.step))
        except StepError:
            cancelled += 1
            model.steps.drain()
        else:
            assert torch.equal(model.out, expected)
            ended += n
        most += n
        assert ended <= model.waited[2].sum() <= most
    assert cancelled > 20
    assert model.waited[2].sum() < most
    model.steps.close()
