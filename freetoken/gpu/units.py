"""What kernels hand to each other in device memory: work lists over experts' records, and lists of records to fetch.

Shapes never change, so that a graph can replay them: what is not there is marked, not left out. A *route* is a token
and one of its K experts: route = token * K + position. A record's *address* is where its bytes lie on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

COLUMNS = 8
"""Routes of a unit."""


@dataclass(frozen=True)
class Units:
    """Pieces of work: one expert's record and up to `COLUMNS` routes that use it.

    address: (U,) int64, where each unit's record lies, 0: no unit. route: (U, COLUMNS) int32, its routes, -1: none.
    """

    address: torch.Tensor
    route: torch.Tensor


@dataclass(frozen=True)
class Fetches:
    """Records that must come before units can use them.

    expert: (F,) int32, whose, -1: none. address: (F,) int64, where they go, 0: none.
    """

    expert: torch.Tensor
    address: torch.Tensor
