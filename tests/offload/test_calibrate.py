"""What is measured of a device whose speeds are known: the simulated one, told how long copies and the host take."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from freetoken.offload.calibrate import calibrate
from freetoken.offload.host import HandOff
from tests.test_executor import TOP_K


class Layer:
    """As `calibrate` looks at one; a layer is run by those who capture."""

    n_experts, expert_bytes = 8, 1000

    class layout:
        hidden = 4


class Experts:
    """A device on which a fetch takes 3 us, beside the host 4, and the host 5 an expert, beside a fetch 6; a trip 2."""

    class device:
        torch_device, name = torch.device("cpu"), "a table"

    layers = (Layer(),) * 3

    def __init__(self) -> None:
        self.fetches: list[int] = []
        self.forgotten = self.launched = 0
        self.drawn: list[torch.Tensor] = []

    def capture_with_trips(self, forward: Any) -> Any:
        return "step", [self] * 3

    def split_misses(self, fetches: list[int]) -> None:
        self.fetches = fetches

    def forget(self) -> None:
        self.forgotten += 1

    def launch(self, step: str) -> int:
        self.launched += 1
        assert self.forgotten == self.launched, "experts that are there say nothing of fetches"
        return self.launched

    def wait(self, number: int) -> None:
        pass

    def seconds(self) -> tuple[float, float, float]:
        fetched = self.fetches[TOP_K]
        left = TOP_K - fetched
        device = fetched * (3e-6 if not left else 4e-6)
        host = left * (5e-6 if not fetched else 6e-6)
        return device, host, max(device, host + 2e-6 if left else 0.0)

    def stepping(self) -> Any:
        return contextlib.nullcontext()

    not_counting = stepping


def test_prices() -> None:
    experts: Any = Experts()
    found = calibrate(experts, [0, 1, 2], TOP_K, torch.float32)
    prices = found.prices
    assert (prices.fetch, prices.compute) == pytest.approx((3e-6, 5e-6))
    assert (prices.fetch_beside, prices.compute_beside, prices.hand_off) == pytest.approx((4e-6, 6e-6, 2e-6))
    assert (found.experts, found.fetches, found.nbytes) == (TOP_K, 2, 1000), "6 us, where one of each takes 8"
    assert experts.fetches[:5] == [found.choose(m) for m in range(5)]


def test_of_a_hand_off() -> None:
    """The device's clock and the host's, in nanoseconds."""
    times, took = torch.tensor([1_000, 4_000, 9_000]), torch.tensor([2_500])
    found = HandOff(None, None, None, took, times, None).seconds()  # type: ignore[arg-type]
    assert found == pytest.approx((3e-6, 2.5e-6, 8e-6))
