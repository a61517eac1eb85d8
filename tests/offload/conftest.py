"""Fixtures of tests whose layers are captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from freetoken.device.base import Device
from tests.support.devices import DEVICES, open_for_test, with_interpreter


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """That of `DEVICES`; modules may have one of their own."""
    yield from open_for_test(request.param, lambda: with_interpreter(3))


@pytest.fixture
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a device is kept free, and a calibration is short."""
    monkeypatch.setenv("FREETOKEN_GPU_RESERVE", "0")
    monkeypatch.setattr("freetoken.offload.calibrate._REPLAYS", 1)
