"""Layers computed on the device, by records that lie in slots, are fetched into them, or stream by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from freetoken.device.base import Device, Stream, Trip
from freetoken.errors import UnsupportedError
from freetoken.executor import BoundLayer
from freetoken.formats.record import Expert
from freetoken.gpu.gather import Gather
from freetoken.gpu.layer import LayerKernels
from freetoken.gpu.lookup import MOST_EXPERTS, Found, Lookup
from freetoken.gpu.tables import MOST_ROUTES
from freetoken.gpu.units import COLUMNS
from freetoken.offload.capture import wait_for
from freetoken.offload.layer_graphs import LayerGraphs
from freetoken.offload.records import as_tensor
from freetoken.offload.room import Room
from freetoken.offload.slots import LayerExperts, SlotPool
from freetoken.offload.streaming import Streamer


class SlottedExperts:
    """Computes layers on a device. Calls are for one thread at a time, all on the same lane or on ones that wait.

    layers: bound to their banks, which the device reads when `run` is called or before that. counting: see `Tables`.
    Raises `CapacityError` when the device refuses the memory, `UnsupportedError` where no kernel can be used.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[BoundLayer],
        shapes: Sequence[LayerExperts],
        room: Room,
        dtype: torch.dtype,
        counting: torch.Tensor,
    ) -> None:
        for shape in shapes:
            if shape.n_experts > MOST_EXPERTS or shape.top_k > MOST_ROUTES:
                raise UnsupportedError(
                    f"{shape.n_experts} experts, {shape.top_k} for each token: slots are kept for at most "
                    f"{MOST_EXPERTS} and {MOST_ROUTES}; use strategy='cpu'",
                    feature="slots",
                )
        self._device = device
        self._shapes = tuple(shapes)
        self.resident = room.strategy == "resident"
        self._banks = [layer.bank for layer in layers]
        self._kernels = _choose_kernels(device, layers, dtype)
        on = device.torch_device
        if self.resident:
            self.pool = SlotPool.resident(shapes, on, counting)
        else:
            self.pool = SlotPool(shapes, room.slots, on, counting)
        self.streamer = None if self.resident else Streamer(device, self._banks, room.buffer_bytes)
        self._calls = LayerGraphs(device)
        self._lookups: dict[tuple[int, int, bool, bool], Lookup] = {}
        self._found: dict[int, Found] = {}
        self._gathers: dict[int, Gather] = {}
        self._tables: dict[int, torch.Tensor] = {}
        if self.resident:
            self._fill()

    @property
    def kernels(self) -> tuple[str, ...]:
        """What computes."""
        return tuple(dict.fromkeys(kernels.name for kernels in self._kernels))

    def run(
        self, number: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rest: Iterable[int]
    ) -> torch.Tensor:
        """(T, H): the layer's experts for any number of tokens.

        rest: this layer and those after it whose banks the device reaches, in their order; read if layers stream.
        """
        few = self._tokens_at_once(number, *ids.shape)
        if few:
            parts = [slice(start, start + few) for start in range(0, len(ids), few)]
            found = [self._few(number, x[part], ids[part], weights[part], len(parts) == 1) for part in parts]
            return found[0] if len(found) == 1 else torch.cat(found)
        kernels = self._kernels[number]
        if self.streamer is None:
            return kernels.many(x, ids, weights, [self._resident_table(number)])
        if not self.streamer.covers(number):
            self.streamer.begin(list(rest), self._addresses())
        return kernels.many(x, ids, weights, self.streamer.groups(number))

    def put(
        self,
        stream: Stream,
        number: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        leave: Callable[[slice, torch.Tensor], Trip] | None,
    ) -> None:
        """Put a layer into a graph: out (B, H) gets the sum of its experts.

        leave: gives the trip on which some experts of a part of the tokens are left to the host, whose ids the look-up
        writes to the tensor that it gets; None where nothing is left to it.
        """
        few = self._tokens_of_a_lookup(number, ids.shape[1])
        for start in range(0, len(ids), few):
            part = slice(start, start + few)
            self._put(stream, number, x[part], ids[part], weights[part], out[part], leave and partial(leave, part))

    def _put(
        self,
        stream: Stream,
        number: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        leave: Callable[[torch.Tensor], Trip] | None,
    ) -> None:
        kernels, k = self._kernels[number], ids.shape[1]
        lookup, found = self._lookup(number, ids.numel(), apart=not self.resident, split=leave is not None)
        y = kernels.outputs(x, ids.numel())
        stream.kernel(lambda: lookup(ids, found))
        trip = None if leave is None else leave(found.host.view(ids.shape))
        if trip is not None:
            stream.ask(trip)
        if self.resident:
            stream.kernel(lambda: kernels.routes(x, k, found.units, y, early=True))
        else:
            gather = self._gather(number)
            side = stream.fork()
            side.kernel(lambda: gather(found.fetches))
            stream.kernel(lambda: kernels.routes(x, k, found.units, y, early=True))
            stream.join(side)
            stream.kernel(lambda: kernels.routes(x, k, found.late, y, early=False))
        here = ids if trip is None else found.here.view(ids.shape)
        stream.kernel(lambda: kernels.combine(y, here, weights, out))
        if trip is not None:
            wait_for(stream, trip, out)

    def _lookup(self, number: int, routes: int, *, apart: bool = False, split: bool = False) -> tuple[Lookup, Found]:
        """A layer's, and where it writes. split: some of what is missing may be left to the host."""
        key = number, routes, apart, split
        if key not in self._lookups:
            self._lookups[key] = Lookup(self.pool.tables(number, split=split), routes, apart=apart)
        if routes not in self._found:
            self._found[routes] = Found(routes, self._device.torch_device)
        return self._lookups[key], self._found[routes]

    def _few(
        self, number: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, may_capture: bool
    ) -> torch.Tensor:
        """The tokens of a look-up. may_capture: they are not part of a prompt, whose sizes do not come again."""
        if self.streamer is not None:
            self.streamer.stop()  # experts may leave the slots that it knows
        try:
            if may_capture:
                out = self._calls.run(partial(self._put, leave=None), number, x, ids, weights)
                if out is not None:
                    return out
            lookup, found = self._lookup(number, ids.numel())
            lookup(ids, found)
            if not self.resident:
                self._gather(number)(found.fetches)
        except BaseException:
            if not self.resident:
                self.pool.forget(number)  # its tables may name slots into which nothing was fetched
            raise
        return self._kernels[number].few(x, ids, weights, found.units)

    def _tokens_at_once(self, number: int, tokens: int, k: int) -> int:
        """Tokens of one look-up; 0 where matrix products are better.

        They are for more tokens than a unit has columns; where experts are fetched, for so many that several look-ups
        would fetch more than half of the layer, which is streamed once instead.
        """
        experts = self._shapes[number].n_experts
        few = self._tokens_of_a_lookup(number, k)
        most = few if self.resident else max(few, experts // (2 * k) // max(1, few) * few)
        return few if tokens <= most else 0

    def _tokens_of_a_lookup(self, number: int, k: int) -> int:
        """All of whose experts surely find slots."""
        slots, experts = self.pool.slots[number], self._shapes[number].n_experts
        return min(COLUMNS, MOST_ROUTES // k, COLUMNS if slots == experts else slots // k)

    def _gather(self, number: int) -> Gather:
        if number not in self._gathers:
            shards = self._banks[number].shards
            addresses = [self._device.pointer(as_tensor(shard.records)) for shard in shards]
            sizes = self._shapes[number].record_bytes
            self._gathers[number] = Gather(addresses, sizes, self._device.torch_device)
        return self._gathers[number]

    def fill(self, numbers: Iterable[int]) -> None:
        """Bring the first experts of these layers, which the device reaches, into slots: better than none."""
        lane = self._device.current()
        for number in () if self.resident else numbers:
            self.pool.forget(number)
            start = 0
            for shard in self._banks[number].shards:
                size = shard.layout.nbytes
                for slot, record in zip(self.pool.memory(number), as_tensor(shard.records), strict=False):
                    lane.copy(slot[start : start + size], record)
                start += size
            self.pool.take_first(number)

    def forget(self) -> None:
        """No expert is in a slot any more, but where all are for good."""
        for number in range(0 if self.resident else len(self._shapes)):
            self.pool.forget(number)

    def _addresses(self) -> NDArray[np.int64]:
        """Where each expert lies, (L, E), 0: in no slot; waits for the device."""
        slots = self.pool.read_tables().numpy().astype(np.int64)
        sizes = np.array([[shape.slot_bytes] for shape in self._shapes])
        bases = np.array([[self.pool.memory(i).data_ptr()] for i in range(len(slots))])
        return np.where(slots >= 0, bases + slots * sizes, 0)

    def _resident_table(self, number: int) -> torch.Tensor:
        """The address of each shard of each expert: (S, E)."""
        if number not in self._tables:
            first = torch.from_numpy(self._addresses()[number, : self._shapes[number].n_experts])
            sizes = self._shapes[number].record_bytes
            offsets = [sum(sizes[:i]) for i in range(len(sizes))]
            table = torch.stack([first + offset for offset in offsets])
            self._tables[number] = table.to(self._device.torch_device)
        return self._tables[number]

    def _fill(self) -> None:
        """All records into their slots; the banks are wanted no more."""
        for number, bank in enumerate(self._banks):
            self.pool.fill(number, [shard.records for shard in bank.shards])
        self._banks = []


def _choose_kernels(device: Device, layers: Sequence[BoundLayer], dtype: torch.dtype) -> list[LayerKernels]:
    """For each layer; layers of the same shapes share them."""
    known: dict[object, LayerKernels] = {}
    found = []
    for layer in layers:
        layouts = tuple(shard.layout for shard in layer.bank.shards)
        key = layouts, layer.activation, layer.bank.n_experts
        if key not in known:
            example: tuple[Expert, ...] = tuple(shard.get(0) for shard in layer.bank.shards)
            known[key] = LayerKernels(layouts, layer.activation, layer.bank.n_experts, device, dtype, example)
        found.append(known[key])
    return found
