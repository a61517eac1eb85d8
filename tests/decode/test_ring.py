"""The ring of tokens: a step's are there when it has ended, whatever the next one writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from freetoken.decode.ring import LENGTH, TokenRing
from freetoken.device.base import Device
from freetoken.device.simulated import SimulatedDevice
from freetoken.duties import Steps, Worker
from freetoken.duties.steps import MAX_IN_FLIGHT
from tests.support.devices import DEVICES, open_for_test


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    yield from open_for_test(request.param, lambda: SimulatedDevice(2, queue_nodes=4))


def test_tokens_of_steps_that_overlap(device: Device) -> None:
    """Each is read while the next step is on its way."""
    ring = TokenRing(device, 3)
    tokens = torch.zeros(3, dtype=torch.int64, device=device.torch_device)

    def work() -> None:
        tokens.add_(torch.arange(1, 4, device=tokens.device))
        ring.write(tokens)

    work()
    assert ring.fetch(0).tolist() == [1, 2, 3]
    with Steps(device, [Worker("nothing", 1)]) as steps:
        graph = device.capture(lambda stream: (stream.trace(work), ring.send(stream), stream.ring(steps.finished_flag)))  # type: ignore[func-returns-value]
        tokens.fill_(0)
        for tensor in ring.moved:
            tensor.zero_()
        device.launches().after(device.current().mark())
        step = steps.bind(graph, {})
        before = steps.launch(step)
        for n in range(3 * LENGTH):
            ahead = steps.launch(step)
            steps.wait(before)
            assert ring.read(n).tolist() == [n + 1, 2 * (n + 1), 3 * (n + 1)]
            before = ahead
        steps.wait(before)
    assert LENGTH > MAX_IN_FLIGHT
