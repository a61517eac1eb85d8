"""A bank: what was put is what is there, and what was not put is known."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from freetoken import formats
from freetoken.banks import Bank, ShardedBank, make_bank
from freetoken.errors import FormatError
from freetoken.formats.record import RecordLayout, shard_bounds
from freetoken.memory.placement import Placement, Placer
from tests.support.experts import make_expert

LAYOUT = RecordLayout(formats.get("nvfp4"), 64, 32)


def test_missing_experts_are_known() -> None:
    bank = Bank(LAYOUT, 4)
    assert bank.missing == [0, 1, 2, 3]
    bank.put(2, make_expert(LAYOUT.format, 64, 32))
    assert bank.missing == [0, 1, 3]
    bank.put(2, make_expert(LAYOUT.format, 64, 32, seed=1))
    assert bank.missing == [0, 1, 3]


@pytest.mark.parametrize("fmt", formats.names())
@pytest.mark.parametrize("bias", [False, True])
def test_what_was_put_is_read_back(fmt: str, bias: bool) -> None:
    layout = RecordLayout(formats.get(fmt), 64, 32, bias)
    bank = Bank(layout, 3)
    assert bank.nbytes == 3 * layout.nbytes == bank.records.nbytes
    experts = [make_expert(layout.format, 64, 32, bias=bias, seed=e) for e in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(bank.put, range(3), experts))
    for e, expert in enumerate(experts):
        for name in ("gate", "up", "down"):
            np.testing.assert_array_equal(getattr(bank.get(e), name).dequantize(), getattr(expert, name).dequantize())
        if bias:
            np.testing.assert_array_equal(bank.get(e).down_bias, expert.down_bias)


@pytest.mark.parametrize(("hidden", "width", "bias"), [(32, 32, False), (64, 64, False), (64, 32, True)])
def test_an_expert_that_does_not_fit_is_refused_and_stays_missing(hidden: int, width: int, bias: bool) -> None:
    bank = Bank(LAYOUT, 2)
    with pytest.raises(FormatError):
        bank.put(0, make_expert(LAYOUT.format, hidden, width, bias=bias))
    with pytest.raises(FormatError, match="mxfp4"):
        bank.put(0, make_expert(formats.get("mxfp4"), 64, 32))
    expert = make_expert(LAYOUT.format, 64, 32)
    with pytest.raises(FormatError, match="differ in direction"):
        bank.put(0, replace(expert, up=replace(expert.up, divides=True)))
    assert bank.missing == [0, 1]


@pytest.mark.parametrize("index", [2, -3])
def test_an_index_outside_is_refused(index: int) -> None:
    with pytest.raises(IndexError):
        Bank(LAYOUT, 2).put(index, make_expert(LAYOUT.format, 64, 32))


def test_memory_goes_with_the_last_view() -> None:
    bank = Bank(LAYOUT, 2)
    records = weakref.ref(bank.records)
    view = bank.records[1]
    del bank
    base = view.base
    assert base is not None
    assert view.sum() == 0  # still mapped
    del view, base
    assert records() is None


def test_repr_says_what_it_is() -> None:
    assert repr(Bank(LAYOUT, 2)) == f"<bank 2 x {LAYOUT.nbytes} bytes, nvfp4>"


def test_a_bank_in_memory_that_is_there_already() -> None:
    """It lends the very bytes, writes nothing, and an expert that its check refuses stays missing."""
    own = Bank(LAYOUT, 2)
    for e in range(2):
        own.put(e, make_expert(LAYOUT.format, 64, 32, seed=e))
    memory = own.records.reshape(-1)
    memory.flags.writeable = False
    bank = Bank(LAYOUT, 2, memory)
    assert (own.shared, bank.shared) == (False, True)
    assert np.shares_memory(bank.records, own.records)
    assert bank.missing == [0, 1]
    bank.mark([1])
    assert bank.missing == [0]
    with pytest.raises(ValueError, match="read-only"):
        bank.put(0, make_expert(LAYOUT.format, 64, 32))
    assert bank.missing == [0]


# --- cut into shards -------------------------------------------------------------------------------------------------


def cut(layout: RecordLayout, count: int, parts: int) -> ShardedBank:
    bounds = shard_bounds(layout.format, layout.intermediate, parts)
    return ShardedBank(layout, count, bounds, (None,) * parts)


@pytest.mark.parametrize("fmt", formats.names())
@pytest.mark.parametrize("bias", [False, True])
def test_shards_hold_slices_of_what_was_put(fmt: str, bias: bool) -> None:
    """Uneven ones; the down bias is in the first alone."""
    granule = formats.get(fmt).granule
    layout = RecordLayout(formats.get(fmt), 64, 5 * granule, bias)
    bank, experts = cut(layout, 2, 3), [make_expert(layout.format, 64, 5 * granule, bias=bias, seed=e) for e in (0, 1)]
    assert [b.layout.intermediate for b in bank.shards] == [2 * granule, 2 * granule, granule]
    assert bank.nbytes == sum(b.records.nbytes for b in bank.shards)
    bank.put(1, experts[1])
    assert bank.missing == [0]
    bank.put(0, experts[0])
    assert bank.missing == []
    for e, expert in enumerate(experts):
        parts = [shard.get(e) for shard in bank.shards]
        for name, axis in (("gate", 0), ("up", 0), ("down", 1)):
            whole = np.concatenate([getattr(part, name).dequantize() for part in parts], axis)
            np.testing.assert_array_equal(whole, getattr(expert, name).dequantize())
        if bias:
            biases = [part.down_bias for part in parts]
            np.testing.assert_array_equal(biases[0], expert.down_bias)
            assert not any(b.any() for b in biases[1:] if b is not None)


def test_an_expert_that_does_not_fit_no_shard_takes() -> None:
    bank = cut(RecordLayout(LAYOUT.format, 64, 48), 1, 3)
    for width in (32, 64):
        with pytest.raises(FormatError, match=r"gate is nvfp4 \(\d+, 64\), expected nvfp4 \(48, 64\)"):
            bank.put(0, make_expert(LAYOUT.format, 64, width))
    assert bank.missing == [0]


def test_repr_of_shards() -> None:
    sizes = [RecordLayout(LAYOUT.format, 64, width).nbytes for width in (32, 16)]
    bank = cut(RecordLayout(LAYOUT.format, 64, 48), 3, 2)
    assert repr(bank) == f"<bank 3 x ({sizes[0]} + {sizes[1]}) bytes, nvfp4>"


class Asked(Placer):
    """Notes what would be asked of the kernel."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self.nodes: list[int | None] = []

    def place(self, address: int, nbytes: int, node: int | None = None) -> None:
        self.nodes.append(node)


@pytest.mark.parametrize(
    ("policy", "nodes", "width", "step", "widths", "asked"),
    [
        ("off", (), 80, 1, [80], [None]),
        ("interleave", (0, 2), 80, 1, [80], [None]),
        ("node", (2,), 80, 1, [80], [None]),
        ("shard", (0, 2), 80, 1, [48, 32], [0, 2]),
        ("shard", (0, 2, 5), 80, 1, [32, 32, 16], [0, 2, 5]),
        ("shard", (0, 2), 16, 1, [16], [None]),  # one granule: interleaved
        ("shard", (0, 2), 80, 128, [80], [None]),
        ("shard", (0, 2), 400, 128, [256, 144], [0, 2]),
    ],
)
def test_banks_follow_the_placement(
    policy: str, nodes: tuple[int, ...], width: int, step: int, widths: list[int], asked: list[int | None]
) -> None:
    placer = Asked(Placement(policy, nodes, "", ()))  # type: ignore[arg-type]
    bank = make_bank(RecordLayout(LAYOUT.format, 64, width), 2, placer, step)
    assert [shard.layout.intermediate for shard in bank.shards] == widths
    assert placer.nodes == asked
    assert [shard.node for shard in bank.shards] == ([2] if policy == "node" else asked)
