"""Records from the host's memory into slots: right bytes in the right slots, and none beside them."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from freetoken.gpu.gather import Gather
from freetoken.gpu.lookup import Found, Lookup
from freetoken.gpu.units import Fetches
from freetoken.offload.slots import LayerExperts, SlotPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 64


@contextlib.contextmanager
def reachable(*banks: NDArray[np.uint8]) -> Iterator[list[int]]:
    """Where the device finds memory of the host."""
    if DEVICE.type == "cpu":
        yield [bank.ctypes.data for bank in banks]
        return
    runtime = torch.cuda.cudart()
    for bank in banks:
        assert int(runtime.cudaHostRegister(bank.ctypes.data, bank.nbytes, 2)) == 0
    try:
        yield [bank.ctypes.data for bank in banks]
    finally:
        torch.cuda.synchronize()
        for bank in banks:
            runtime.cudaHostUnregister(bank.ctypes.data)


def make_bank(random: np.random.Generator, n_experts: int, nbytes: int) -> NDArray[np.uint8]:
    """Records (E, nbytes) on pages of their own: memory is registered by pages, and only once."""
    bank = np.frombuffer(mmap.mmap(-1, n_experts * nbytes), np.uint8).reshape(n_experts, nbytes)
    bank[...] = random.integers(0, 256, bank.shape, np.uint8)
    return bank


def make_list(experts: list[int], addresses: list[int]) -> Fetches:
    return Fetches(
        torch.tensor(experts, dtype=torch.int32, device=DEVICE),
        torch.tensor(addresses, dtype=torch.int64, device=DEVICE),
    )


class Slots:
    """Slots with bytes around each that nobody may write."""

    def __init__(self, n: int, slot_bytes: int) -> None:
        self.memory = torch.full((n, GUARD + slot_bytes + GUARD), 0xA5, dtype=torch.uint8, device=DEVICE)

    def address(self, slot: int) -> int:
        return self.memory[slot, GUARD:].data_ptr()

    def check(self, expected: dict[int, NDArray[np.uint8]]) -> None:
        """These slots hold these bytes, all else is as it was."""
        want = np.full(tuple(self.memory.shape), 0xA5, np.uint8)
        for slot, record in expected.items():
            want[slot, GUARD:-GUARD] = record
        np.testing.assert_array_equal(self.memory.cpu().numpy(), want)


@pytest.mark.parametrize(
    "sizes",
    [(64,), (16384,), (16384 - 64, 16384 + 64), (50_048,), (320, 64, 40_000, 128), (3 * 16384,)],
    ids=str,
)
@pytest.mark.parametrize("experts", [[3], [5, 0, 2, 6], [0, 1, 2, 3, 4, 5, 6, 7]], ids=str)
def test_records_come_whole(sizes: tuple[int, ...], experts: list[int]) -> None:
    random = np.random.default_rng(sum(sizes))
    banks = [make_bank(random, 8, nbytes) for nbytes in sizes]
    slots = Slots(9, sum(sizes))
    places = [int(slot) for slot in random.permutation(9)[: len(experts)]]
    padding = [-1] * (8 - len(experts))
    with reachable(*banks) as addresses:
        fetches = make_list(experts + padding, [slots.address(slot) for slot in places] + [0] * len(padding))
        Gather(addresses, sizes, DEVICE)(fetches)
        slots.check(
            {
                slot: np.concatenate([bank[expert] for bank in banks])
                for slot, expert in zip(places, experts, strict=True)
            }
        )


@pytest.mark.parametrize("experts", [[-1], [-1] * 5, [-1, 2, -1, 1, -1]], ids=str)
def test_entries_of_nobody_do_nothing(experts: list[int]) -> None:
    bank = make_bank(np.random.default_rng(0), 4, 1088)
    slots = Slots(len(experts), 1088)
    with reachable(bank) as addresses:
        Gather(addresses, [1088], DEVICE)(make_list(experts, [slots.address(slot) for slot in range(len(experts))]))
        slots.check({slot: bank[expert] for slot, expert in enumerate(experts) if expert >= 0})


def test_banks_may_be_of_torch_and_larger_than_the_slots() -> None:
    bank = torch.from_numpy(make_bank(np.random.default_rng(0), 40, 640))
    slots = Slots(3, 640)
    with reachable(bank.numpy()) as addresses:
        gather = Gather(addresses, [640], DEVICE)
        gather(make_list([39, 0, 17], [slots.address(slot) for slot in (2, 0, 1)]))
        slots.check({2: bank[39].numpy(), 0: bank[0].numpy(), 1: bank[17].numpy()})
        gather(make_list([5], [slots.address(1)]))
        slots.check({2: bank[39].numpy(), 0: bank[0].numpy(), 1: bank[5].numpy()})


@pytest.mark.parametrize("shift", [0, 1 << 31], ids=["near", "far"])
def test_records_lie_at_offsets_of_64_bits(shift: int) -> None:
    """The last record of a bank of which nothing else is there: its base is far below."""
    nbytes = 1 << 20
    bank = make_bank(np.random.default_rng(0), 1, nbytes)
    expert = 3 + shift // nbytes
    slots = Slots(1, nbytes)
    with reachable(bank) as addresses:
        Gather([addresses[0] - expert * nbytes], [nbytes], DEVICE)(make_list([expert], [slots.address(0)]))
        slots.check({0: bank[0]})


def test_what_cannot_be_copied_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 banks and 1 sizes"):
        Gather([64, 128], [64], DEVICE)
    with pytest.raises(ValueError, match=r"records of \[72\] bytes: expected multiples of 16"):
        Gather([64], [72], DEVICE)
    with pytest.raises(ValueError, match=r"banks at \[8\]"):
        Gather([8], [64], DEVICE)


@pytest.mark.parametrize("apart", [False, True])
def test_units_find_the_records_of_their_experts(apart: bool) -> None:
    """Look-up and gather together, step after step: at each unit's address lies what its routes asked for."""
    random = np.random.default_rng(5)
    shapes = [LayerExperts(12, 3, (192, 128)), LayerExperts(12, 3, (320,)), LayerExperts(6, 3, (64,))]
    pool = SlotPool(shapes, (7, 6, 6), DEVICE)
    banks = [[make_bank(random, shape.n_experts, n) for n in shape.record_bytes] for shape in shapes]
    lookups = [Lookup(pool.tables(layer), 6, apart=apart) for layer in range(3)]
    found, routed, missed = Found(6, DEVICE), 0, 0
    with contextlib.ExitStack() as stack:
        gathers = [
            Gather(stack.enter_context(reachable(*parts)), shape.record_bytes, DEVICE)
            for parts, shape in zip(banks, shapes, strict=True)
        ]
        for _ in range(20):
            for layer, shape in enumerate(shapes):
                ids = torch.from_numpy(random.integers(-1, shape.n_experts, (2, 3)))
                lookups[layer](ids.to(DEVICE), found)
                gathers[layer](found.fetches)
                missed += sum(expert >= 0 for expert in found.fetches.expert.tolist())
                memory, wanted = pool.memory(layer), ids.flatten().tolist()
                for units in (found.units, found.late):
                    for address, routes in zip(units.address.tolist(), units.route.tolist(), strict=True):
                        for route in (route for route in routes if route >= 0):
                            slot, offset = divmod(address - memory.data_ptr(), shape.slot_bytes)
                            assert offset == 0
                            record = np.concatenate([part[wanted[route]] for part in banks[layer]])
                            np.testing.assert_array_equal(memory[slot].cpu().numpy(), record)
                            wanted[route] = -1
                assert set(wanted) == {-1}  # every route had its unit
                routed += int((ids >= 0).sum())
    assert (pool.statistics().routed, pool.statistics().misses) == (routed, missed)
