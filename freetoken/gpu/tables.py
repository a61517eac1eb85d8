"""The tables of a layer's slots in device memory, which the look-up reads and changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_ROUTES = 64
"""Of one look-up: routes are compared with each other, 64 * 64 at most."""
COUNTS = 5
"""Counters of a layer: steps, routed, hits, misses, and misses that were fetched."""


@dataclass(frozen=True)
class Tables:
    """What the device knows of one layer's slots. Slot s lies at address `pool + s * slot_bytes`.

    slot_of: (E,) int32, each expert's slot, -1: none. expert_in: (S,) int32, the inverse. used: (S,) int64, the step of
    the last use, 0: never. order: (S,) int32, all slots, the one used longest ago first. step: (1,) int64, how many
    look-ups there were. split: (MOST_ROUTES + 1,) int32, of m missing experts the first split[m] are fetched and the
    others left to the host; it may change between look-ups. counts: (COUNTS,) int64, to which they add while counting,
    (1,) int32, is not 0.
    """

    slot_of: torch.Tensor
    expert_in: torch.Tensor
    used: torch.Tensor
    order: torch.Tensor
    step: torch.Tensor
    split: torch.Tensor
    counts: torch.Tensor
    counting: torch.Tensor
    pool: int
    slot_bytes: int

    @property
    def n_experts(self) -> int:
        """E."""
        return self.slot_of.shape[0]

    @property
    def n_slots(self) -> int:
        """S."""
        return self.expert_in.shape[0]
