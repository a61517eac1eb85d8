"""What the host has to do for a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from freetoken.device.base import Flag
from freetoken.duties._worker import TeamWork


@dataclass(frozen=True)
class Duty:
    """One thing that the host does while a step runs, and that its graph waits for.

    name, layer: for messages. work: what is done; it calls nothing of the device. answer: the flag that the graph waits
    for. bell: the flag that the device counts up when the work can begin, of one graph only. Without a bell it begins
    when the step is posted and the last answer was taken: there the graph takes the answer when it has used what the
    work wrote (`Stream.take`), and graphs whose duties write to the same memory share the answer.
    """

    name: str
    layer: int | None
    work: Callable[[], object] | TeamWork
    answer: Flag
    bell: Flag | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer}, {self.name}"
