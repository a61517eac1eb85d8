"""What of a model's experts is where on a device, what was moved, and what was waited for: for reports."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.device.histogram import Times
from freetoken.offload.pinning import Pinned
from freetoken.offload.slots import Statistics


@dataclass(frozen=True)
class Usage:
    """What of a model's experts is where on a device, and what was moved; bytes.

    statistics: of look-ups, None without slots. fetched_bytes_per_token: into slots. streamed_bytes: copied for many
    tokens at once. link_bps: what a plain copy from pinned memory reached when the first layer was pinned, bytes a
    second; 0 where none was made. host_threads: that compute layers, 0 where none was computed there.

    What was counted since `reset_statistics`, but for runs before a capture: fetched_per_token, computed_per_token:
    missing experts that were fetched, or left to the host, over all layers. split: how they are divided. waits: how the
    device waits for the host, "" where it never did. waited: how long, for each layer that left something to the host;
    hand_off: what of that is neither the host's work nor the device's own; host_work: the former.
    """

    device: str
    strategy: str
    slots: int
    slot_bytes: int
    buffer_bytes: int
    pinned: Pinned | None
    statistics: Statistics | None
    fetched_bytes_per_token: float
    streamed_bytes: int
    link_bps: float
    kernels: tuple[str, ...]
    host_threads: int
    fetched_per_token: float
    computed_per_token: float
    split: str
    waits: str
    waited: Times
    hand_off: Times
    host_work: Times

    @property
    def hit_rate(self) -> float | None:
        """Share of wanted experts that were in slots; None before any was looked up."""
        return None if self.statistics is None or not self.statistics.routed else self.statistics.hit_rate
