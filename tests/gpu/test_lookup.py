"""The look-up against a plain model of it, over random steps; on a CUDA device where there is one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from freetoken.gpu.lookup import Found, Lookup
from freetoken.gpu.tables import COUNTS, MOST_ROUTES, Tables
from freetoken.gpu.units import COLUMNS, Units

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 400 if DEVICE.type == "cuda" else 90
POOL = 3 << 40
"""No memory is there: the look-up only computes addresses."""


def make_tables(n_experts: int, n_slots: int, slot_bytes: int = 4096, pool: int = POOL) -> Tables:
    return Tables(
        slot_of=torch.full((n_experts,), -1, dtype=torch.int32, device=DEVICE),
        expert_in=torch.full((n_slots,), -1, dtype=torch.int32, device=DEVICE),
        used=torch.zeros(n_slots, dtype=torch.int64, device=DEVICE),
        order=torch.arange(n_slots, dtype=torch.int32, device=DEVICE),
        step=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        split=torch.arange(MOST_ROUTES + 1, dtype=torch.int32, device=DEVICE),
        counts=torch.zeros(COUNTS, dtype=torch.int64, device=DEVICE),
        counting=torch.ones(1, dtype=torch.int32, device=DEVICE),
        pool=pool,
        slot_bytes=slot_bytes,
    )


@dataclass
class Model:
    """Slots as a list in the order of their last use, and everything else that follows from it."""

    n_experts: int
    n_slots: int
    order: list[int] = field(init=False)
    expert_in: list[int] = field(init=False)
    used: list[int] = field(init=False)
    step: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * COUNTS)

    def __post_init__(self) -> None:
        self.order = list(range(self.n_slots))
        self.expert_in = [-1] * self.n_slots
        self.used = [0] * self.n_slots

    def look_up(self, ids: list[int], split: list[int]) -> tuple[list[int], list[int], dict[int, list[int]]]:
        """The experts that are fetched, those left to the host, and all experts' routes, in the order of the first."""
        routes: dict[int, list[int]] = {}
        for route, expert in enumerate(ids):
            if 0 <= expert < self.n_experts:
                routes.setdefault(expert, []).append(route)
        self.step += 1
        missing = [expert for expert in routes if expert not in self.expert_in]
        n = min(max(0, split[len(missing)]), len(missing))
        fetched, left = missing[:n], missing[n:]
        idle = [slot for slot in self.order if self.expert_in[slot] not in routes]
        for expert, slot in zip(fetched, idle, strict=False):
            self.expert_in[slot] = expert
        in_use = [slot for slot in self.order if self.expert_in[slot] in routes]
        for slot in in_use:
            self.used[slot] = self.step
        self.order = [slot for slot in self.order if slot not in in_use] + in_use
        self.counts[0] += bool(routes)
        self.counts[1] += sum(map(len, routes.values()))
        self.counts[2] += len(routes) - len(missing)
        self.counts[3] += len(missing)
        self.counts[4] += len(fetched)
        return fetched, left, routes


def read_units(units: Units) -> list[tuple[int, list[int]]]:
    """(address, routes) of each unit; checks that units and their routes come first and the rest is marked."""
    address, route = units.address.tolist(), units.route.tolist()
    n = sum(a != 0 for a in address)
    assert 0 not in address[:n] and set(address[n:]) <= {0}
    found = []
    for a, row in zip(address, route, strict=True):
        listed = [r for r in row if r >= 0]
        assert row == listed + [-1] * (COLUMNS - len(listed))
        assert bool(a) == bool(listed)
        found.append((a, listed))
    return found[:n]


def expected_units(model: Model, experts: list[int], routes: dict[int, list[int]], tables: Tables) -> list[object]:
    """The units of these experts, of which there is one for each `COLUMNS` routes, in the order of their first."""
    units = []
    for expert in experts:
        address = tables.pool + model.expert_in.index(expert) * tables.slot_bytes
        listed = routes[expert]
        units += [(address, listed[i : i + COLUMNS]) for i in range(0, len(listed), COLUMNS)]
    return sorted(units, key=lambda unit: unit[1][0])


def check_step(model: Model, tables: Tables, lookup: Lookup, ids: torch.Tensor, found: Found) -> list[int]:
    """One step of both, which must agree in everything; returns what was fetched."""
    before = list(model.expert_in), list(model.used)
    lookup(ids.to(DEVICE), found)
    fetched, left, routes = model.look_up(ids.flatten().tolist(), tables.split.tolist())

    where = {expert: slot for slot, expert in enumerate(model.expert_in)}
    slot_of = [where.get(expert, -1) for expert in range(model.n_experts)]
    assert tables.slot_of.tolist() == slot_of
    assert tables.expert_in.tolist() == model.expert_in
    assert tables.used.tolist() == model.used
    assert tables.order.tolist() == model.order
    assert tables.step.tolist() == [model.step]
    assert tables.counts.tolist() == model.counts

    padding = found.routes - len(fetched)
    addresses = [tables.pool + slot_of[expert] * tables.slot_bytes for expert in fetched]
    assert found.fetches.expert.tolist() == fetched + [-1] * padding
    assert found.fetches.address.tolist() == addresses + [0] * padding
    assert found.host.tolist() == [expert if expert in left else -1 for expert in ids.flatten().tolist()]
    late = fetched if lookup.apart else []
    soon = [expert for expert in routes if expert not in late and expert not in left]
    assert read_units(found.units) == expected_units(model, soon, routes, tables)
    assert read_units(found.late) == expected_units(model, late, routes, tables)

    # what the model itself must keep to: nothing in use is given away, and nothing older is kept
    given = [slot for slot, expert in enumerate(model.expert_in) if before[0][slot] != expert]
    assert not {before[0][slot] for slot in given} & set(routes)
    kept = [slot for slot in range(model.n_slots) if slot not in given and before[0][slot] not in routes]
    assert max((before[1][slot] for slot in given), default=0) <= min(
        (before[1][slot] for slot in kept), default=1 << 60
    )
    return fetched


