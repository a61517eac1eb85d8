"""A bank: what was put is what is there, and what was not put is known."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from freetoken import formats
from freetoken.banks import Bank
from freetoken.errors import FormatError
from freetoken.formats.record import RecordLayout
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
    seen: list[bytes] = []
    bank.fill(1, lambda record: seen.append(record.tobytes()))
    assert seen == [own.records[1].tobytes()]
    assert bank.missing == [0]
    with pytest.raises(ValueError, match="read-only"):
        bank.put(0, make_expert(LAYOUT.format, 64, 32))
    assert bank.missing == [0]
