"""A stream that does at once what it is given: the run before a capture, which compiles and allocates."""

from __future__ import annotations

from collections.abc import Callable

import torch

from freetoken.device.base import Flag, Stream, Trip, check_copy


class Immediate:
    """Operations go to torch's current stream. Hand-offs to the host are left out, forks are beside nothing."""

    def kernel(self, work: Callable[[], object], cost: float = 0.0) -> None:
        """See `Stream`."""
        work()

    def trace(self, work: Callable[[], object]) -> None:
        """See `Stream`."""
        work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Stream`."""
        check_copy(target, source)
        target.copy_(source)

    def ring(self, flag: Flag, answered: bool = False) -> None:
        """Left out."""

    def wait(self, flag: Flag, take: bool = True) -> None:
        """Left out."""

    def take(self, flag: Flag) -> None:
        """Left out."""

    def ask(self, trip: Trip) -> None:
        """Left out."""

    def ready(self, trip: Trip) -> None:
        """Left out."""

    def add(self, trip: Trip, out: torch.Tensor) -> None:
        """Left out."""

    def fork(self) -> Immediate:
        """See `Stream`."""
        return self

    def join(self, other: Stream) -> None:
        """See `Stream`."""
