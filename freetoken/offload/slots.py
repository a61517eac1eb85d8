"""Slots: how a device's memory is divided over layers, and the tables that say which expert lies where.

Policy comes first and allocates nothing: `parse_cache` reads what a user asks for, `choose_slots` divides it or
refuses. `SlotPool` then owns the memory. Which expert goes where is decided on the device, by `freetoken.gpu.lookup`.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from freetoken.banks import LayerBank
from freetoken.errors import CapacityError, ConfigError
from freetoken.gpu.tables import COUNTS, MOST_ROUTES, Tables
from freetoken.units import format_bytes

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b")
_SHARE = re.compile(r"\d*\.\d+|\d+\.|\d+(\.\d*)?e-\d\d?")
_LONGEST = 40
"""Characters of a number: every float's fit, and nothing that is long to read."""
EXPECTED = '"auto", a size such as "4GiB", a share of all experts above 0 and up to 1, or a number of slots from 1'


@dataclass(frozen=True)
class LayerExperts:
    """What a layer asks of slots: its experts, how many a token uses (K), and a record's bytes in each shard."""

    n_experts: int
    top_k: int
    record_bytes: tuple[int, ...]

    @classmethod
    def of(cls, bank: LayerBank, top_k: int) -> LayerExperts:
        """Those of a bank."""
        return cls(bank.n_experts, top_k, tuple(shard.layout.nbytes for shard in bank.shards))

    @property
    def slot_bytes(self) -> int:
        """Of a slot: the records of all shards, one after the other."""
        return sum(self.record_bytes)

    def least(self, tokens: int = 1) -> int:
        """Slots without which a step of so many tokens may not find room."""
        return min(self.top_k * tokens, self.n_experts)


@dataclass(frozen=True)
class Cache:
    """What slots may take altogether: a number of "bytes" or of "slots"."""

    amount: int
    unit: Literal["bytes", "slots"]

    def __str__(self) -> str:
        return format_bytes(self.amount) if self.unit == "bytes" else f"{self.amount} slots"


def parse_cache(value: str | float, layers: Sequence[LayerExperts], free: int, *, spare: int = 0) -> Cache:
    """What a user's word for the size of the cache means.

    "auto": what is free (bytes of the device) but for `spare`, and no more than all experts take. A size: "4GiB",
    "512 MB". A number with a point: that share of all experts' bytes. A whole number: slots. Numbers may be text.
    Raises `ConfigError` for anything else.
    """
    every = sum(layer.n_experts * layer.slot_bytes for layer in layers)
    text = "" if isinstance(value, bool) else str(value).strip().lower()
    cache = Cache(0, "bytes")
    text = "" if len(text) > _LONGEST else text
    if text == "auto":
        return Cache(max(0, min(every, free - spare)), "bytes")
    if size := _SIZE.fullmatch(text):
        scale: int = (1024 if size[3] else 1000) ** " kmgt".index(size[2] or " ")
        cache = Cache(int(Fraction(size[1]) * scale), "bytes")
    elif re.fullmatch(r"\d+", text):
        cache = Cache(int(text), "slots")
    elif _SHARE.fullmatch(text) and Fraction(text) <= 1:
        cache = Cache(int(Fraction(text) * every), "bytes")
    if cache.amount <= 0:
        raise ConfigError(
            f"cache={value!r} is no size of a cache, expected {EXPECTED}",
            name="cache",
            value=value,
            expected=EXPECTED,
        )
    return cache


