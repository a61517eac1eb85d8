"""A hand-off to the host and back: simulated, by the kernels as C++, and on a CUDA device where there is one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from freetoken.device.base import Stream, Trip
from freetoken.device.cuda import WAITS, CudaDevice
from freetoken.device.handoff import Handoff
from freetoken.device.histogram import BUCKETS, Times, bucket
from freetoken.device.simulated import SimulatedDevice, SimulatedHangError, Speeds
from tests.duties.thread_device import ThreadDevice, ThreadStream
from tests.support.cuda_twin import COMPILER, TwinDevice

B, K, H = 3, 2, 40
EXACT = Speeds(link_bps=1e9, copy_s=0.0, launch_s=0.0, ring_s=1e-6, wake_s=2e-6, kernel_s=1e-6)


def make_trip(device: Any, dtype: torch.dtype = torch.bfloat16, b: int = B, k: int = K, h: int = H) -> Trip:
    def here(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device.torch_device)

    kinds = [((b, h), dtype), ((b, k), torch.int32), ((b, k), torch.float32)]
    sent = tuple((device.host_tensor(shape, kind), here(*shape, dtype=kind)) for shape, kind in kinds)
    bell, answer = device.flags(2)
    return Trip(
        bell, answer, sent[1][1], sent, device.host_tensor((b, h), dtype), device.host_tensor((1,), torch.int64),
        here(3, dtype=torch.int64), here(3, BUCKETS, dtype=torch.int64), here(1, dtype=torch.int32) + 1,
    )  # fmt: skip


def fill(trip: Trip, ids: list[list[int]], seed: int = 0) -> None:
    """On the device; the host's memory has what it must not have afterwards."""
    random = torch.Generator().manual_seed(seed)
    (_, x), _, (_, weights) = trip.sent
    x.copy_(torch.randn(x.shape, generator=random))
    weights.copy_(torch.rand(weights.shape, generator=random))
    trip.ids.copy_(torch.tensor(ids))
    trip.back.copy_(torch.randn(trip.back.shape, generator=random))
    for target, _ in trip.sent:
        target.fill_(-9)


def is_sent(trip: Trip) -> bool:
    return all(torch.equal(target, source.cpu()) for target, source in trip.sent)


def is_untouched(trip: Trip) -> bool:
    return all(bool((target == -9).all()) for target, _ in trip.sent)


def expected_sum(trip: Trip, out: torch.Tensor) -> torch.Tensor:
    rows = (trip.ids.cpu() >= 0).any(1)
    expected = out.cpu().clone()
    for row in rows.nonzero().flatten().tolist():
        expected[row] = (expected[row].float() + trip.back[row].float()).to(out.dtype)
    return expected


def counts(trip: Trip) -> list[Times]:
    return [Times.of(row) for row in trip.waited.tolist()]


class TwinStream(ThreadStream):
    """With kernels of handoff.cu, compiled as C++."""

    device: TripDevice

    def ask(self, trip: Trip) -> None:
        self.operations.append(lambda: self.device.handoff.ask(trip))

    def ready(self, trip: Trip) -> None:
        self.operations.append(lambda: self.device.handoff.ready(trip))

    def add(self, trip: Trip, out: torch.Tensor) -> None:
        self.operations.append(lambda: self.device.handoff.add(trip, out))

    def fork(self) -> TwinStream:
        return self

    def join(self, other: TwinStream) -> None: ...


class TripDevice(ThreadDevice):
    torch_device = torch.device("cpu")

    def __init__(self, handoff: Handoff) -> None:
        super().__init__(queue_nodes=100)
        self.handoff = handoff

    def stream(self) -> TwinStream:
        return TwinStream(self)

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)


@pytest.fixture(scope="module")
def handoff(tmp_path_factory: pytest.TempPathFactory) -> Handoff:
    if COMPILER is None:
        pytest.skip("needs g++")
    twin: Any = TwinDevice(tmp_path_factory.mktemp("twin"))
    return Handoff(twin)


