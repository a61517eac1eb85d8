"""One layer of a model on a device, as its module holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from freetoken.executor import BoundLayer, refuse_copy
from freetoken.formats.record import RecordLayout

if TYPE_CHECKING:
    from freetoken.offload.experts import DeviceExperts


@dataclass(frozen=True, eq=False)
class DeviceLayer:
    """Which layer it is, and of what.

    layout: of whole experts. expert_bytes: of one, in all shards. bound: on the host, None where that copy was dropped.
    """

    experts: DeviceExperts
    number: int
    layout: RecordLayout
    n_experts: int
    expert_bytes: int
    bound: BoundLayer | None

    def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed experts' weighted sum: see `Executor.run`, whose shapes these are, on the device."""
        return self.experts.run(self, x, ids, weights)

    def __deepcopy__(self, memo: object) -> Any:
        refuse_copy()

    def __reduce__(self) -> Any:
        refuse_copy()
