"""What goes on a device: never more than there is, buffers included; words that contradict each other are refused."""

from __future__ import annotations

import numpy as np
import pytest

from freetoken.errors import CapacityError, ConfigError
from freetoken.offload.room import STRATEGIES, Asked, choose_room
from freetoken.offload.slots import LayerExperts

MIB = 1 << 20
LAYERS = [LayerExperts(16, 4, (MIB,)), LayerExperts(8, 2, (MIB, 2 * MIB))]
EVERY = 16 * MIB + 8 * 3 * MIB


@pytest.fixture(autouse=True)
def reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_GPU_RESERVE", "5")


def test_never_more_than_there_is() -> None:
    """Slots, two buffers and the reserve fit into what is free, whatever that is, and a MiB more is not wasted."""
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        free = int(random.integers(0, 80 * MIB))
        try:
            room = choose_room(LAYERS, free, Asked("offload"))
        except CapacityError:
            refused += 1
            assert free - 5 * MIB < (4 + 2 * 3 + 2 * 3) * MIB, "the least slots and the least buffers"
            continue
        assert room.buffer_bytes >= 3 * MIB, "the largest expert"
        slots = sum(n * layer.slot_bytes for n, layer in zip(room.slots, LAYERS, strict=True))
        taken = slots + 2 * room.buffer_bytes + 5 * MIB
        assert taken <= free
        assert room.slots == (16, 8) or free - taken < 3 * MIB
        assert room.buffer_bytes <= 24 * MIB, "the largest layer"
    assert 0 < refused < 400


def test_all_experts_where_they_fit() -> None:
    assert choose_room(LAYERS, EVERY + 5 * MIB).strategy == "resident"
    assert choose_room(LAYERS, EVERY + 5 * MIB, Asked(cache=" AUTO ")).strategy == "resident"
    assert choose_room(LAYERS, EVERY + 5 * MIB - 1).strategy == "offload"
    assert choose_room(LAYERS, 10 * EVERY, Asked(cache=0.5)).strategy == "offload", "who names a cache wants one"
    room = choose_room(LAYERS, EVERY + 5 * MIB, Asked("resident"))
    assert (room.slots, room.buffer_bytes) == ((16, 8), 0)
    with pytest.raises(CapacityError, match=r"for all experts, but .* use strategy='offload'"):
        choose_room(LAYERS, EVERY + 5 * MIB - 1, Asked("resident"))
    assert choose_room(LAYERS, 0, Asked("cpu")).slots == ()


@pytest.mark.parametrize("strategy", ["cpu", "resident"])
@pytest.mark.parametrize("cache", [0.5, "4GiB", "garbage", float("nan"), 7])
def test_a_cache_is_for_who_has_one(strategy: str, cache: str | float) -> None:
    with pytest.raises(ConfigError, match="is for strategies with a cache"):
        Asked(strategy, cache)


@pytest.mark.parametrize("strategy", ["cpu", "resident", "offload", None])
def test_a_split_is_for_hybrid(strategy: str | None) -> None:
    with pytest.raises(ConfigError, match="is for strategy='hybrid'"):
        Asked(strategy, max_fetch=0.5)
    assert Asked(strategy, max_fetch=" Auto").strategy == strategy
    room = choose_room(LAYERS, EVERY, Asked("hybrid", 0.5, 3))
    same = choose_room(LAYERS, EVERY, Asked("offload", 0.5))
    assert (room.strategy, room.max_fetch) == ("hybrid", 3)
    assert (room.slots, room.buffer_bytes) == (same.slots, same.buffer_bytes)


def test_what_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cpu, offload, hybrid, resident"):
        choose_room(LAYERS, EVERY, Asked("gpu"))
    for odd in ("9" * 5000, "1e-999999999", "0.2.5", True, float("inf"), -1, 0, "", "4 GiBs"):
        with pytest.raises(ConfigError, match="no size of a cache"):
            choose_room(LAYERS, 10 * EVERY, Asked("offload", odd))
    with pytest.raises(CapacityError, match=r"the smallest cache that works, \d+ bytes, needs"):
        choose_room(LAYERS, 10 * MIB)
    for name in ("FREETOKEN_PIN_LIMIT", "FREETOKEN_GPU_RESERVE"):
        with monkeypatch.context() as context:
            context.setenv(name, "1GiB")
            with pytest.raises(ConfigError, match=name):
                choose_room(LAYERS, 10 * EVERY, Asked("offload"))
    assert STRATEGIES == ("cpu", "offload", "hybrid", "resident")
