"""What a missing expert takes over the link and on the host, measured together through the very graph of a step.

A graph of all layers that are slotted is replayed with every split of a token whose experts are all missing, experts
drawn anew each time, so that no cache helps. The device's clock says when it asked, when its own part was done and
when it had the host's; the host says how long it worked. Medians over layers and replays.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from freetoken.gpu.tables import MOST_ROUTES
from freetoken.offload.split import Prices, fetch_table

if TYPE_CHECKING:
    from freetoken.offload.experts import DeviceExperts

logger = logging.getLogger(__name__)

_REPLAYS = 6
"""Of each split, after one that does not count."""
_MOST_LAYERS = 12
"""Of a replay, so that it takes some milliseconds: layers are alike."""


@dataclass(frozen=True)
class Calibration:
    """What was measured. fetches: of a token's experts, all missing, the fastest split. nbytes: of one expert."""

    prices: Prices
    experts: int
    fetches: int
    nbytes: int

    def choose(self, missing: int) -> int:
        """How many of the missing experts to fetch."""
        return self.fetches if missing == self.experts else self.prices.choose(missing)

    def __str__(self) -> str:
        link, host = (self.nbytes / max(s, 1e-12) / 1e9 for s in (self.prices.fetch_beside, self.prices.compute_beside))
        return (
            f"fetching {self.fetches / self.experts:.0%} of misses over PCIe, the rest on the CPU: {link:.0f} and "
            f"{host:.0f} GB/s together"
        )


@dataclass(frozen=True)
class _Times:
    """Seconds of one split: the device's own part, the host's work, and all of it."""

    device: float
    host: float
    total: float


def calibrate(experts: DeviceExperts, layers: Sequence[int], top_k: int, dtype: torch.dtype) -> Calibration:
    """Measure with these layers, which are slotted and of the same sizes. What is in slots afterwards is random."""
    layers = layers[:_MOST_LAYERS]
    chosen = [experts.layers[number] for number in layers]
    k = min(top_k, chosen[0].n_experts)
    on = experts.device.torch_device
    x = torch.randn(1, chosen[0].layout.hidden, dtype=torch.float32, device="cpu").to(on, dtype)
    weights = torch.full((1, k), 1 / k, dtype=torch.float32, device=on)
    ids = torch.zeros(len(layers), 1, k, dtype=torch.int64, device=on)
    random = torch.Generator("cpu").manual_seed(0)

    def draw() -> None:
        some = [torch.randperm(layer.n_experts, generator=random, device="cpu")[:k] for layer in chosen]
        ids.copy_(torch.stack(some)[:, None])

    def forward() -> None:
        for layer, one in zip(chosen, ids, strict=True):
            layer.run(x, one, weights)

    draw()
    step, hand_offs = experts.capture_with_trips(forward)
    found: list[_Times] = []
    with experts.stepping(), experts.not_counting():
        for fetched in range(k + 1):
            experts.split_misses([min(m, fetched) for m in range(MOST_ROUTES + 1)])
            samples: list[_Times] = []
            for replay in range(_REPLAYS + 1):
                draw()
                experts.forget()
                experts.wait(experts.launch(step))
                if replay:
                    samples += [_Times(*times) for times in (hand_off.seconds() for hand_off in hand_offs)]
            found.append(
                _Times(*(statistics.median(getattr(s, name) for s in samples) for name in ("device", "host", "total")))
            )
    best = min(range(k, -1, -1), key=lambda fetched: found[fetched].total)
    mixed = min(range(1, k), key=lambda fetched: found[fetched].total) if k > 1 else 0
    prices = Prices(
        fetch=found[k].device / k,
        compute=found[0].host / k,
        fetch_beside=found[mixed].device / mixed if mixed else found[k].device / k,
        compute_beside=found[mixed].host / (k - mixed) if mixed else found[0].host / k,
        hand_off=max(0.0, found[0].total - found[0].host),
    )
    result = Calibration(prices, k, best, chosen[0].expert_bytes)
    experts.split_misses(fetch_table(result.choose))
    logger.info("%s: %s", experts.device.name, result)
    return result
