"""Banks registered in the background: never during a step, refusals are no errors, everything is given back."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from numpy.typing import NDArray

from freetoken import formats
from freetoken.banks import Bank, LayerBank, ShardedBank
from freetoken.device.simulated import SimulatedDevice
from freetoken.errors import ConfigError, DeviceError
from freetoken.formats.record import RecordLayout, shard_bounds
from freetoken.offload.pinning import REFUSED, WAITING, Pinner

LAYOUT = RecordLayout(formats.get("q8_0"), 64, 96)


class Recorder(SimulatedDevice):
    """Remembers what is registered; `slow` seconds for each."""

    def __init__(self, slow: float = 0.0) -> None:
        super().__init__()
        self.registered: list[int] = []
        self.slow = slow
        self.refuse: set[int] = set()
        self.begun = 0
        self.in_step = False
        self.seen_in_step = False

    @contextlib.contextmanager
    def register(self, memory: NDArray[Any]) -> Iterator[None]:
        self.begun += 1
        self.seen_in_step |= self.in_step
        time.sleep(self.slow)
        self.seen_in_step |= self.in_step
        if memory.ctypes.data in self.refuse:
            raise DeviceError(f"{memory.nbytes} bytes cannot be registered: no", operation="register")
        self.registered.append(memory.ctypes.data)
        try:
            yield
        finally:
            self.registered.remove(memory.ctypes.data)


@contextlib.contextmanager
def step(pinner: Pinner) -> Iterator[None]:
    token = pinner.begin()
    yield
    pinner.end(token)


def banks(n: int) -> list[LayerBank]:
    return [Bank(LAYOUT, 4) for _ in range(n)]


def address(bank: LayerBank) -> int:
    return int(bank.shards[0].records.ctypes.data)


def test_all_layers_in_their_order_and_given_back() -> None:
    device, made = Recorder(), banks(5)
    told: list[tuple[int, bool]] = []
    pinner = Pinner(device, made, on_pinned=lambda layer: told.append((layer, pinner.is_pinned(layer))))
    pinner.start()
    status = pinner.wait()
    assert (status.layers(), status.nbytes()) == ((0, 1, 2, 3, 4), sum(bank.nbytes for bank in made))
    assert device.registered == [address(bank) for bank in made]
    assert told == [(layer, False) for layer in range(5)]
    pinner.release(2)
    assert not pinner.is_pinned(2) and len(device.registered) == 4
    pinner.close()
    pinner.close()
    assert device.registered == [] and not any(map(pinner.is_pinned, range(5)))


def test_a_refused_layer_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    device, made = Recorder(), banks(4)
    device.refuse = {address(made[1]), address(made[2])}
    pinner = Pinner(device, made)
    with caplog.at_level(logging.WARNING):
        pinner.start()
        status = pinner.wait()
    assert [pinner.is_pinned(i) for i in range(4)] == [True, False, False, True]
    assert status.layers(REFUSED) == (1, 2) and status.nbytes(REFUSED) == 2 * made[0].nbytes
    assert len(caplog.records) == 1, "one warning"
    size = f"{2 * made[0].nbytes / 1024:.1f} KiB"
    assert f"layers 0,3 pinned, {size}; layers 1-2 refused, {size} (" in str(status)
    assert str(status) in caplog.text and "cannot be registered: no" in caplog.text
    pinner.close()


def test_half_a_sharded_bank_is_given_back() -> None:
    device = Recorder()
    bank = ShardedBank(LAYOUT, 4, shard_bounds(LAYOUT.format, 96, 2), (None, None))
    device.refuse = {int(bank.shards[1].records.ctypes.data)}
    pinner = Pinner(device, [bank])
    pinner.run()
    assert not pinner.is_pinned(0) and device.registered == [] and device.begun == 2


def test_a_limit_passes_over_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Recorder()
    made = [Bank(LAYOUT, 4), Bank(LAYOUT, 400), Bank(LAYOUT, 2)]
    pinner = Pinner(device, made, limit_bytes=made[0].nbytes + made[2].nbytes)
    pinner.run()
    assert [pinner.is_pinned(i) for i in range(3)] == [True, False, True]
    assert "FREETOKEN_PIN_LIMIT" in pinner.status.why
    with pytest.raises(ConfigError, match="limit_bytes"):
        Pinner(device, made, limit_bytes=-1)
    monkeypatch.setenv("FREETOKEN_PIN_LIMIT", "0")
    none = Pinner(device, made)
    none.run()
    assert none.status.layers() == () and none.status.layers(REFUSED) == (0, 1, 2)


def test_never_during_a_step_and_every_gap_is_used() -> None:
    """Steps that follow each other closely let one layer be pinned between two of them."""
    device, made = Recorder(slow=2e-3), banks(6)
    pinner = Pinner(device, made)
    steps = 0
    with step(pinner):
        device.in_step = True
        pinner.start()
        time.sleep(0.02)
        assert device.begun == 0
        device.in_step = False
    while pinner.status.layers(WAITING) and steps < 10_000:
        with step(pinner), step(pinner):
            device.in_step = True
            time.sleep(1e-4)
            device.in_step = False
        steps += 1
    assert not device.seen_in_step
    assert len(pinner.wait().layers()) == 6
    pinner.close()


def test_closing_while_it_goes_on() -> None:
    device, made = Recorder(slow=5e-3), banks(50)
    pinner = Pinner(device, made)
    pinner.start()
    while not device.begun:
        time.sleep(1e-4)
    pinner.close()
    assert device.registered == [] and device.begun < 50
    assert threading.active_count() < 20


def test_a_closed_one_waits_for_no_step() -> None:
    pinner = Pinner(Recorder(), banks(3))
    with step(pinner):
        pinner.start()
        pinner.close()
    assert pinner.status.layers() == ()


def test_a_step_that_was_left_is_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.offload.pinning.LEFT_S", 0.1)
    device = Recorder()
    pinner = Pinner(device, banks(2))
    left, kept = pinner.begin(), pinner.begin()
    pinner.start()
    for _ in range(20):
        time.sleep(0.02)
        pinner.heard_of(kept)
    assert not device.begun
    pinner.end(kept)
    assert pinner.wait().layers() == (0, 1)
    pinner.end(left)


@pytest.mark.parametrize("error", [OSError("no"), MemoryError(), DeviceError("gone", operation="register", lost=True)])
def test_whatever_goes_wrong_is_a_refusal(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        @contextlib.contextmanager
        def register(self, memory: NDArray[Any]) -> Iterator[None]:
            if self.begun == 1:
                self.begun += 1
                raise error
            with super().register(memory):
                yield

    pinner = Pinner(Broken(), banks(3))
    pinner.run()
    assert pinner.status.layers(REFUSED) == (1,) and len(caplog.records) == 1


def test_closed_by_the_thread_that_pins() -> None:
    """As the collector may do."""
    device, made = Recorder(), banks(3)
    pinner = Pinner(device, made, on_pinned=lambda layer: pinner.close() if layer == 1 else None)
    pinner.start()
    pinner.wait()
    assert device.registered == [] and pinner.status.layers() == ()
