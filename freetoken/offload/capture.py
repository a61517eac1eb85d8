"""A whole decode step as one graph: layers put on the stream that is captured, and what they leave to the host.

A step runs once at once (`Immediate`), which compiles kernels and makes what the graph needs of the host's memory, then
it is captured. What a capture decides is decided for all its replays: which layers the device reaches, shapes,
addresses. What may change between them is in tables on the device: what lies in slots, the split, what is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from freetoken.device.base import Stream, Trip
from freetoken.duties import Duty
from freetoken.offload.host import HandOff


@dataclass
class StepCapture:
    """A step that is being captured, or run before that.

    stream: where layers go. valid: (B,) bool on the device, tokens that count, the others have no experts; None for
    all. hand_offs: of each layer and its tokens from a number on, made by the run before. duties: those of the capture,
    in the order in which the graph waits for them.
    """

    stream: Stream
    valid: torch.Tensor | None = None
    hand_offs: dict[tuple[int, int], HandOff] = field(default_factory=dict)
    duties: list[Duty] = field(default_factory=list)
    is_warm: bool = False

    def hand_off(self, number: int, first: int, make: Callable[[], HandOff]) -> HandOff:
        """A layer's, for tokens from `first` on; made in the run before the capture."""
        key = number, first
        if not self.is_warm:
            self.hand_offs[key] = make()
        else:
            self.duties.append(self.hand_offs[key].duty)
        return self.hand_offs[key]

    def count(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, K), contiguous: ids, -1 for tokens that do not count."""
        if self.valid is None:
            return self.as_type(ids, ids.dtype)
        valid, out = self.valid, torch.empty(ids.shape, dtype=ids.dtype, device=ids.device)
        nobody = ids.new_full((), -1)
        self.stream.kernel(lambda: torch.where(valid[:, None], ids, nobody, out=out))
        return out

    def as_type(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Contiguous and of a dtype: a copy where it is not."""
        if tensor.dtype == dtype and tensor.is_contiguous():
            return tensor
        out = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        self.stream.kernel(lambda: out.copy_(tensor))
        return out


def wait_for(stream: Stream, trip: Trip, out: torch.Tensor) -> None:
    """Add what the host computed to (B, H), when it has; everything else is on the stream already."""
    stream.ready(trip)
    stream.wait(trip.answer)
    stream.add(trip, out)


def result_for(x: torch.Tensor) -> torch.Tensor:
    """Room for a layer's result. What a recording on ordinary memory goes on with is numbers."""
    return torch.zeros_like(x) if x.device.type == "cpu" else torch.empty_like(x)
