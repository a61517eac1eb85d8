"""Devices that tests run on: the simulated one anywhere, a CUDA device where there is one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from freetoken.device.base import Device
from freetoken.device.simulated import SimulatedDevice

DEVICES = ["simulated", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Parameters of a fixture that yields from `open_for_test`."""


def open_for_test(kind: str, simulated: Callable[[], SimulatedDevice]) -> Iterator[Device]:
    """The device of one of these parameters, closed at the end: what a test leaves to the collector goes first."""
    if kind == "simulated":
        yield simulated()
        return
    from freetoken.device.cuda import CudaDevice

    device = CudaDevice()
    yield device
    gc.collect()
    device.close()


def with_interpreter(seed: int) -> SimulatedDevice:
    """A device on ordinary memory, where kernels for that were chosen (tests/conftest.py); else the test is skipped."""
    import triton

    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles for the GPU here")
    return SimulatedDevice(seed)