@pytest.fixture(params=["simulated", "twin", *(pytest.param(f"cuda, {kind}", marks=pytest.mark.gpu) for kind in WAITS)])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "simulated":
        yield SimulatedDevice(0)
        return
    if request.param == "twin":
        twin = TripDevice(request.getfixturevalue("handoff"))
        yield twin
        twin.close()
        return
    device = CudaDevice(waits=request.param.partition(", ")[2])
    yield device
    device.close()


def run(device: Any, trip: Trip, out: torch.Tensor, host: Any = None) -> None:
    """A graph of one trip, answered by `host` when the bell has rung."""

    def build(stream: Stream) -> None:
        stream.ask(trip)
        side = stream.fork()
        side.kernel(lambda: None)
        stream.join(side)
        stream.ready(trip)
        stream.wait(trip.answer)
        stream.add(trip, out)

    if device.torch_device.type == "cuda":
        torch.cuda.synchronize()
    graph = device.capture(build)
    rung = trip.bell.value & ~1
    device.launch(graph)
    end = time.monotonic() + 20
    while not device.is_idle():
        assert time.monotonic() < end
        if host is not None and trip.bell.value == rung + 2:
            host()
            trip.answer.value = 1
            host = None
        device.clock.pause(1e-5)
    assert trip.answer.value == 0


IDS = [[3, -1], [-1, -1], [-1, 511]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("b", "h"), [(3, 40), (3, 41), (3, 4096)])
def test_what_is_sent_and_what_comes_back(device: Any, dtype: torch.dtype, b: int, h: int) -> None:
    trip = make_trip(device, dtype, b, K, h)
    fill(trip, IDS)
    out = torch.randn(b, h).to(device.torch_device, dtype)
    expected = expected_sum(trip, out)

    def host() -> None:
        assert is_sent(trip) and trip.bell.value == 2 and trip.took.tolist() == [0]
        trip.took[0] = 1  # less than all else took

    trip.took[0] = 77
    run(device, trip, out, host)
    assert torch.equal(out.cpu(), expected)
    assert [times.count for times in counts(trip)] == [1, 0, 1]
    assert counts(trip)[2].p50 == 1e-9


@pytest.mark.parametrize("start", [0, 1, 8])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 5000])
def test_what_is_sent_may_lie_anywhere(device: Any, start: int, length: int) -> None:
    trip = make_trip(device)
    far = device.host_tensor((length + 2 * start,), torch.int16)
    near = torch.arange(len(far), dtype=torch.int16).to(device.torch_device)
    trip = dataclasses.replace(trip, sent=((far[start : start + length], near[start : start + length]),))
    trip.ids.fill_(0)
    far.fill_(-1)
    run(device, trip, torch.zeros(B, H, dtype=torch.bfloat16, device=device.torch_device), lambda: None)
    assert torch.equal(far[start : start + length], near.cpu()[start : start + length])
    assert bool((far[:start] == -1).all() and (far[start + length :] == -1).all())


def test_a_device_that_needs_nothing_answers_itself(device: Any) -> None:
    trip = make_trip(device)
    fill(trip, [[-1, -1]] * B)
    out = torch.ones(B, H, dtype=torch.bfloat16, device=device.torch_device)
    trip.back.fill_(float("nan"))
    trip.took[0] = 5
    for times in (1, 2):
        run(device, trip, out)
        assert trip.bell.value == 2 * times + 1
    assert is_untouched(trip) and bool((out == 1).all())
    assert [times.count for times in counts(trip)] == [0, 0, 0]


def test_rows_that_no_host_computes_are_left_alone(device: Any) -> None:
    trip = make_trip(device)
    fill(trip, IDS)
    trip.back[1] = float("nan")
    out = torch.randn(B, H).to(device.torch_device, torch.bfloat16)
    expected = expected_sum(trip, out)
    run(device, trip, out, lambda: None)
    assert torch.equal(out.cpu(), expected) and torch.isfinite(out).all()