def draw(random: np.random.Generator, n_experts: int, shape: tuple[int, int], kind: str) -> torch.Tensor:
    """ids (B, K): what a router gives, or what it should not."""
    if kind == "uniform":
        ids = np.stack([random.permutation(max(n_experts, shape[1]))[: shape[1]] for _ in range(shape[0])])
    elif kind == "skewed":
        ids = np.minimum(random.geometric(min(1.0, 4 / n_experts), shape) - 1, n_experts - 1)
    else:
        ids = random.integers(-3, n_experts + 3, shape)
        ids[random.random(shape) < 0.2] = -1
        ids[random.random(shape) < 0.05] = random.choice([-(1 << 31), (1 << 31) - 1])
    return torch.from_numpy(ids.astype(random.choice(["int32", "int64"])))


def draw_split(random: np.random.Generator) -> torch.Tensor:
    """How many are fetched of 0, 1, ... missing experts: all, none, a share, or numbers that are not possible too."""
    m = np.arange(MOST_ROUTES + 1)
    kind = random.choice(["all", "none", "share", "any"])
    table = {"all": m, "none": 0 * m, "share": np.round(m * random.random()), "any": random.integers(-9, 99, len(m))}
    return torch.from_numpy(table[kind].astype("int32"))


SHAPES = [(1, 1, (1, 1)), (8, 5, (1, 5)), (8, 8, (3, 4)), (60, 9, (1, 4)), (128, 32, (1, 8)), (128, 100, (4, 8)),
          (128, 128, (8, 8)), (512, 64, (8, 8)), (512, 512, (6, 10)), (7, 7, (8, 8)), (300, 41, (3, 7))]  # fmt: skip
"""E, S, (B, K)."""


@pytest.mark.parametrize(("n_experts", "n_slots", "shape"), SHAPES)
@pytest.mark.parametrize("apart", [False, True])
def test_does_what_the_model_does(n_experts: int, n_slots: int, shape: tuple[int, int], apart: bool) -> None:
    random = np.random.default_rng([n_experts, n_slots, apart])
    tables = make_tables(n_experts, n_slots)
    lookup, found = Lookup(tables, shape[0] * shape[1], apart=apart), Found(shape[0] * shape[1], DEVICE)
    model = Model(n_experts, n_slots)

    for step in range(STEPS):
        if step % 5 == 4:
            tables.split.copy_(draw_split(random))
        check_step(
            model, tables, lookup, draw(random, n_experts, shape, random.choice(["uniform", "skewed", "bad"])), found
        )


