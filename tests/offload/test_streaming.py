"""Layers streamed through two buffers, on the simulated device: nothing is used too early or overwritten too soon."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from freetoken import formats
from freetoken.banks import Bank, LayerBank, ShardedBank
from freetoken.device.simulated import SimulatedDevice, Speeds
from freetoken.formats.record import RecordLayout, shard_bounds
from freetoken.offload.streaming import Streamer

LAYOUT = RecordLayout(formats.get("q8_0"), 64, 96)


def make_banks(random: np.random.Generator, layers: int, sharded: bool = False) -> list[LayerBank]:
    """Random bytes: nobody computes with them here."""
    banks: list[LayerBank] = []
    for _ in range(layers):
        n = int(random.integers(1, 9))
        bank: LayerBank = Bank(LAYOUT, n)
        if sharded:
            bank = ShardedBank(LAYOUT, n, shard_bounds(LAYOUT.format, LAYOUT.intermediate, 2), (None, None))
        for shard in bank.shards:
            shard.records[:] = random.integers(0, 256, shard.records.shape, np.uint8)
        banks.append(bank)
    return banks


def read(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)).copy()


def asynchronous(seed: int, link_bps: float) -> SimulatedDevice:
    """One whose kernels are done later, as on a real one."""
    device = SimulatedDevice(seed, speeds=Speeds(link_bps=link_bps))
    lane = device.lane()
    device.current = lambda: lane  # type: ignore[method-assign, assignment, return-value]
    return device


def run_pass(
    device: SimulatedDevice, streamer: Streamer, banks: list[LayerBank], slots: np.ndarray, costs: np.random.Generator
) -> None:
    """A pass whose kernels read what they are told to, and find each expert once."""
    found: list[list[int]] = [[] for _ in banks]
    streamer.begin(range(len(banks)), slots)
    for layer, bank in enumerate(banks):
        for table in streamer.groups(layer):

            def compute(table: torch.Tensor = table, bank: LayerBank = bank, seen: list[int] = found[layer]) -> None:
                for expert in np.flatnonzero(table[0].numpy()):
                    for shard, row in zip(bank.shards, table, strict=True):
                        there = read(int(row[expert]), shard.layout.nbytes)
                        np.testing.assert_array_equal(there, shard.records[expert])
                    seen.append(int(expert))

            device.current().kernel(compute, float(costs.exponential(3e-5)))
    device.until(device.current().mark(), "pass")
    assert [sorted(seen) for seen in found] == [list(range(bank.n_experts)) for bank in banks]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("room", [1, 3, 8])
def test_every_expert_is_there_when_it_is_computed(room: int, sharded: bool) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        device = asynchronous(seed, float(random.choice([1e7, 1e9, 1e11])))
        banks = make_banks(random, int(random.integers(1, 6)), sharded)
        size = max(bank.nbytes // bank.n_experts for bank in banks)
        streamer = Streamer(device, banks, room * size)
        kept = torch.zeros(sum(bank.nbytes for bank in banks), dtype=torch.uint8)
        for _ in range(3):
            slots = np.zeros((len(banks), 8), np.int64)
            at = 0
            for layer, bank in enumerate(banks):
                for expert in range(bank.n_experts):
                    if random.random() < 0.3:
                        slots[layer, expert] = kept.data_ptr() + at
                        for shard in bank.shards:
                            kept[at : at + shard.layout.nbytes] = torch.from_numpy(shard.records[expert])
                            at += shard.layout.nbytes
            before = streamer.copied_bytes
            run_pass(device, streamer, banks, slots, random)
            missing = sum(
                int((slots[i, : b.n_experts] == 0).sum()) * (b.nbytes // b.n_experts) for i, b in enumerate(banks)
            )
            assert streamer.copied_bytes - before == missing, "experts in slots are not copied"


def test_copies_go_on_while_the_layer_before_computes() -> None:
    """A pass takes what the slower of copies and kernels takes, and one of the other more."""
    banks = [Bank(LAYOUT, 8) for _ in range(12)]
    for copy_s, kernel_s in ((1e-3, 1e-3), (1e-3, 3e-3), (3e-3, 1e-3)):
        speeds = Speeds(link_bps=banks[0].nbytes / copy_s, host_bps=1e15, copy_s=0)
        device = SimulatedDevice(0, speeds=speeds, jitter=0.0)
        streamer = Streamer(device, banks, banks[0].nbytes)
        streamer.begin(range(12), np.zeros((12, 8), np.int64))
        start = device.time
        for layer in range(12):
            for _ in streamer.groups(layer):
                device.current().kernel(lambda: None, kernel_s)
        assert device.time - start <= 12 * max(copy_s, kernel_s) + min(copy_s, kernel_s) + 1e-6


def test_a_pass_that_is_left_or_begun_anew() -> None:
    random = np.random.default_rng(1)
    device = SimulatedDevice(1)
    banks = make_banks(random, 4)
    streamer = Streamer(device, banks, banks[0].layout.nbytes * 8)
    nothing = np.zeros((4, 8), np.int64)
    streamer.begin(range(4), nothing)
    groups = streamer.groups(0)
    next(groups)
    assert streamer.covers(0) and not streamer.covers(1)
    groups.close()
    assert not any(map(streamer.covers, range(4)))
    run_pass(device, streamer, banks, nothing, random)
    assert not any(map(streamer.covers, range(4)))
    streamer.begin([1, 3], nothing)  # layers between are not streamed
    assert [layer for layer in range(4) for _ in streamer.groups(layer)] == [1, 3]
    streamer.begin(range(4), nothing)
    groups = streamer.groups(0)
    next(groups)
    with pytest.raises(RuntimeError, match="a kernel"):
        groups.throw(RuntimeError("a kernel"))
    assert not streamer.covers(0)


@pytest.mark.parametrize("forgotten", ["copied", "free"])
def test_without_a_wait_it_goes_wrong(forgotten: str) -> None:
    """Each of the two waits is needed, and the tests above would notice."""
    wrong = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        device = asynchronous(seed, 1e9)
        banks = make_banks(random, 6)
        streamer = Streamer(device, banks, banks[0].layout.nbytes * 8)
        lane = device.current() if forgotten == "copied" else streamer._lane
        lane.after = lambda moment: None  # type: ignore[method-assign]
        try:
            run_pass(device, streamer, banks, np.zeros((6, 8), np.int64), random)
        except AssertionError:
            wrong += 1
    assert wrong


def test_a_buffer_that_holds_no_expert() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        Streamer(SimulatedDevice(), make_banks(np.random.default_rng(2), 1), LAYOUT.nbytes - 1)
