"""Layers that the host computes for a device: what `Executor.run` gives, through the coordinator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from freetoken import formats
from freetoken.device.base import Device
from freetoken.device.simulated import SimulatedDevice
from freetoken.duties.steps import StepGraph
from freetoken.errors import StepError
from freetoken.executor import Activation, BoundLayer, Executor
from freetoken.offload.host import HostExperts
from tests.support.devices import DEVICES, open_for_test
from tests.test_executor import EXPERTS, TOP_K, make_bank, make_input


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    yield from open_for_test(request.param, lambda: SimulatedDevice(3, queue_nodes=4))


def bound(executor: Executor, name: str = "q8_0") -> BoundLayer:
    return executor.bind(make_bank(formats.get(name)), Activation())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bits_as_a_call(device: Device, dtype: torch.dtype) -> None:
    executor = Executor((0, 1), dtype)
    layers = [bound(executor, name) for name in ("q8_0", "nvfp4")]
    host = HostExperts(device, executor)
    on = device.torch_device
    launched: list[int] = []
    for n in (1, 3, 4, 1, 700, 2):
        for number, layer in enumerate(layers):
            x, ids, weights = make_input(n, seed=n)
            x = x.to(dtype)
            expected = layer.run(x, ids, weights)
            out = host.run(number, layer, launched, x.to(on), ids.to(on), weights.to(on))
            host.finish(launched)
            assert out.dtype == dtype and torch.equal(out.cpu(), expected)
    host.close()


def test_results_are_the_callers_own(device: Device) -> None:
    executor = Executor((0,), torch.float32)
    layer, host = bound(executor), HostExperts(device, executor)
    inputs = [make_input(2, seed=seed) for seed in range(8)]
    found = [host.run(0, layer, [], *(t.to(device.torch_device) for t in one)) for one in inputs]
    for one, out in zip(inputs, found, strict=True):
        assert torch.equal(out.cpu(), layer.run(*one))
    host.close()


def test_ids_of_nobody(device: Device) -> None:
    executor = Executor((0,), torch.float32)
    layer, host = bound(executor), HostExperts(device, executor)
    x, ids, weights = make_input(3)
    ids = torch.full((3, TOP_K), EXPERTS)
    ids[2, 0] = -1
    assert not host.run(0, layer, [], *(t.to(device.torch_device) for t in (x, ids, weights))).any()
    host.close()


def cancel_next(host: HostExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is cancelled on its way, as all are when one fails."""
    launch = host.steps.launch

    def launch_and_cancel(graph: StepGraph) -> int:
        monkeypatch.undo()
        number = launch(graph)
        host.steps.cancel()
        return number

    monkeypatch.setattr(host.steps, "launch", launch_and_cancel)


def test_a_failure_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each step that was on its way, whenever it is asked for; the layer is right afterwards."""
    executor = Executor((0,), torch.float32)
    layer, host = bound(executor), HostExperts(SimulatedDevice(4), executor)
    one = make_input(2)
    before: list[int] = []
    assert torch.equal(host.run(0, layer, before, *one), layer.run(*one))
    host.finish(before)
    cancel_next(host, monkeypatch)
    mine: list[int] = []
    assert not torch.equal(host.run(0, layer, mine, *make_input(2, seed=9)), layer.run(*make_input(2, seed=9)))
    with pytest.raises(StepError, match="cancelled"):
        host.finish(mine)
    theirs: list[int] = []
    assert torch.equal(host.run(0, layer, theirs, *one), layer.run(*one))
    host.finish(theirs)
    with pytest.raises(StepError, match="cancelled"):
        host.finish(mine)
    host.finish(before)
    host.close()
    with pytest.raises(StepError, match="closed"):
        host.run(0, layer, [], *one)