def test_random_shapes() -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        n_experts = int(random.integers(1, 513))
        shape = (int(random.integers(1, 9)), int(random.integers(1, 9)))
        n_slots = int(random.integers(min(shape[0] * shape[1], n_experts), n_experts + 1))
        tables = make_tables(n_experts, n_slots, int(random.integers(1, 1 << 20)) * 64)
        lookup, found = Lookup(tables, shape[0] * shape[1]), Found(shape[0] * shape[1], DEVICE)
        model = Model(n_experts, n_slots)
        tables.split.copy_(draw_split(random))
        for _ in range(STEPS // 10):
            check_step(model, tables, lookup, draw(random, n_experts, shape, random.choice(["skewed", "bad"])), found)


def test_the_same_experts_are_found_again() -> None:
    tables, model, found = make_tables(16, 4), Model(16, 4), Found(4, DEVICE)
    lookup = Lookup(tables, 4)
    ids = torch.tensor([[9, 2], [2, 11]])
    assert check_step(model, tables, lookup, ids, found) == [9, 2, 11]
    assert check_step(model, tables, lookup, ids, found) == []
    assert tables.counts.tolist() == [2, 8, 3, 3, 3]


def test_what_was_used_longest_ago_goes_first() -> None:
    tables, model, found = make_tables(8, 3), Model(8, 3), Found(1, DEVICE)
    lookup = Lookup(tables, 1)
    for expert in (0, 1, 2, 0, 3, 4):  # 3 takes the place of 1, and 4 that of 2
        check_step(model, tables, lookup, torch.tensor([[expert]]), found)
    assert tables.slot_of.tolist() == [0, -1, -1, 1, 2, -1, -1, -1]


@pytest.mark.parametrize("apart", [False, True])
def test_the_first_of_the_missing_are_fetched_and_the_others_left_to_the_host(apart: bool) -> None:
    tables, model, found = make_tables(16, 8), Model(16, 8), Found(8, DEVICE)
    lookup = Lookup(tables, 8, apart=apart)
    check_step(model, tables, lookup, torch.tensor([[7, 7, 7, 7, -1, -1, -1, 16]]), found)
    tables.split.copy_(torch.arange(MOST_ROUTES + 1) // 2)
    assert check_step(model, tables, lookup, torch.tensor([[5, 3, 7, 1], [3, 5, 9, 1]]), found) == [5, 3]
    assert found.host.tolist() == [-1, -1, -1, 1, -1, -1, 9, 1]
    tables.split.fill_(-(1 << 31))
    assert check_step(model, tables, lookup, torch.tensor([[9, 3, 1, 1, 1, 1, 1, 1]]), found) == []
    assert found.host.tolist() == [9, -1, 1, 1, 1, 1, 1, 1]
    tables.split.fill_((1 << 31) - 1)
    assert check_step(model, tables, lookup, torch.tensor([[9, 3, 1, 1, 1, 1, 1, 1]]), found) == [9, 1]
    assert tables.counts.tolist() == [4, 28, 3, 9, 5]


def test_a_host_that_gets_all_leaves_the_slots_as_they_are() -> None:
    tables, found = make_tables(4, 4), Found(4, DEVICE)
    tables.split.zero_()
    Lookup(tables, 4)(torch.tensor([[3, 2, 1, 0]], device=DEVICE), found)
    assert found.host.tolist() == [3, 2, 1, 0] and read_units(found.units) == []
    assert set(tables.expert_in.tolist()) == {-1} and tables.used.tolist() == [0] * 4


def test_an_expert_of_many_routes_has_several_units() -> None:
    tables, found = make_tables(4, 4), Found(20, DEVICE)
    Lookup(tables, 20)(torch.tensor([[3] * 19 + [1]], device=DEVICE), found)
    assert [routes for _, routes in read_units(found.units)] == [
        list(range(8)),
        list(range(8, 16)),
        [16, 17, 18],
        [19],
    ]
    assert len({address for address, _ in read_units(found.units)}) == 2


def test_padded_tokens_are_nobodys() -> None:
    tables, found = make_tables(8, 8), Found(8, DEVICE)
    lookup = Lookup(tables, 8)
    lookup(torch.tensor([[5, 6, -1, -1], [-1, -1, 8, 1 << 40]], device=DEVICE), found)
    assert found.fetches.expert.tolist() == [5, 6] + [-1] * 6
    assert tables.counts.tolist() == [1, 2, 0, 2, 2]
    lookup(torch.full((2, 4), -1, device=DEVICE), found)
    assert read_units(found.units) == [] and set(found.fetches.expert.tolist()) == {-1}
    assert tables.counts.tolist() == [1, 2, 0, 2, 2]


def test_nothing_is_counted_while_counting_is_off() -> None:
    tables, found = make_tables(8, 4), Found(2, DEVICE)
    lookup = Lookup(tables, 2)
    for counting in (0, 1, 0):
        tables.counting.fill_(counting)
        lookup(torch.tensor([[1, 2]], device=DEVICE), found)
    assert tables.counts.tolist() == [1, 2, 2, 0, 0] and tables.step.tolist() == [3]


@pytest.mark.parametrize("slot_bytes", [13_240_000 // 64 * 64, 5 << 30])
def test_addresses_are_of_64_bits(slot_bytes: int) -> None:
    tables, found = make_tables(512, 512, slot_bytes, pool=0x7F0000000000 + 64), Found(64, DEVICE)
    lookup = Lookup(tables, 64)
    for first in range(0, 512, 64):
        lookup(torch.arange(first, first + 64, device=DEVICE).view(8, 8), found)
    assert found.fetches.address.tolist() == [tables.pool + slot * slot_bytes for slot in range(448, 512)]
    assert found.units.address.tolist() == found.fetches.address.tolist()


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match=r"7 slots for 16 experts, but 8 routes may need 8"):
        Lookup(make_tables(16, 7), 8)
    with pytest.raises(ValueError, match=r"65 routes, expected 1 to 64"):
        Lookup(make_tables(128, 128), 65)
    with pytest.raises(ValueError, match=r"513 experts and 100 slots, at most 512"):
        Lookup(make_tables(513, 100), 8)
    lookup = Lookup(make_tables(8, 8), 4)
    with pytest.raises(ValueError, match=r"expected 4 contiguous ids"):
        lookup(torch.zeros(1, 8, dtype=torch.int32, device=DEVICE), Found(4, DEVICE))
    with pytest.raises(ValueError, match=r"expected 4 contiguous ids"):
        lookup(torch.zeros(2, 4, dtype=torch.int32, device=DEVICE).T[:2], Found(4, DEVICE))
