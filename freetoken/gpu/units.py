"""Units of work of a decode step: an expert's record and the routes that use it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

COLUMNS = 8
"""Routes of a unit; an expert that has more is in several."""


@dataclass(frozen=True)
class Units:
    """What is to be computed, on the device. A route is token * K + position among the token's K experts.

    address: (U,) int64, where each unit's record lies; 0: no unit. route: (U, 8) int32, its routes; -1: none.
    """

    address: torch.Tensor
    route: torch.Tensor
