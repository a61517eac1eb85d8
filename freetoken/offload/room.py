"""How a device's memory is divided between slots and the buffers of whole layers; nothing is allocated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freetoken import settings
from freetoken.errors import CapacityError, ConfigError
from freetoken.offload.slots import LayerExperts, choose_slots
from freetoken.offload.streaming import BUFFERS
from freetoken.units import format_bytes

STRATEGIES = ("cpu", "offload", "resident")
_SHARE = 8
"""A buffer takes at most this part of the room: what is in slots is not fetched, buffers only make prompts faster."""


@dataclass(frozen=True)
class Room:
    """What goes on a device.

    slots: of each layer, none for "cpu". buffer_bytes: of each of two, for "offload" alone.
    """

    strategy: str
    slots: tuple[int, ...]
    buffer_bytes: int


def choose_room(
    layers: Sequence[LayerExperts], free: int, strategy: str | None = None, cache: str | float = "auto"
) -> Room:
    """Divide what is free of a device, in bytes.

    strategy: None takes "resident" where all experts fit, else "offload". FREETOKEN_GPU_RESERVE stays free. A buffer
    holds the largest layer, or less of it where room is scarce. Raises `ConfigError` for a word that is none of these,
    `CapacityError` for what does not fit.
    """
    if strategy is not None and strategy not in STRATEGIES:
        expected = ", ".join(STRATEGIES)
        raise ConfigError(
            f"strategy={strategy!r} is none of {expected}", name="strategy", value=strategy, expected=expected
        )
    auto = isinstance(cache, str) and cache.strip().lower() == "auto"
    if strategy in ("cpu", "resident") and not auto:
        raise ConfigError(
            f"cache={cache!r} is for strategy='offload', not for {strategy!r}: leave it out",
            name="cache",
            value=cache,
            expected="no cache",
        )
    if strategy == "cpu":
        return Room("cpu", (), 0)
    settings.PIN_LIMIT.read()  # what it holds is refused now, not when banks are full
    reserve = settings.GPU_RESERVE.read() << 20
    every = sum(layer.n_experts * layer.slot_bytes for layer in layers)
    fits = every <= free - reserve
    if strategy == "resident" or (strategy is None and fits and auto):
        if not fits:
            raise CapacityError(
                f"strategy='resident' needs {format_bytes(every)} for all experts, but "
                f"{format_bytes(max(0, free - reserve))} of {format_bytes(free)} can be had on the device beside the "
                f"dense part and {settings.GPU_RESERVE.name}: use strategy='offload'",
                needed=every,
                available=max(0, free - reserve),
                where="device",
            )
        return Room("resident", tuple(layer.n_experts for layer in layers), 0)
    largest = max(layer.slot_bytes for layer in layers)
    whole = max(layer.n_experts * layer.slot_bytes for layer in layers)
    buffer = min(whole, max(largest, (free - reserve) // _SHARE))
    slots = choose_slots(layers, cache, free, spare=reserve + BUFFERS * buffer)
    return Room("offload", slots, buffer)
