"""Steps as graphs: captured once for a size, moving nothing, and again when the cache has moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from freetoken import formats
from freetoken.decode.graph import SHORTEST, SIZES, DecodeGraph, length_of, size_of
from freetoken.device.base import Device
from freetoken.device.simulated import SimulatedDevice
from freetoken.executor import Activation, Executor
from freetoken.offload.experts import DeviceExperts
from freetoken.offload.room import Asked, choose_room
from freetoken.offload.slots import LayerExperts
from tests.support.devices import DEVICES, open_for_test
from tests.test_executor import HIDDEN, TOP_K, make_bank


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    yield from open_for_test(request.param, lambda: SimulatedDevice(3))


class Model:
    """One layer of experts, whose input is what it gave before; random numbers are added."""

    def __init__(self, experts: DeviceExperts, rows: int) -> None:
        on = experts.device.torch_device
        self.layer = experts.layers[0]
        self.x = torch.ones(rows, HIDDEN, device=on)
        self.ids = torch.arange(rows * TOP_K, device=on).view(rows, TOP_K) % 4
        self.weights = torch.ones(rows, TOP_K, device=on)
        self.valid = torch.ones(rows, dtype=torch.bool, device=on)
        self.runs: list[tuple[int, int]] = []

    @property
    def moved(self) -> Sequence[torch.Tensor]:
        return (self.x,)

    def forward(self, rows: int, length: int) -> None:
        self.runs.append((rows, length))
        x = self.x[:rows]
        out = self.layer.run(x, self.ids[:rows], self.weights[:rows])
        x.add_(out / length + torch.empty_like(x).exponential_(1))


@pytest.fixture
def experts(device: Device) -> Iterator[DeviceExperts]:
    executor = Executor((0,), torch.float32)
    bound = [executor.bind(make_bank(formats.get("q8_0")), Activation())]
    shapes = [LayerExperts.of(layer.bank, TOP_K) for layer in bound]
    room = choose_room(shapes, 1 << 34, Asked("cpu", "auto", "auto"))
    made = DeviceExperts(device, bound, shapes, room, torch.float32)
    yield made
    made.close()


def test_replays_are_eager_steps(experts: DeviceExperts) -> None:
    """Captures move neither the input nor random numbers; each size is captured once."""
    model = Model(experts, 4)
    graph = DecodeGraph(experts, model)
    tail = None
    for rows in (4, 2, 4, 1):
        found = []
        for replayed in (False, True):
            model.x.fill_(0.5)
            torch.manual_seed(rows)
            if replayed:
                step = graph.step(rows, SHORTEST)
                tail = graph.tail("double", lambda: model.x.mul_(2), lambda stream: None, ())
                assert torch.equal(model.x, torch.full_like(model.x, 0.5))
            for _ in range(3):
                if replayed:
                    assert tail is not None
                    with experts.stepping():
                        experts.wait(experts.launch(step, tail))
                else:
                    model.forward(rows, SHORTEST)
                    model.x.mul_(2)
            with graph.between():
                found.append(model.x.clone())
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    captured = len(model.runs)
    graph.step(4, SHORTEST)
    assert len(model.runs) == captured
    graph.forget()
    graph.step(4, SHORTEST)
    assert len(model.runs) == captured + 2, "once to see that it runs, once captured"


def test_what_fails_moves_nothing(experts: DeviceExperts) -> None:
    model = Model(experts, 2)
    graph = DecodeGraph(experts, model)
    before = model.x.clone()

    def fail() -> None:
        model.x.add_(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        graph.tail("fails", fail, lambda stream: None, ())
    assert torch.equal(model.x, before)
    model.layer = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        graph.step(2, SHORTEST)
    assert torch.equal(model.x, before)


def test_sizes() -> None:
    assert [size_of(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]
    assert SIZES[-1] == 8
    assert [length_of(n) for n in (1, SHORTEST, SHORTEST + 1, 4 * SHORTEST)] == [
        SHORTEST, SHORTEST, 2 * SHORTEST, 4 * SHORTEST,
    ]  # fmt: skip
