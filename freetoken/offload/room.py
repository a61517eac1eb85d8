"""How a device's memory is divided between slots and the buffers of whole layers; nothing is allocated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freetoken import settings
from freetoken.errors import CapacityError, ConfigError
from freetoken.offload.slots import LayerExperts, choose_slots
from freetoken.offload.split import parse_max_fetch
from freetoken.offload.streaming import BUFFERS
from freetoken.units import format_bytes

STRATEGIES = ("cpu", "offload", "hybrid", "resident")
_SHARE = 8
"""A buffer takes at most this part of the room: what is in slots is not fetched, buffers only make prompts faster."""


@dataclass(frozen=True)
class Asked:
    """What a user asks of a device, as `freetoken.load` takes it.

    Raises `ConfigError` for words that are none, or do not go together.
    """

    strategy: str | None = None
    cache: str | float = "auto"
    max_fetch: str | float = "auto"

    def __post_init__(self) -> None:
        if self.strategy is not None and self.strategy not in STRATEGIES:
            expected = ", ".join(STRATEGIES)
            raise ConfigError(
                f"strategy={self.strategy!r} is none of {expected}",
                name="strategy",
                value=self.strategy,
                expected=expected,
            )
        if self.strategy in ("cpu", "resident") and not self.is_auto:
            raise ConfigError(
                f"cache={self.cache!r} is for strategies with a cache, not for {self.strategy!r}: leave it out",
                name="cache",
                value=self.cache,
                expected="no cache",
            )
        if parse_max_fetch(self.max_fetch) is not None and self.strategy != "hybrid":
            raise ConfigError(
                f"max_fetch={self.max_fetch!r} is for strategy='hybrid', not for {self.strategy!r}: leave it out",
                name="max_fetch",
                value=self.max_fetch,
                expected="no max_fetch",
            )

    @property
    def is_auto(self) -> bool:
        """Whether the cache takes what is free."""
        return isinstance(self.cache, str) and self.cache.strip().lower() == "auto"


@dataclass(frozen=True)
class Room:
    """What goes on a device.

    slots: of each layer, none for "cpu". buffer_bytes: of each of two, for "offload" and "hybrid". max_fetch: as asked.
    """

    strategy: str
    slots: tuple[int, ...]
    buffer_bytes: int
    max_fetch: str | float = "auto"


def choose_room(layers: Sequence[LayerExperts], free: int, asked: Asked | None = None) -> Room:
    """Divide what is free of a device, in bytes.

    Without a strategy "resident" is taken where all experts fit, else "offload". FREETOKEN_GPU_RESERVE stays free. A
    buffer holds the largest layer, or less of it where room is scarce. Raises `CapacityError` for what does not fit.
    """
    asked = asked or Asked()
    strategy, auto = asked.strategy, asked.is_auto
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
    slots = choose_slots(layers, asked.cache, free, spare=reserve + BUFFERS * buffer)
    return Room(strategy or "offload", slots, buffer, asked.max_fetch)
