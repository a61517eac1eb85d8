"""How slots are divided, refused and filled; what the look-up does with their tables is in tests/gpu."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from freetoken import formats
from freetoken.banks import Bank, ShardedBank
from freetoken.errors import CapacityError, ConfigError
from freetoken.formats.record import RecordLayout
from freetoken.gpu.tables import COUNTS
from freetoken.offload.slots import Cache, LayerExperts, SlotPool, Statistics, choose_slots, parse_cache, split

CPU = torch.device("cpu")
KIB = 1024


def layers(*shapes: tuple[int, int, int]) -> list[LayerExperts]:
    """Of (E, K, record bytes)."""
    return [LayerExperts(n_experts, top_k, (nbytes,)) for n_experts, top_k, nbytes in shapes]


TWO = layers((8, 2, 64 * KIB), (8, 2, 64 * KIB))
"""1 MiB of experts."""


@pytest.mark.parametrize(
    ("text", "cache"),
    [
        ("4GiB", Cache(4 << 30, "bytes")),
        (" 1.5 gib ", Cache(3 << 29, "bytes")),
        ("512 MB", Cache(512_000_000, "bytes")),
        ("700000B", Cache(700_000, "bytes")),
        ("2TiB", Cache(2 << 40, "bytes")),
        (0.25, Cache(256 * KIB, "bytes")),
        ("0.25", Cache(256 * KIB, "bytes")),
        (1.0, Cache(1 << 20, "bytes")),
        (1e-5, Cache(10, "bytes")),
        (np.float64(0.5), Cache(512 * KIB, "bytes")),
        (1, Cache(1, "slots")),
        ("96", Cache(96, "slots")),
        (np.int64(7), Cache(7, "slots")),
    ],
)
def test_caches_are_read(text: Any, cache: Cache) -> None:
    assert parse_cache(text, TWO, free=1 << 40) == cache


@pytest.mark.parametrize(("free", "spare", "amount"), [(1 << 30, 0, 1 << 20), (1 << 19, 0, 1 << 19), (900, 1000, 0)])
def test_auto_is_what_is_free_but_no_more_than_there_is(free: int, spare: int, amount: int) -> None:
    assert parse_cache("auto", TWO, free, spare=spare) == Cache(amount, "bytes")


BAD = ["", "much", "4 apples", "GiB", "-1GiB", "0GiB", "1e3GiB", "0", 0, -3, 0.0, 1.01, -0.5, float("nan"),
       float("inf"), True, None, "4GiB extra", "0x10", "25%"]  # fmt: skip


@pytest.mark.parametrize("value", BAD, ids=repr)
def test_what_is_no_cache_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no size of a cache, expected \"auto\", a size such as"):
        parse_cache(value, TWO, free=1 << 30)


def used(shapes: list[LayerExperts], slots: tuple[int, ...]) -> int:
    return sum(n * layer.slot_bytes for n, layer in zip(slots, shapes, strict=True))


def test_equal_layers_get_equal_shares() -> None:
    equal = layers(*[(128, 8, 100)] * 48)
    assert split(equal, Cache(48 * 32 * 100, "bytes")) == (32,) * 48
    assert split(equal, Cache(48 * 32, "slots")) == (32,) * 48
    # of what is left, the first get one more
    assert split(equal, Cache(48 * 32 * 100 + 399, "bytes")) == (33,) * 3 + (32,) * 45
    # as many experts and another size: the same share; another number of experts with the same K / E: too
    assert split(layers((64, 4, 100), (64, 4, 300), (128, 8, 100)), Cache(24 * 100 + 24 * 300 + 48 * 100, "bytes")) == (
        24,
        24,
        48,
    )


def test_bytes_go_where_experts_are_wanted_most() -> None:
    mixed = layers((64, 4, 100), (32, 4, 100))
    assert split(mixed, Cache(30 * 100, "bytes")) == (4, 26)
    assert split(mixed, Cache(40 * 100, "bytes")) == (8, 32)


def test_what_is_left_goes_where_it_fits() -> None:
    mixed = layers((16, 2, 1000), (16, 2, 30))
    slots = split(mixed, Cache(2 * 1000 + 2 * 30 + 500, "bytes"))
    assert slots == (2, 16)
    assert split(layers((4, 2, 10), (4, 2, 10)), Cache(1 << 30, "bytes")) == (4, 4)


@pytest.mark.parametrize("seed", range(40))
def test_any_split_keeps_to_its_bounds(seed: int) -> None:
    random = np.random.default_rng(seed)
    shapes = []
    for _ in range(random.integers(1, 12)):
        n_experts = int(random.integers(1, 40))
        shapes.append((n_experts, int(random.integers(1, n_experts + 1)), int(random.integers(1, 50)) * 64))
    chosen, tokens = layers(*shapes), int(random.integers(1, 4))
    least = sum(min(k * tokens, e) * b for e, k, b in shapes)
    every = sum(e * b for e, _, b in shapes)
    budget = int(random.integers(least, every + 1000))

    slots = split(chosen, Cache(budget, "bytes"), tokens)

    assert slots == split(chosen, Cache(budget, "bytes"), tokens)
    assert all(min(k * tokens, e) <= n <= e for (e, k, _), n in zip(shapes, slots, strict=True))
    left = budget - used(chosen, slots)
    assert left >= 0 and all(b > left for (e, _, b), n in zip(shapes, slots, strict=True) if n < e)
    extra = [n - min(k * tokens, e) for (e, k, _), n in zip(shapes, slots, strict=True)]
    for (e, k, b), n in zip(shapes, slots, strict=True):
        if n == e:
            continue
        # what less wanted layers got would not have been enough for one slot more here
        less = [
            x * other_b
            for (other_e, other_k, other_b), x in zip(shapes, extra, strict=True)
            if other_k * e < k * other_e
        ]
        assert left + sum(less) < b
        for (other_e, other_k, other_b), m, x in zip(shapes, slots, extra, strict=True):
            if other_k * e == k * other_e and other_b == b and x:
                assert m * e <= (n + 1) * other_e


def test_a_cache_that_is_too_small_is_refused_before_anything() -> None:
    with pytest.raises(
        CapacityError,
        match=r"2 layers need 256.0 KiB where a step has 1 token, .* smallest .* 256.0 KiB \(262144 bytes\)",
    ) as e:
        choose_slots(TWO, "255KiB", free=1 << 30)
    assert (e.value.facts["needed"], e.value.facts["available"]) == (256 * KIB, 255 * KIB)
    assert choose_slots(TWO, "256KiB", free=1 << 30) == (2, 2)
    with pytest.raises(
        CapacityError,
        match=r"2 layers need 8 slots where a step has 2 tokens, .* cache is 7 slots: the smallest .* 8 slots",
    ):
        choose_slots(TWO, 7, free=1 << 30, tokens=2)


def test_a_cache_that_does_not_fit_the_device_is_refused() -> None:
    with pytest.raises(
        CapacityError, match=r"16 slots \(cache=1.0\) need 1.00 MiB .*smallest .* \(262144 bytes\)"
    ) as e:
        choose_slots(TWO, 1.0, free=1 << 20, spare=1000)
    assert (e.value.facts["needed"], e.value.facts["available"]) == (1 << 20, (1 << 20) - 1000)
    assert choose_slots(TWO, 1.0, free=(1 << 20) + 100, spare=100) == (8, 8)
    assert choose_slots(TWO, "auto", free=(1 << 20) - 1) == (8, 7)
    with pytest.raises(CapacityError):
        choose_slots(TWO, "auto", free=1000)


def test_a_banks_records_give_the_slots() -> None:
    layout = RecordLayout(formats.get("mxfp4"), 64, 128)
    whole = LayerExperts.of(Bank(layout, 3), 2)
    assert whole == LayerExperts(3, 2, (layout.nbytes,))
    parts = LayerExperts.of(ShardedBank(layout, 3, [(0, 96), (96, 128)], (0, 1)), 2)
    assert len(parts.record_bytes) == 2 and parts.slot_bytes >= layout.nbytes


def test_layers_have_their_own_slots_in_runs_of_one_size() -> None:
    shapes = layers((8, 2, 128), (4, 2, 256), (6, 2, 128))
    pool = SlotPool(shapes, (3, 2, 6), CPU)
    assert [tuple(pool.memory(i).shape) for i in range(3)] == [(3, 128), (2, 256), (6, 128)]
    assert pool.memory(2).data_ptr() == pool.memory(0).data_ptr() + 3 * 128
    assert pool.nbytes == 3 * 128 + 2 * 256 + 6 * 128 and not pool.is_resident
    tables = pool.tables(1)
    assert (tables.n_experts, tables.n_slots, tables.slot_bytes) == (4, 2, 256)
    assert tables.pool == pool.memory(1).data_ptr()
    assert tables.order.tolist() == [0, 1] and set(tables.expert_in.tolist()) == {-1}
    assert pool.read_tables().shape == (3, 8) and set(pool.read_tables().flatten().tolist()) == {-1}
    tables.slot_of[3] = 1  # as the device would
    assert pool.read_tables().tolist()[1] == [-1, -1, -1, 1, -1, -1, -1, -1]


@pytest.mark.parametrize("writeable", [True, False])
def test_a_resident_pool_holds_every_expert(writeable: bool) -> None:
    random = np.random.default_rng(0)
    shapes = [LayerExperts(5, 2, (128, 64)), LayerExperts(3, 1, (192,))]
    pool = SlotPool.resident(shapes, CPU)
    assert pool.is_resident and pool.slots == (5, 3)
    for index, shape in enumerate(shapes):
        records = [random.integers(0, 256, (shape.n_experts, n), np.uint8) for n in shape.record_bytes]
        for part in records:
            part.flags.writeable = writeable
        pool.fill(index, records)
        np.testing.assert_array_equal(pool.memory(index).numpy(), np.concatenate(records, 1))
    assert pool.read_tables().tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]]
    assert pool.tables(1).expert_in.tolist() == [0, 1, 2]


def test_what_does_not_fill_a_pool_is_refused() -> None:
    shapes = [LayerExperts(5, 2, (128, 64))]
    records = [np.zeros((5, 128), np.uint8), np.zeros((5, 64), np.uint8)]
    with pytest.raises(ValueError, match=r"\(5, 128\)\] for 5 slots, expected \[\(5, 128\), \(5, 64\)\]"):
        SlotPool.resident(shapes, CPU).fill(0, records[:1])
    with pytest.raises(ValueError, match=r"for 4 slots"):
        SlotPool(shapes, [4], CPU).fill(0, records)


def test_memory_that_the_device_refuses_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (77, 100))
    with pytest.raises(CapacityError, match=r"refused 256.0 KiB for slots") as e:
        SlotPool(TWO, (2, 2), CPU)
    assert e.value.facts["available"] == 77


def test_statistics_are_summed_and_reset() -> None:
    pool = SlotPool(layers((8, 2, 128), (4, 2, 256)), (3, 2), CPU)
    assert pool.statistics() == Statistics(0, 0, 0, 0, 0, 0) and pool.statistics().hit_rate == 0
    pool.tables(0).counts.copy_(torch.tensor([5, 10, 7, 3, 1]))
    pool.tables(1).counts.copy_(torch.tensor([4, 8, 2, 6, 6]))
    assert COUNTS == 5
    assert pool.statistics(1) == Statistics(steps=4, routed=8, hits=2, misses=6, fetched=6, fetched_bytes=6 * 256)
    assert pool.statistics() == Statistics(5, 18, hits=9, misses=9, fetched=7, fetched_bytes=1 * 128 + 6 * 256)
    assert pool.statistics().hit_rate == 0.5 and pool.statistics().computed == 2
    assert pool.fetched_bytes_per_token() == 1 * 128 / 5 + 6 * 256 / 4
    pool.tables(0).counts.zero_()  # a layer that the host computes
    assert pool.fetched_bytes_per_token() == 6 * 256 / 4
    pool.reset_statistics()
    assert pool.statistics() == Statistics(0, 0, 0, 0, 0, 0)
    pool.count(False)
    assert pool.tables(0).counting.tolist() == pool.tables(1).counting.tolist() == [0]
    pool.count(True)
    assert pool.tables(1).counting.tolist() == [1]
