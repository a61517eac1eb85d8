"""Whole layers on their way to the device, for many tokens: two buffers, and a lane that copies meanwhile.

A *pass* is all layers once, in their order. What is copied is cut into groups of as many experts as a buffer holds, for
most layers one group. While a group is computed the next one is copied; a buffer is written again when what was
computed with it is done. Experts that lie in slots already are computed with the first group of their layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freetoken.banks import LayerBank
from freetoken.device.base import Device
from freetoken.offload.records import as_tensor

BUFFERS = 2


@dataclass(frozen=True)
class _Group:
    """Experts of a layer that are copied together; first: the slots' are computed with them. index: of its table."""

    layer: int
    experts: NDArray[np.intp]
    index: int


class Streamer:
    """Streams layers of banks that the device reaches.

    buffer_bytes: of one of the two buffers, at least the largest expert. Calls are for one thread at a time, whose
    current lane is the same throughout a pass. Raises `ValueError` for a buffer that holds no expert.
    """

    def __init__(self, device: Device, banks: Sequence[LayerBank], buffer_bytes: int) -> None:
        largest = max(bank.nbytes // bank.n_experts for bank in banks)
        if buffer_bytes < largest:
            raise ValueError(f"a buffer of {buffer_bytes} bytes cannot hold an expert of {largest}")
        self._device = device
        self._banks = tuple(banks)
        self._records = [[as_tensor(shard.records) for shard in bank.shards] for bank in banks]
        self._lane = device.lane()
        self._buffers = torch.empty(BUFFERS, buffer_bytes, dtype=torch.uint8, device=device.torch_device)
        self._room = buffer_bytes
        self._groups: list[_Group] = []
        self._at = 0  # the group that is computed next
        self._copied: list[Any] = []
        self._free: list[Any] = []  # when each buffer may be written
        self._tables: torch.Tensor | None = None
        self.copied_bytes = 0

    @property
    def nbytes(self) -> int:
        """Of the device's memory."""
        return self._buffers.nbytes

    def covers(self, layer: int) -> bool:
        """Whether a pass goes on with this layer."""
        return self._at < len(self._groups) and self._groups[self._at].layer == layer

    def begin(self, layers: Sequence[int], resident: NDArray[np.int64]) -> None:
        """Begin a pass over these layers, whose banks the device reaches.

        resident: (L, E) addresses of records on the device, for all layers, 0 for experts that are not there. They
        stay where they are until the pass is over or another one begins.
        """
        tables: list[NDArray[np.int64]] = []
        self._groups, self._at = [], 0
        for layer in layers:
            bank = self._banks[layer]
            there = resident[layer, : bank.n_experts]
            missing = np.flatnonzero(there == 0)
            room = self._room // (bank.nbytes // bank.n_experts)
            for start in range(0, max(1, len(missing)), room):
                experts = missing[start : start + room]
                tables.append(self._table(bank, experts, len(tables) % BUFFERS, None if start else there))
                self._groups.append(_Group(layer, experts, len(tables) - 1))
        self._tables = self._to_device(tables)
        current = self._device.current()
        self._free = [current.mark()] * BUFFERS
        self._copied = []
        for _ in range(BUFFERS):
            self._copy_next()

    def groups(self, layer: int) -> Iterator[torch.Tensor]:
        """For each group of a layer, when it is there, the address of each shard of each expert: (S, E) int64.

        0 for experts of other groups. What is put on the current lane until the next one is asked for is computed with
        it. The addresses are of shards, not of whole experts.
        """
        assert self._tables is not None, "no pass was begun"
        current = self._device.current()
        while self.covers(layer):
            group = self._groups[self._at]
            bank = self._banks[layer]
            current.after(self._copied[self._at])
            try:
                yield self._tables[group.index, : len(bank.shards), : bank.n_experts]
            except BaseException:
                self._groups = []  # what follows is not computed in this order
                raise
            self._at += 1
            self._free[group.index % BUFFERS] = current.mark()
            self._copy_next()

    def stop(self) -> None:
        """End a pass before its end."""
        self._groups = []

    def _copy_next(self) -> None:
        number = len(self._copied)
        if number == len(self._groups):
            return
        group = self._groups[number]
        buffer = self._buffers[number % BUFFERS]
        self._lane.after(self._free[number % BUFFERS])
        at = 0
        for records in self._records[group.layer]:
            size = records.shape[1]
            for first, last in _runs(group.experts):
                part = records[group.experts[first] : group.experts[last - 1] + 1]
                target = buffer[at + first * size : at + last * size].view(part.shape)
                self._lane.copy(target, part)
                self.copied_bytes += part.nbytes
            at += len(group.experts) * size
        self._copied.append(self._lane.mark())

    def _table(
        self, bank: LayerBank, experts: NDArray[np.intp], buffer: int, there: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """Addresses (S, E): of copied experts in a buffer, shard by shard, and of what is there already."""
        table = np.zeros((len(bank.shards), bank.n_experts), np.int64)
        base, offset = self._buffers[buffer].data_ptr(), 0
        for row, shard in zip(table, bank.shards, strict=True):
            size = shard.layout.nbytes
            if there is not None:
                row[:] = np.where(there, there + offset, 0)
            row[experts] = base + len(experts) * offset + np.arange(len(experts)) * size
            offset += size
        return table

    def _to_device(self, tables: list[NDArray[np.int64]]) -> torch.Tensor:
        """All tables in one tensor of the device, padded with 0. Whoever called has waited for the current lane."""
        shape = len(tables), max(len(t) for t in tables), max(t.shape[1] for t in tables)
        joined = torch.zeros(shape, dtype=torch.int64)
        for target, table in zip(joined, tables, strict=True):
            target[: len(table), : table.shape[1]] = torch.from_numpy(table)
        return joined.to(self._device.torch_device)


def _runs(experts: NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    """Where neighbours in the list are neighbours in the bank: [first, last) of each run."""
    edges = np.flatnonzero(np.diff(experts) != 1) + 1
    yield from zip([0, *edges.tolist()], [*edges.tolist(), len(experts)], strict=True) if len(experts) else ()
