"""The simulated device by itself: order, time and faults of what is put on its streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freetoken.device.base import Stream
from freetoken.device.simulated import SimulatedDevice, SimulatedHangError, Speeds
from freetoken.errors import DeviceError

EXACT = Speeds(link_bps=50e9, host_bps=120e9, copy_s=1e-5, launch_s=0.0)


def run(device: SimulatedDevice, build: Any) -> float:
    """Seconds that a graph takes."""
    graph = device.capture(build)
    start = device.time
    device.launch(graph)
    while not device.is_idle():
        device.clock.pause(0)
    return device.time - start


def exact() -> SimulatedDevice:
    return SimulatedDevice(speeds=EXACT, jitter=0.0)


def test_operations_are_done_in_order() -> None:
    done: list[int] = []

    def build(stream: Stream) -> None:
        for i in range(5):
            stream.kernel(lambda i=i: done.append(i), cost=1.0)  # type: ignore[misc]

    assert run(exact(), build) == pytest.approx(5.0)
    assert done == [0, 1, 2, 3, 4]


def test_forked_streams_run_beside_each_other() -> None:
    done: list[str] = []

    def build(stream: Stream) -> None:
        stream.kernel(lambda: done.append("first"), cost=1.0)
        side = stream.fork()
        side.kernel(lambda: done.append("side"), cost=3.0)
        stream.kernel(lambda: done.append("main"), cost=1.0)
        stream.join(side)
        stream.kernel(lambda: done.append("last"), cost=1.0)

    assert run(exact(), build) == pytest.approx(5.0)
    assert done == ["first", "main", "side", "last"]


def test_a_trace_is_done_again_on_the_same_memory() -> None:
    x, total, seen = torch.ones(2, 3), torch.zeros(2, 4), []

    def work(stream: Stream) -> None:
        wide = (x * 2).relu() @ torch.full((3, 4), 0.5)
        view = wide.view(4, 2).t()[:, 1:]
        view.add_(1)
        stream.kernel(lambda: seen.append(float(wide.sum())))
        values, _ = wide.max(dim=1, keepdim=True)
        total.add_(values)

    device = exact()
    graph = device.capture(lambda stream: stream.trace(lambda: work(stream)))
    recorded = total.clone()  # a recording computes once
    for value in (3.0, -1.0):
        x.fill_(value)
        before = total.clone()
        device.launch(graph)
        while not device.is_idle():
            device.clock.pause(0)
        row = max(0.0, 3 * value) + 1
        assert torch.equal(total - before, torch.full((2, 4), row)) and seen[-1] == 8 * max(0.0, 3 * value) + 6
    assert torch.equal(recorded, torch.full((2, 4), 4.0)) and len(seen) == 2


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).all()),
        lambda x: torch.equal(x, x),
    ],
)
def test_a_trace_cannot_wait_for_values(wait: Any) -> None:
    x = torch.ones(3)
    with pytest.raises(DeviceError, match="waits for values"):
        exact().capture(lambda stream: stream.trace(lambda: wait(x)))


@pytest.mark.parametrize(("copies", "seconds"), [(1, 2e-4 + 1e-5), (2, 4e-4 + 1e-5)])
def test_copies_share_the_link(copies: int, seconds: float) -> None:
    source, targets = torch.ones(10**7, dtype=torch.uint8), torch.zeros(copies, 10**7, dtype=torch.uint8)

    def build(stream: Stream) -> None:
        sides = [stream.fork() for _ in range(copies)]
        for side, target in zip(sides, targets, strict=True):
            side.copy(target, source)
            stream.join(side)
        stream.kernel(lambda: None, cost=1e-12)

    assert run(exact(), build) == pytest.approx(seconds, rel=1e-3)
    assert targets.sum() == copies * 10**7


def test_host_work_slows_a_copy() -> None:
    """Three readers and a copy have a quarter of the memory each: 30 of 120 GB/s, where the link would give 50."""
    source, target = torch.ones(10**7, dtype=torch.uint8), torch.zeros(10**7, dtype=torch.uint8)
    device = exact()
    for _ in range(3):
        device._flow(10**9, frozenset({"host"}), lambda: None)
    assert run(device, lambda stream: stream.copy(target, source)) == pytest.approx(10**7 / 30e9 + 1e-5, rel=1e-3)


def test_a_wait_takes_or_leaves() -> None:
    device = exact()
    flag = device.flags(1)[0]
    for take in (True, False):
        flag.value = 1
        run(device, lambda stream, take=take: stream.wait(flag, take))
        assert flag.value == 1 - take
    flag.value = 1
    run(device, lambda stream: stream.take(flag))
    assert flag.value == 0
    device.launch(device.capture(lambda stream: stream.wait(flag)))
    device.clock.pause(1.0)
    with pytest.raises(SimulatedHangError, match=r"nothing will ever happen again; 1 graphs .* waits for flag 0"):
        device.clock.pause(1.0)


def test_rings_count_and_say_who_answered() -> None:
    device = exact()
    flag = device.flags(1)[0]
    seen = []
    for answered in (False, True, True, False):
        run(device, lambda stream, answered=answered: stream.ring(flag, answered))
        seen.append(flag.value)
    assert seen == [2, 5, 7, 8]


@pytest.mark.parametrize("queue_nodes", [1, 100, 6000])
def test_a_launch_blocks_until_its_nodes_fit(queue_nodes: int) -> None:
    device = SimulatedDevice(queue_nodes=queue_nodes, speeds=EXACT, jitter=0.0)
    graph = device.capture(lambda stream: [stream.kernel(lambda: None, cost=1e-3) for _ in range(5000)])
    device.launch(graph)
    assert device.time == pytest.approx(max(0, 5000 - queue_nodes) * 1e-3)


def test_faults() -> None:
    device = exact()
    graph = device.capture(lambda stream: stream.kernel(lambda: None))
    device.inject("launch")
    with pytest.raises(DeviceError, match="launch failed: simulated fault"):
        device.launch(graph)
    assert device.is_idle()
    device.inject("register")
    with pytest.raises(DeviceError, match="cannot be registered"), device.register(torch.zeros(8).numpy()):
        pass
    with device.register(torch.zeros(8).numpy()):
        pass
    device.inject("lost")
    device.launch(graph)
    with pytest.raises(DeviceError, match="lost") as caught:
        device.is_idle()
    assert caught.value.facts["lost"]
