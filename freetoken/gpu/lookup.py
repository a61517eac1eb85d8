"""Which slots hold the experts of a step, and which slots are given to those that are missing: one kernel, no host.

A layer has S slots for its E experts. The look-up takes the ids that the router chose, finds the distinct experts among
them, gives the missing ones the slots that were used longest ago, and writes work lists for the kernels that follow. A
slot that this very step uses is never given away. Missing experts beyond those that `Tables.split` lets in get none:
they are left to the host.

Slots are kept in the order of their last use, so that victims are the first that this step does not use and no stamps
are compared with each other: one running sum over S, where ranks by comparison are S * S. Slots last used in the same
step keep the order that they had. Free slots have never been used and come first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.gpu.tables import COUNTS, MOST_ROUTES, Tables
from freetoken.gpu.units import COLUMNS, Fetches, Units

MOST_EXPERTS = 512
"""Of one layer, and as many slots."""
_WARPS = 8
"""Of 1 to 16 on an H200, 64 routes: 5.4, 4.0, 3.8, 3.4 and 3.8 us; 8 routes take 2.3 to 2.7 with any (docs/gpu.md)."""


class Found:
    """What a look-up of R routes writes: units over experts and the fetches that some of them wait for.

    units: U = R, those that there are first. late: those of experts that are fetched, where the look-up keeps them
    apart, else empty. fetches: F = R, those that there are first. here, host: (R,) int32, each route's
    expert if it has a unit, or if it is left to the host, else -1. Look-ups that run one after the other can share it.
    """

    def __init__(self, routes: int, device: torch.device) -> None:
        self.routes = routes
        self.address = torch.zeros(2, routes, dtype=torch.int64, device=device)
        self.route = torch.full((2, routes, COLUMNS), -1, dtype=torch.int32, device=device)
        self.units = Units(self.address[0], self.route[0])
        self.late = Units(self.address[1], self.route[1])
        self.fetches = Fetches(
            torch.full((routes,), -1, dtype=torch.int32, device=device),
            torch.zeros(routes, dtype=torch.int64, device=device),
        )
        self.here, self.host = torch.full((2, routes), -1, dtype=torch.int32, device=device)


class Lookup:
    """The look-up of `routes` = B * K ids in one layer's tables, which may be captured in a graph.

    apart: units of experts that must be fetched first go to `Found.late`, so that the others need not wait. Raises
    `ValueError` where a step could need more slots than there are, or for more than `MOST_ROUTES` or `MOST_EXPERTS`.
    """

    def __init__(self, tables: Tables, routes: int, *, apart: bool = False) -> None:
        if not 1 <= routes <= MOST_ROUTES:
            raise ValueError(f"a look-up of {routes} routes, expected 1 to {MOST_ROUTES}: pass fewer tokens at once")
        if max(tables.n_experts, tables.n_slots) > MOST_EXPERTS:
            raise ValueError(
                f"{tables.n_experts} experts and {tables.n_slots} slots, at most {MOST_EXPERTS} are handled"
            )
        if tables.n_slots < min(routes, tables.n_experts):
            raise ValueError(
                f"{tables.n_slots} slots for {tables.n_experts} experts, but {routes} routes may need "
                f"{min(routes, tables.n_experts)} at once: make the cache larger, or pass fewer tokens at once"
            )
        self.tables = tables
        self.routes = routes
        self.apart = apart

    def __call__(self, ids: torch.Tensor, found: Found) -> None:
        """Look up ids (B, K) int32 or int64, contiguous; writes `found` and the tables.

        Ids outside [0, E) are nobody's: they get no unit, no fetch and no count. An expert has a unit for each
        `COLUMNS` of its routes, in their order; units and fetches are in the order of their first route. Experts
        left to the host have none of these: `found.host` names them. A look-up without any valid id is no step.
        """
        if ids.numel() != self.routes or found.routes != self.routes or not ids.is_contiguous():
            raise ValueError(
                f"ids {tuple(ids.shape)} of strides {ids.stride()} and lists for {found.routes} routes, "
                f"expected {self.routes} contiguous ids"
            )
        tables = self.tables
        _look_up[(1,)](
            ids, tables.slot_of, tables.expert_in, tables.used, tables.order, tables.step, tables.split,
            tables.counts, tables.counting, found.address, found.route, found.fetches.expert, found.fetches.address,
            found.here, found.host, tables.pool, tables.slot_bytes,
            E=tables.n_experts, S=tables.n_slots, R=self.routes, APART=self.apart, COLUMNS=COLUMNS, COUNTS=COUNTS,
            PADDED_R=triton.next_power_of_2(self.routes), PADDED_S=triton.next_power_of_2(tables.n_slots),
            num_warps=_WARPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pool", "slot_bytes"])
def _look_up(
    ids, slot_of, expert_in, used, order, step, split, counts, counting,
    address, route, expert, target, here_ids, host, pool, slot_bytes,
    E: tl.constexpr, S: tl.constexpr, R: tl.constexpr, APART: tl.constexpr, COLUMNS: tl.constexpr,
    COUNTS: tl.constexpr, PADDED_R: tl.constexpr, PADDED_S: tl.constexpr,
):  # fmt: skip
    # Slots, the one used longest ago first, and what was in them.
    p = tl.arange(0, PADDED_S)
    inside = p < S
    s = tl.load(order + p, mask=inside, other=0)
    old = tl.load(expert_in + s, mask=inside, other=-1)

    # Routes. Pairs are (j, i), so that each thread adds up what it has of a column.
    i = tl.arange(0, PADDED_R)
    j = i[:, None]
    wanted = tl.load(ids + i, mask=i < R, other=-1)
    allowed = tl.load(split + 1 + i, mask=i < R, other=0)  # all at once: which one matters is known late
    valid = (wanted >= 0) & (wanted < E)
    one = tl.where(valid, wanted, -1).to(tl.int32)
    slot = tl.load(slot_of + one, mask=valid, other=-1)
    now = tl.load(step) + 1
    hit = slot >= 0
    tl.store(used + slot, tl.zeros((PADDED_R,), tl.int64) + now, mask=hit)

    same = (one[:, None] == one[None, :]) & valid[None, :]
    turn = tl.sum((same & (j < i[None, :])).to(tl.int32), 0)  # routes of its expert before it
    missing = (valid & (slot < 0) & (turn == 0)).to(tl.int32)
    number = tl.cumsum(missing, 0) - missing
    # three sums of at most 64 in one
    sums = tl.sum(valid.to(tl.int32) + ((valid & (turn == 0)).to(tl.int32) << 8) + (missing << 16), 0)
    n_routed, n_distinct, n_missing = sums & 255, (sums >> 8) & 255, sums >> 16
    n_fetched = tl.sum(tl.where(i + 1 == n_missing, tl.minimum(tl.maximum(allowed, 0), n_missing), 0), 0)
    tl.store(expert + number, one, mask=(missing != 0) & (number < n_fetched))
    tl.store(expert + i, tl.full((PADDED_R,), -1, tl.int32), mask=(i < R) & (i >= n_fetched))
    tl.store(target + i, tl.zeros((PADDED_R,), tl.int64), mask=(i < R) & (i >= n_fetched))
    column = tl.arange(0, COLUMNS)
    none = tl.full((PADDED_R, COLUMNS), -1, tl.int32)
    tl.store(route + j * COLUMNS + column[None, :], none, mask=j < R)
    tl.store(route + (R + j) * COLUMNS + column[None, :], none, mask=j < R)

    # Victims, in the order of the fetches. The barrier shows every thread the list of these and the slots in use.
    tl.debug_barrier()
    in_use = inside & (tl.load(used + s, mask=inside, other=0) == now)
    idle = (inside & (in_use == 0)).to(tl.int32)
    idle_before = tl.cumsum(idle, 0) - idle
    taken = (idle != 0) & (idle_before < n_fetched)
    new = tl.load(expert + idle_before, mask=taken, other=0)
    tl.store(slot_of + old, tl.full((PADDED_S,), -1, tl.int32), mask=taken & (old >= 0))
    tl.store(slot_of + new, s, mask=taken)
    tl.store(expert_in + s, new, mask=taken)
    tl.store(used + s, tl.zeros((PADDED_S,), tl.int64) + now, mask=taken)
    tl.store(target + idle_before, pool + s.to(tl.int64) * slot_bytes, mask=taken)
    used_before = p - idle_before + tl.minimum(idle_before, n_fetched)
    kept = tl.sum(idle, 0) - n_fetched
    place = tl.where(in_use | taken, kept + used_before, p - used_before)
    tl.store(order + place, s, mask=inside)

    # Who has no slot now is left to the host.
    tl.debug_barrier()
    slot = tl.load(slot_of + one, mask=valid, other=-1)
    here = slot >= 0
    tl.store(here_ids + i, tl.where(here, one, -1), mask=i < R)
    tl.store(host + i, tl.where(here, -1, one), mask=i < R)

    # A unit belongs to the route that begins it: the first, ninth, ... of its expert.
    begins = here & (turn % COLUMNS == 0)
    n_late = 0
    if APART:
        late = (begins & (hit == 0)).to(tl.int32)
        soon = (begins & hit).to(tl.int32)
        unit = tl.where(hit, tl.cumsum(soon, 0) - soon, R + tl.cumsum(late, 0) - late)
        n_late = tl.sum(late, 0)
        n_units = tl.sum(soon, 0)
    else:
        begun = begins.to(tl.int32)
        unit = tl.cumsum(begun, 0) - begun
        n_units = tl.sum(begun, 0)
    tl.store(address + i, tl.zeros((PADDED_R,), tl.int64), mask=(i < R) & (i >= n_units))
    tl.store(address + R + i, tl.zeros((PADDED_R,), tl.int64), mask=(i < R) & (i >= n_late))
    starts = same & (turn[:, None] == (turn - turn % COLUMNS)[None, :])
    mine = tl.sum(tl.where(starts, unit[:, None], 0), 0)
    tl.store(address + unit, pool + slot.to(tl.int64) * slot_bytes, mask=begins)
    tl.store(route + mine * COLUMNS + turn % COLUMNS, i, mask=here)

    tl.store(step, now)
    c = tl.arange(0, 8)
    add = tl.where(c == 0, (n_routed > 0).to(tl.int32), tl.where(c == 1, n_routed, n_distinct - n_missing))
    add = tl.where(c == 3, n_missing, tl.where(c == 4, n_fetched, add))
    add = tl.where(tl.load(counting) != 0, add, 0)
    tl.store(counts + c, tl.load(counts + c, mask=c < COUNTS) + add, mask=c < COUNTS)