def test_trips_are_counted_while_counting_is_on_and_the_host_did_something(device: Any) -> None:
    trip = make_trip(device)
    fill(trip, IDS)
    out = torch.zeros(B, H, dtype=torch.bfloat16, device=device.torch_device)
    did = lambda: trip.took.fill_(1 << 40)  # noqa: E731
    found = []
    for counting, host in [(1, did), (0, did), (1, lambda: None), (-1, did)]:
        trip.counting.fill_(counting)
        run(device, trip, out, host)
        found.append([times.count for times in counts(trip)])
    assert found == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [2, 2, 2]]
    assert trip.waited[1, 0] == 2, "a hand-off cannot have taken less than nothing"
    assert trip.waited[2, BUCKETS - 1] == 2


def test_times_are_those_of_the_simulated_device() -> None:
    device = SimulatedDevice(speeds=EXACT, jitter=0.0)
    trip = make_trip(device)
    fill(trip, IDS)
    out = torch.zeros(B, H, dtype=torch.bfloat16)

    def build(stream: Stream) -> None:
        stream.ask(trip)
        stream.kernel(lambda: None, cost=10e-6)
        stream.ready(trip)
        stream.wait(trip.answer)
        stream.add(trip, out)

    def host() -> None:
        trip.took[0] = took
        trip.answer.value = 1
        device._release()

    sent = sum(source.nbytes for _, source in trip.sent)
    back = 2 * H * 2
    for took, handed_off in ((4_000, False), (25_000, True)):
        start = device.time
        device.launch(device.capture(build))
        device.later(40e-6, host)
        while not device.is_idle():
            device.clock.pause(0)
        asked = 1000 + sent + 1000  # kernel, bytes at 1 ns each, bell
        ready = asked + 11_000
        now = 40_000 + 2000 + 1000 + back
        assert (trip.times - round(start * 1e9)).tolist() == [0, ready, now]
        assert trip.waited[0, bucket(now - ready)] == 1 + handed_off
        assert trip.waited[2, bucket(took)] == 1
        assert trip.waited[1].sum() == handed_off
    assert trip.waited[1, bucket(now - took)] == 1


@pytest.mark.parametrize("ids", [IDS, [[-1, -1]] * B])
def test_a_bell_that_stays_silent_stops_the_device(ids: list[list[int]]) -> None:
    device = SimulatedDevice(0)
    trip = make_trip(device)
    fill(trip, ids)
    device.inject("silent bell")
    device.launch(device.capture(lambda stream: stream.ask(trip)))
    with pytest.raises(SimulatedHangError, match="nothing will ever happen again; 1 graphs"):
        device.clock.pause(1.0)
    assert trip.bell.value == 0


def test_what_is_no_trip_is_refused() -> None:
    device = SimulatedDevice(0)
    trip = make_trip(device)
    many = (*trip.sent, trip.sent[0])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sent": many}, "4 tensors are sent, expected at most 3"),
        ({"sent": ((trip.back, trip.ids),)}, r"copy of torch.Size\(\[3, 2\]\)"),
        ({"ids": trip.ids.long()}, r"ids is \(3, 2\) torch.int64 .* expected \(3, 2\) torch.int32"),
        ({"ids": trip.ids[:2]}, r"ids \(2, 2\) and back \(3, 40\)"),
        ({"back": trip.back.half()}, "back is torch.float16, expected torch.float32 or torch.bfloat16"),
        ({"back": torch.zeros(H, B).T}, r"back is .* strides \(1, 3\), expected \(3, 40\) torch.float32, contiguous"),
        ({"took": torch.zeros(1)}, r"took is .* expected \(1,\) torch.int64"),
        ({"times": torch.zeros(2, dtype=torch.int64)}, r"times is \(2,\)"),
        ({"waited": trip.waited[:, 1:]}, r"waited is \(3, 271\)"),
        ({"counting": torch.zeros(1)}, r"counting is .* expected \(1,\) torch.int32"),
    ]
    for fields, message in wrong:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(trip, **fields)
    with pytest.raises(ValueError, match=r"out is \(3, 40\) torch.float32 .* expected \(3, 40\) torch.bfloat16"):
        device.capture(lambda stream: stream.add(trip, torch.zeros(B, H)))
