"""Banks: the records of a layer in host memory, in one piece or cut into a piece for each node.

They lend views and never copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import FormatError
from freetoken.formats.record import Expert, RecordLayout, shard_bounds
from freetoken.memory.mapping import map_bytes
from freetoken.memory.placement import Placer


class Bank:
    """`n_experts` records of one layout; memory is touched only as experts are put in.

    Distinct experts may be put from several threads at once. `missing` tells which were not: a bank that is not
    complete must never be computed with. records: read-only memory (nbytes,) uint8 on 64 bytes in which they lie
    already, shared with other processes; without it the bank has memory of its own. place: sets the policy of that
    fresh memory. node: where its pages should lie, None where nobody said.
    """

    def __init__(
        self,
        layout: RecordLayout,
        n_experts: int,
        records: NDArray[np.uint8] | None = None,
        *,
        place: Callable[[int, int], object] = lambda address, nbytes: None,
        node: int | None = None,
    ) -> None:
        self.layout = layout
        self.n_experts = n_experts
        self.node = node
        self.shared = records is not None
        memory = map_bytes(self.nbytes, place) if records is None else records
        self.records: NDArray[np.uint8] = memory.reshape(n_experts, layout.nbytes)
        self._present = np.zeros(n_experts, bool)

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.n_experts * self.layout.nbytes

    @property
    def missing(self) -> list[int]:
        """Experts that have not been put."""
        return [int(e) for e in np.flatnonzero(~self._present)]

    @property
    def shards(self) -> tuple[Bank, ...]:
        """The pieces: this one."""
        return (self,)

    def cut(self, expert: Expert) -> tuple[Expert, ...]:
        """What of an expert goes into each of the shards: all of it."""
        return (expert,)

    def put(self, index: int, expert: Expert) -> None:
        """Write one expert's record; raises `FormatError` when it does not fit the layout."""
        self.layout.pack(expert, self.records[index])
        self._present[index] = True

    def mark(self, experts: Iterable[int]) -> None:
        """Say that the records of these experts are complete, by whoever wrote or checked them in `records`."""
        self._present[list(experts)] = True

    def get(self, index: int) -> Expert:
        """The expert read back from its record (views where the layout allows)."""
        return self.layout.unpack(self.records[index])

    def __repr__(self) -> str:
        return f"<bank {self.n_experts} x {self.layout.nbytes} bytes, {self.layout.format.name}>"


class ShardedBank:
    """One layer on several nodes: a bank on each, whose records are slices of the experts (design D3).

    layout: of whole experts. nodes: one for each shard, None where it does not matter. bounds: the intermediate rows
    of each shard, as `shard_bounds` cuts them. place: called with address, bytes and node of each fresh mapping.
    """

    def __init__(
        self,
        layout: RecordLayout,
        n_experts: int,
        bounds: list[tuple[int, int]],
        nodes: tuple[int | None, ...],
        place: Callable[[int, int, int | None], object] = lambda address, nbytes, node: None,
    ) -> None:
        self.layout = layout
        self.n_experts = n_experts
        self.bounds = tuple(bounds)

        def make(start: int, stop: int, node: int | None) -> Bank:
            small = RecordLayout(layout.format, layout.hidden, stop - start, layout.bias)
            return Bank(small, n_experts, place=lambda address, nbytes: place(address, nbytes, node), node=node)

        self.shards = tuple(make(*edges, node) for edges, node in zip(bounds, nodes, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all records of all shards."""
        return sum(bank.nbytes for bank in self.shards)

    @property
    def missing(self) -> list[int]:
        """Experts of which a shard has not been put."""
        return sorted({e for bank in self.shards for e in bank.missing})

    def cut(self, expert: Expert) -> tuple[Expert, ...]:
        """What of an expert goes into each of the shards; raises `FormatError` when it does not fit the layout."""
        self.layout.check(expert)
        return tuple(expert.shard(start, stop) for start, stop in self.bounds)

    def put(self, index: int, expert: Expert) -> None:
        """Write one expert's records; raises `FormatError` when it does not fit the layout."""
        for bank, part in zip(self.shards, self.cut(expert), strict=True):
            bank.put(index, part)

    def __repr__(self) -> str:
        sizes = " + ".join(str(bank.layout.nbytes) for bank in self.shards)
        return f"<bank {self.n_experts} x ({sizes}) bytes, {self.layout.format.name}>"


LayerBank = Bank | ShardedBank
"""All records of a layer."""


def make_bank(layout: RecordLayout, n_experts: int, placer: Placer, step: int = 1) -> LayerBank:
    """An empty bank placed as the placer says; where its experts have too few granules for a shard each, interleaved.

    step: shards are cut at multiples of this, too.
    """
    placement = placer.placement
    if placement.policy == "shard":
        try:
            bounds = shard_bounds(layout.format, layout.intermediate, len(placement.nodes), step)
        except FormatError:
            return Bank(layout, n_experts, place=placer.place)
        return ShardedBank(layout, n_experts, bounds, placement.nodes, placer.place)
    node = placement.nodes[0] if placement.policy == "node" else None
    return Bank(layout, n_experts, place=placer.place, node=node)