def split(layers: Sequence[LayerExperts], cache: Cache, tokens: int = 1) -> tuple[int, ...]:
    """Slots of each layer: at least what a step of so many tokens needs, at most one for each expert.

    If every expert is as likely as another, a slot saves K / E of its record's bytes in each step, so a byte is worth
    K / E wherever it is: layers where that is larger are filled first, and equal ones get equal shares of their
    experts. What then is left goes where it fits. Raises `CapacityError` where the least does not fit.
    """
    slots = [layer.least(tokens) for layer in layers]
    costs = [layer.slot_bytes if cache.unit == "bytes" else 1 for layer in layers]
    least = sum(n * cost for n, cost in zip(slots, costs, strict=True))
    left = cache.amount - least
    if left < 0:
        smallest = Cache(least, cache.unit)
        raise CapacityError(
            f"{len(layers)} layers need {smallest} where a step has {tokens} token{'s' * (tokens != 1)}, but the cache "
            f"is {cache}: the smallest that works is {smallest}"
            + (f" ({least} bytes)" if cache.unit == "bytes" else ""),
            needed=least,
            available=cache.amount,
            where="cache",
        )
    common = math.lcm(*(layer.n_experts for layer in layers))

    def rank(index: int) -> tuple[Fraction, int, int]:
        """The next slot goes to who ranks lowest."""
        layer = layers[index]
        return worth[index], (slots[index] + 1) * (common // layer.n_experts), index

    worth = [-Fraction(layer.top_k, layer.n_experts) for layer in layers]
    waiting = [rank(i) for i, layer in enumerate(layers) if slots[i] < layer.n_experts]
    heapq.heapify(waiting)
    while waiting:
        *_, index = heapq.heappop(waiting)
        if costs[index] > left:
            continue
        left -= costs[index]
        slots[index] += 1
        if slots[index] < layers[index].n_experts:
            heapq.heappush(waiting, rank(index))
    return tuple(slots)


def choose_slots(
    layers: Sequence[LayerExperts], cache: str | float, free: int, *, tokens: int = 1, spare: int = 0
) -> tuple[int, ...]:
    """Slots of each layer for what a user asks for. Allocates nothing.

    free: bytes of the device, of which `spare` are wanted elsewhere. Raises `ConfigError` as `parse_cache`, and
    `CapacityError` where the cache is too small for steps of so many tokens or does not fit the device.
    """
    asked = parse_cache(cache, layers, free, spare=spare)
    room = max(0, free - spare)
    least = sum(layer.least(tokens) * layer.slot_bytes for layer in layers)

    def refusal(what: str, needed: int, step: str) -> CapacityError:
        return CapacityError(
            f"{what} {format_bytes(needed)} on the device, but {format_bytes(room)} of {format_bytes(free)} can be "
            f"had: {step}",
            needed=needed,
            available=room,
            where="device",
        )

    if least > room:
        step = "free some of its memory, or use strategy='cpu'"
        raise refusal(f"the smallest cache that works, {least} bytes, needs", least, step)
    slots = split(layers, asked, tokens)
    needed = sum(n * layer.slot_bytes for n, layer in zip(slots, layers, strict=True))
    if needed > room:
        step = f'ask for less or for "auto"; the smallest cache that works is {format_bytes(least)} ({least} bytes)'
        raise refusal(f"{sum(slots)} slots (cache={cache!r}) need", needed, step)
    return slots


@dataclass(frozen=True)
class Statistics:
    """What look-ups counted.

    steps: look-ups with any valid id, of the layer that had most. routed: valid ids. hits, misses: distinct experts of
    a step that were in a slot, or were not. fetched: misses that were given one. fetched_bytes: their records.
    """

    steps: int
    routed: int
    hits: int
    misses: int
    fetched: int
    fetched_bytes: int

    @property
    def computed(self) -> int:
        """Misses that were left to the host."""
        return self.misses - self.fetched

    @property
    def hit_rate(self) -> float:
        """Share of experts that were there; 0 before any step."""
        return self.hits / max(1, self.hits + self.misses)


class SlotPool:
    """The slots of all layers in a device's memory, and their tables.

    slots: of each layer, as `choose_slots` gives them. There is one run of memory for each size of slots, in which a
    layer has a range. counting: see `Tables`; None for one of its own, which is on. Raises `CapacityError` when the
    device refuses the memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        slots: Sequence[int],
        device: torch.device,
        counting: torch.Tensor | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.slots = tuple(slots)
        totals: Counter[int] = Counter()
        firsts = []
        for layer, n in zip(self.layers, self.slots, strict=True):
            firsts.append(totals[layer.slot_bytes])
            totals[layer.slot_bytes] += n
        try:
            memory = {size: torch.empty(n, size, dtype=torch.uint8, device=device) for size, n in totals.items()}
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the device refused {format_bytes(self.nbytes)} for slots: ask for a smaller cache",
                needed=self.nbytes,
                available=torch.cuda.mem_get_info(device)[0],
                where="device",
            ) from error
        self._memory = [
            memory[layer.slot_bytes][first : first + n]
            for layer, first, n in zip(self.layers, firsts, self.slots, strict=True)
        ]
        n_layers, most, widest = len(self.layers), max(self.slots), max(layer.n_experts for layer in self.layers)
        self._slot_of = torch.full((n_layers, widest), -1, dtype=torch.int32, device=device)
        self._expert_in = torch.full((n_layers, most), -1, dtype=torch.int32, device=device)
        self._used = torch.zeros(n_layers, most, dtype=torch.int64, device=device)
        self._order = torch.arange(most, dtype=torch.int32, device=device).repeat(n_layers, 1)
        self._step = torch.zeros(n_layers, 1, dtype=torch.int64, device=device)
        self._all = torch.arange(MOST_ROUTES + 1, dtype=torch.int32, device=device)
        self._split = self._all.repeat(n_layers, 1)
        self._counts = torch.zeros(n_layers, COUNTS, dtype=torch.int64, device=device)
        self._counting = torch.ones(1, dtype=torch.int32, device=device) if counting is None else counting

    @classmethod
    def resident(
        cls, layers: Sequence[LayerExperts], device: torch.device, counting: torch.Tensor | None = None
    ) -> SlotPool:
        """Every expert has its slot, slot = expert; `fill` must bring all records before the first step."""
        pool = cls(layers, [layer.n_experts for layer in layers], device, counting)
        for index in range(len(pool.layers)):
            pool.take_first(index)
        return pool

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(n * layer.slot_bytes for n, layer in zip(self.slots, self.layers, strict=True))

    @property
    def is_resident(self) -> bool:
        """Whether there are as many slots as experts, so that nothing is ever given away."""
        return all(n == layer.n_experts for n, layer in zip(self.slots, self.layers, strict=True))

    def memory(self, layer: int) -> torch.Tensor:
        """A layer's slots (S, slot_bytes) uint8."""
        return self._memory[layer]

    def tables(self, layer: int, *, split: bool = False) -> Tables:
        """A layer's tables: views, which the device changes. split: `split_misses` counts, else all is fetched."""
        n_experts, n_slots = self.layers[layer].n_experts, self.slots[layer]
        return Tables(
            slot_of=self._slot_of[layer, :n_experts],
            expert_in=self._expert_in[layer, :n_slots],
            used=self._used[layer, :n_slots],
            order=self._order[layer, :n_slots],
            step=self._step[layer],
            split=self._split[layer] if split else self._all,
            counts=self._counts[layer],
            counting=self._counting,
            pool=self._memory[layer].data_ptr(),
            slot_bytes=self.layers[layer].slot_bytes,
        )

    def fill(self, layer: int, records: Sequence[NDArray[np.uint8]]) -> None:
        """Bring all records of a layer of a resident pool: (E, record_bytes) of each shard."""
        shape = self.layers[layer]
        found, expected = [part.shape for part in records], [(shape.n_experts, n) for n in shape.record_bytes]
        if found != expected or self.slots[layer] != shape.n_experts:
            raise ValueError(f"records {found} for {self.slots[layer]} slots, expected {expected} and a slot for each")
        start = 0
        for part in records:
            for slot, record in zip(self._memory[layer], part, strict=True):
                slot[start : start + len(record)].copy_(_readable(record))
            start += part.shape[1]

    def forget(self, layer: int) -> None:
        """No expert of a layer is in a slot any more."""
        tables = self.tables(layer)
        tables.slot_of.fill_(-1)
        tables.expert_in.fill_(-1)
        tables.used.zero_()
        tables.order.copy_(torch.arange(tables.n_slots, dtype=torch.int32))

    def take_first(self, layer: int) -> None:
        """The first experts of a layer are in its slots, of which nothing was said: slot = expert."""
        tables = self.tables(layer)
        tables.expert_in.copy_(torch.arange(tables.n_slots, dtype=torch.int32))
        tables.slot_of[: tables.n_slots].copy_(tables.expert_in)

    def read_tables(self) -> torch.Tensor:
        """Each expert's slot (L, E) int32 in the host's memory, -1: none; rows of layers with fewer experts end in -1.

        One copy, which waits for the device.
        """
        return self._slot_of.cpu()

    def split_misses(self, fetches: Sequence[int], layer: int | None = None) -> None:
        """Of m missing experts of a look-up, fetch fetches[m] from now on; of one layer or of all.

        fetches: `MOST_ROUTES` + 1 numbers. Graphs need not be captured again.
        """
        if len(fetches) != MOST_ROUTES + 1:
            raise ValueError(f"{len(fetches)} numbers of fetches, expected {MOST_ROUTES + 1}")
        (self._split if layer is None else self._split[layer]).copy_(torch.tensor(fetches, dtype=torch.int32))

    def count(self, on: bool) -> None:
        """Whether look-ups from now on are counted; graphs need not be captured again."""
        self._counting.fill_(int(on))

    def statistics(self, layer: int | None = None) -> Statistics:
        """What was counted, of one layer or of all; waits for the device."""
        counts = self._counts.cpu()
        if layer is None:
            _, routed, hits, misses, fetched = counts.sum(0).tolist()
            nbytes = sum(n * shape.slot_bytes for n, shape in zip(counts[:, 4].tolist(), self.layers, strict=True))
            return Statistics(int(counts[:, 0].max()), routed, hits, misses, fetched, nbytes)
        steps, routed, hits, misses, fetched = counts[layer].tolist()
        return Statistics(steps, routed, hits, misses, fetched, fetched * self.layers[layer].slot_bytes)

    def fetched_bytes_per_token(self) -> float:
        """Bytes that a token fetches into slots, over all layers that were looked up in; waits for the device."""
        return sum((fetched * layer.slot_bytes for layer, _, fetched in self._missed_per_token()), 0.0)

    def missed_per_token(self) -> tuple[float, float]:
        """Missing experts of a token that were fetched, and that were left to the host; waits for the device."""
        found = self._missed_per_token()
        fetched = sum((fetched for _, _, fetched in found), 0.0)
        return fetched, sum((missed for _, missed, _ in found), 0.0) - fetched

    def _missed_per_token(self) -> list[tuple[LayerExperts, float, float]]:
        """Of each layer that was looked up in, missing experts and those that were fetched."""
        counted = zip(self._counts.cpu().tolist(), self.layers, strict=True)
        return [
            (layer, misses * layer.top_k / routed, fetched * layer.top_k / routed)
            for (_, routed, _, misses, fetched), layer in counted
            if routed
        ]

    def reset_statistics(self) -> None:
        """Count from 0."""
        self._counts.zero_()

    def __repr__(self) -> str:
        return f"<{sum(self.slots)} slots of {len(self.layers)} layers, {format_bytes(self.nbytes)}>"


def _readable(record: NDArray[np.uint8]) -> torch.Tensor:
    """A tensor over a record, which is only read: torch warns of memory that may not be written."""
    run = (ctypes.c_uint8 * record.nbytes).from_address(record.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(run))
