"""The last tokens of some sequences, written by the device and read by the host a step later."""

from __future__ import annotations

import torch

from freetoken.device.base import Device, Stream

LENGTH = 4
"""Steps that are remembered; more than may be in flight, so that what is read is not being written."""


class TokenRing:
    """Tokens of the last `LENGTH` steps.

    rows: sequences. count: (1,) int64 on the device, steps that were written; set to 0 by who begins.
    """

    def __init__(self, device: Device, rows: int) -> None:
        self.count = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
        self._here = torch.zeros(LENGTH, rows, dtype=torch.int64, device=device.torch_device)
        self._there = device.host_tensor((LENGTH, rows), torch.int64)

    @property
    def moved(self) -> tuple[torch.Tensor, ...]:
        """What a step changes on the device."""
        return self.count, self._here

    def write(self, tokens: torch.Tensor) -> None:
        """The tokens (rows,) of a step; on the device."""
        self._here.index_copy_(0, self.count % LENGTH, tokens[None])
        self.count.add_(1)

    def send(self, stream: Stream) -> None:
        """All of them to the host."""
        stream.copy(self._there, self._here)

    def read(self, step: int) -> torch.Tensor:
        """The tokens (rows,) of a step that was sent and has ended, counted from 0."""
        return self._there[step % LENGTH].clone()

    def fetch(self, step: int) -> torch.Tensor:
        """The same of a step that was not sent; waits for the device."""
        return self._here[step % LENGTH].cpu()
