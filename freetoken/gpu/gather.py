"""Records from registered host memory into slots: a kernel that reads them over the link, as a list on the device says.

A copy for each record would need the host to know which; this is one node of a graph, whatever was missed. Few programs
suffice, since the link is the limit, and leave the rest of the device to whoever computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from freetoken.gpu.units import Fetches

_PROGRAMS = 12
_CHUNK = 16384
_WARPS = 4
"""What is in flight is the first two together, in bytes. On an H200, lists of one record of 2.65 MB: 33 GB/s with 4
programs, 45 with 8, 47 with 12 to 32; records of 13.25 MB: 35, 50 and 50. Copies have 50 and 54 (docs/gpu.md)."""


class Gather:
    """Fetches of one layer, whose records lie in the banks of its shards; may be captured in a graph.

    addresses: of each shard's bank, as the device sees them, [E, record_bytes] of registered memory each. record_bytes:
    of each shard; a slot holds its shards' records one after the other. All are multiples of 16, else `ValueError`.
    """

    def __init__(self, addresses: Sequence[int], record_bytes: Sequence[int], device: torch.device) -> None:
        if len(addresses) != len(record_bytes) or not addresses:
            raise ValueError(
                f"{len(addresses)} banks and {len(record_bytes)} sizes of records, expected as many, not 0"
            )
        if any(n % 16 or n <= 0 for n in (*addresses, *record_bytes)):
            raise ValueError(f"banks at {addresses}, records of {record_bytes} bytes: expected multiples of 16")
        offsets = [sum(record_bytes[:i]) for i in range(len(record_bytes))]
        rows = list(zip(addresses, record_bytes, offsets, strict=True))
        self.shards = torch.tensor(rows, dtype=torch.int64).to(device)
        self.slot_bytes = sum(record_bytes)

    def __call__(self, fetches: Fetches) -> None:
        """Copy the records of the experts in the list to the addresses beside them; entries of -1 do nothing."""
        (n,) = fetches.expert.shape
        _gather[(_PROGRAMS,)](
            fetches.expert, fetches.address, self.shards,
            F=n, PADDED_F=triton.next_power_of_2(n), SHARDS=len(self.shards), CHUNK=_CHUNK,
            num_warps=_WARPS,
        )  # fmt: skip


@triton.jit
def _gather(
    expert, target, shards,
    F: tl.constexpr, PADDED_F: tl.constexpr, SHARDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = CHUNK // 16
    row = tl.arange(0, ROWS)
    word = tl.arange(0, 4)
    f = tl.arange(0, PADDED_F)
    listed = tl.load(expert + f, mask=f < F, other=-1)
    entries = tl.max(tl.where(listed >= 0, f + 1, 0), 0)
    programs = tl.num_programs(0)
    turn = tl.program_id(0)  # programs take chunks in turn, also from one record to the next
    for entry in range(entries):
        e = tl.load(expert + entry).to(tl.int64)
        if e >= 0:
            to = tl.load(target + entry)
            for shard in range(SHARDS):
                bank = tl.load(shards + shard * 3)
                nbytes = tl.load(shards + shard * 3 + 1)
                offset = tl.load(shards + shard * 3 + 2)
                source = tl.multiple_of((bank + e * nbytes).to(tl.pointer_type(tl.int32)), 16)
                slot = tl.multiple_of((to + offset).to(tl.pointer_type(tl.int32)), 16)
                rows = nbytes // 16
                chunks = ((nbytes + CHUNK - 1) // CHUNK).to(tl.int32)
                for chunk in range(turn, chunks, programs):
                    at = chunk * ROWS + row
                    inside = (at < rows)[:, None]
                    where = at[:, None] * 4 + word[None, :]
                    tl.store(slot + where, tl.load(source + where, mask=inside), mask=inside)
                turn = (turn + programs - chunks % programs) % programs
