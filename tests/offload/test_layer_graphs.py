"""Layers called one by one: from the third call of a size on one graph each, and nothing else changes."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch

from freetoken.device.base import Device
from freetoken.device.simulated import SimulatedDevice
from freetoken.errors import DeviceError
from freetoken.gpu.gather import Gather
from tests.offload.test_capture import BOUND, LAYERS, Step
from tests.support.devices import with_interpreter

pytestmark = pytest.mark.usefixtures("small_reserve")
CALLS = 3
"""Of a size, until it is captured."""


@pytest.fixture
def replays(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that were replayed."""
    found: list[Any] = []
    replay = device.replay

    def noted(graph: Any) -> None:
        found.append(graph)
        replay(graph)

    monkeypatch.setattr(device, "replay", noted)
    return found


def call(step: Step, times: int = 1) -> None:
    """Call the layers one by one with new input, and compare."""
    for _ in range(times):
        expected = step.draw()
        step.forward()
        error = (step.out.cpu() - expected).float().norm() / expected.float().norm()
        assert error <= BOUND[step.dtype], error


@pytest.mark.parametrize(
    ("strategy", "batch", "dtype"),
    [("offload", 1, torch.float32), ("hybrid", 2, torch.bfloat16), ("resident", 1, torch.float16)],
)
def test_a_graph_a_layer(
    device: Device, replays: list[Any], strategy: str, batch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sums and the same counts as without, while experts come and go."""
    step = Step(device, strategy, batch, dtype=dtype)
    step.experts.reset_statistics()
    call(step, CALLS)
    assert not replays
    call(step, 2)
    assert len(replays) == 2 * LAYERS
    assert len(set(map(id, replays))) == LAYERS
    found = step.experts.usage().statistics

    monkeypatch.setenv("FREETOKEN_GRAPH", "off")
    plain = Step(device, strategy, batch, dtype=dtype)
    plain.experts.reset_statistics()
    call(plain, CALLS + 2)
    assert len(replays) == 2 * LAYERS
    assert found == plain.experts.usage().statistics


def test_several_sizes_and_replays_of_whole_steps_in_turn(device: Device, replays: list[Any]) -> None:
    """Each size has its own; a step's graph and a layer's use the same tables."""
    step, layer = Step(device, "offload", 1), 1
    more = [torch.zeros(2, *step.x.shape[1:], device=step.x.device), torch.zeros_like(step.ids[layer]).repeat(2, 1)]
    for _ in range(CALLS + 1):
        call(step)
        step.run()
        step.draw()
        more[0][:], more[1][:] = step.x, step.ids[layer]
        weights = step.weights[layer].repeat(2, 1)
        one = step.experts.layers[layer].run(step.x, step.ids[layer], step.weights[layer])
        two = step.experts.layers[layer].run(more[0], more[1], weights)
        assert torch.equal(two[0], one[0]) and torch.equal(two[1], one[0])
    assert len(set(map(id, replays))) == LAYERS + 1


def test_results_are_the_callers_own(device: Device) -> None:
    step = Step(device, "offload")
    found = []
    for _ in range(CALLS + 3):
        step.draw()
        out = step.experts.layers[0].run(step.x, step.ids[0], step.weights[0])
        found.append((out, out.clone()))
    assert all(torch.equal(out, before) for out, before in found)
    assert len({out.data_ptr() for out, _ in found}) == len(found)


def test_in_any_mode_of_torch(device: Device) -> None:
    """Captured in inference mode, called outside, and the other way round."""
    step = Step(device, "resident")
    with torch.inference_mode():
        call(step, CALLS + 1)
    call(step)
    with torch.inference_mode():
        call(step)


def test_without_a_capture_it_goes_on(
    device: Device, replays: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = Step(device, "offload")

    def refuse(*_: Any) -> None:
        raise DeviceError("no room", operation="capture")

    monkeypatch.setattr(device, "capture", refuse)
    with caplog.at_level(logging.INFO, "freetoken"):
        call(step, CALLS + 2)
    assert not replays
    assert [r.message for r in caplog.records if "captured" in r.message] == [
        "layer 0 with 1 tokens was not captured, and no other will be: their kernels are launched each: no room"
    ]


def test_what_was_captured_before_a_failure_goes_on(
    device: Device, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(device, "offload")
    call(step, CALLS)

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(device, "capture", refuse)
    two = torch.zeros(2, *step.x.shape[1:], device=step.x.device), torch.zeros_like(step.ids[0]).repeat(2, 1)
    for _ in range(CALLS):
        step.experts.layers[0].run(*two, step.weights[0].repeat(2, 1))
    call(step, 2)
    assert len(replays) == 2 * LAYERS


@pytest.mark.parametrize("calls", [0, CALLS - 1])
def test_what_was_not_fetched_is_in_no_slot(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted between look-up and fetch, launched each or in the run before a capture; a graph has both or none."""
    step = Step(with_interpreter(3), "offload")
    call(step, calls)
    expected = step.draw()
    fetch, interrupts = Gather.__call__, [True]

    def interrupted(gather: Gather, *arguments: Any) -> None:
        if interrupts and interrupts.pop():
            raise KeyboardInterrupt
        fetch(gather, *arguments)

    step.experts.forget()
    monkeypatch.setattr(Gather, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step.forward()
    step.forward()
    assert (step.out - expected).norm() <= BOUND[step.dtype] * expected.norm()


def test_other_types_of_ids_and_weights(device: Device) -> None:
    """Each has graphs of its own."""
    step, layer = Step(device, "resident"), 0
    step.draw()
    before = step.experts.layers[layer].run(step.x, step.ids[layer], step.weights[layer])
    for _ in range(CALLS + 1):
        for ids in (step.ids[layer].int(), step.ids[layer]):
            rounded = step.experts.layers[layer].run(step.x, ids, step.weights[layer].bfloat16())
            assert not torch.equal(rounded, before)
            assert (rounded - before).norm() <= 2**-7 * before.norm()
            assert torch.equal(step.experts.layers[layer].run(step.x, ids, step.weights[layer]), before)


def test_nothing_of_the_callers_is_kept(device: Device) -> None:
    """Inputs with a history are read as they are; what reads them gets none."""
    step = Step(device, "resident")
    for _ in range(CALLS + 2):
        step.draw()
        x, weights = step.x.clone().requires_grad_() * 2, step.weights[0].clone().requires_grad_() * 2
        step.experts.layers[0].run(x, step.ids[0], weights)
    assert step.experts._slotted is not None
    (captured,) = step.experts._slotted._calls._calls.values()
    assert all(given.grad_fn is None for given in captured.given)


def test_parts_of_a_prompt_are_not_captured(
    device: Device, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are looked up in turn."""
    step = Step(device, "offload", 2)
    monkeypatch.setattr(step.experts._slotted, "_tokens_at_once", lambda *_: 1)
    monkeypatch.setattr(device, "capture", lambda *_: pytest.fail("captured"))
    call(step, CALLS)
    assert not replays


def test_not_while_a_step_waits_for_the_host(
    device: Device, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture may block behind it; the next call that finds nothing on its way is captured."""
    step, idle = Step(device, "offload"), [False]
    monkeypatch.setattr(device, "is_idle", lambda: idle[-1])
    call(step, CALLS + 1)
    assert not replays
    idle.append(True)
    call(step, 2)
    assert len(replays) == LAYERS


def test_a_lost_device_is_said() -> None:
    device = with_interpreter(3)
    step = Step(device, "offload")
    call(step, CALLS - 1)

    def lose(*_: Any) -> None:
        raise DeviceError("gone", operation="capture", lost=True)

    device.capture = lose  # type: ignore[method-assign, assignment]
    with pytest.raises(DeviceError, match="gone"):
        call(step)


def test_memory_is_given_back_without_the_collector(device: Device) -> None:
    step = Step(device, "offload")
    call(step, CALLS + 1)
    assert step.experts._slotted is not None
    pool = weakref.ref(step.experts._slotted.pool)
    gc.disable()
    try:
        step.experts.close()
        assert pool() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_inside_a_capture_of_the_callers() -> None:
    """What the caller captures is kernels, not a graph in a graph."""
    from freetoken.device.cuda import CudaDevice

    step = Step(CudaDevice(), "resident")
    call(step, CALLS + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.forward()
    for _ in range(3):
        expected = step.draw()
        graph.replay()
        assert (step.out.cpu() - expected).norm() / expected.norm() <= BOUND[step.dtype]


def test_simulated_graphs_are_done_on_return() -> None:
    device, seen = SimulatedDevice(), []
    graph = device.capture(lambda stream: stream.kernel(lambda: seen.append(1)))
    device.replay(graph)
    assert seen == [1]
