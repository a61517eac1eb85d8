"""A layer of experts computed from records that lie on a device: few tokens by vectors, many by matrix products.

Chooses the kernels of a layer's shards and checks them once against the float64 reference before they are trusted.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from freetoken.device.base import Device
from freetoken.device.cuda import CudaDevice
from freetoken.errors import UnsupportedError
from freetoken.executor import Activation, ordinary_bank
from freetoken.formats.base import Format
from freetoken.formats.record import Expert, RecordLayout
from freetoken.gpu.combine import combine
from freetoken.gpu.gemv import TritonGemv
from freetoken.gpu.gemv_cuda import CudaGemv
from freetoken.gpu.grouped import GroupedProduct, hidden_dtype, sort_routes
from freetoken.gpu.units import COLUMNS, Units
from freetoken.kernels import reference

logger = logging.getLogger(__name__)

CHUNK = 4096
"""Tokens of one matrix product, which bounds what lies between gate, up, down and the sum: 1 GB for 2880 and top-8."""
_BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Error at which kernels count as broken: far above what they have (docs/kernels.md), far below any mistake."""


_ORDINARY = 1e-3, 3e4
"""Norms of outputs between which an expert serves to check kernels with; else one of random weights does."""


class Gemv(Protocol):
    """Products of one shard's records with few tokens; gemv.py says what the arguments are."""

    def gate_up(
        self, x: torch.Tensor, units: Units, k: int, out: torch.Tensor, offset: int = 0, early: bool = False
    ) -> None:
        """Hidden values of each route."""

    def down(self, h: torch.Tensor, units: Units, out: torch.Tensor, offset: int = 0) -> None:
        """Each route's output."""


@dataclass(frozen=True)
class _Shard:
    """Kernels of one shard. offset: where its record begins in the expert's."""

    layout: RecordLayout
    offset: int
    few: Gemv
    many: GroupedProduct


class LayerKernels:
    """Computes layers whose experts' shards have these layouts.

    dtype: of hidden states. example: the shards of an expert with which they are checked, at `Device.torch_device`'s
    expense for a moment. Raises `UnsupportedError` when none that can run here agrees with the reference.
    """

    def __init__(
        self,
        layouts: tuple[RecordLayout, ...],
        activation: Activation,
        n_experts: int,
        device: Device,
        dtype: torch.dtype,
        example: tuple[Expert, ...],
    ) -> None:
        self.n_experts = n_experts
        self.hidden = layouts[0].hidden
        self._device = device
        offsets = [0, *itertools.accumulate(layout.nbytes for layout in layouts)]
        for choice in _gemvs(device, layouts[0].format):
            self._shards = [
                _Shard(layout, offset, choice(layout, activation, dtype), GroupedProduct(layout, activation))
                for layout, offset in zip(layouts, offsets, strict=False)
            ]
            self.name = f"{type(self._shards[0].few).__name__} {layouts[0].format.name}"
            error = self._check(example, activation, dtype)
            if error <= _BOUND[dtype]:
                logger.info("%s runs on %s, error %.2g", self.name, device.name, error)
                return
            logger.warning("%s is wrong on %s (error %.3g)", self.name, device.name, error)
        raise UnsupportedError(
            f"no kernel for {layouts[0].format.name} agrees with the reference on {device.name}; use strategy='cpu', "
            "and please report it with the output of `ft info`",
            feature=layouts[0].format.name,
        )

    def few(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, units: Units) -> torch.Tensor:
        """(B, H): the weighted sum of routed experts for few tokens x (B, H), whose records lie where units say."""
        y, out = self.outputs(x, ids.numel()), torch.empty_like(x)
        self.routes(x, ids.shape[1], units, y, early=True)
        self.combine(y, ids, weights, out)
        return out

    def outputs(self, x: torch.Tensor, routes: int) -> torch.Tensor:
        """Room for what `routes` gives: (S, B * K, H) float32, of each shard and route."""
        return torch.empty(len(self._shards), routes, self.hidden, dtype=torch.float32, device=x.device)

    def routes(self, x: torch.Tensor, k: int, units: Units, y: torch.Tensor, early: bool) -> None:
        """The first part of `few`, for the routes of these units: their rows of y. early: see `CudaGemv.gate_up`."""
        for shard, part in zip(self._shards, y, strict=True):
            h = torch.empty(len(part), shard.layout.intermediate, dtype=torch.float32, device=x.device)
            shard.few.gate_up(x, units, k, h, shard.offset, early)
            shard.few.down(h, units, part, shard.offset)

    def combine(self, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """The second part of `few`: out (B, H), routes of ids that are no expert's add nothing."""
        combine(y, ids, weights, self.n_experts, out)

    def many(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, tables: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """(T, H): the same for any number of tokens.

        tables: (S, E) int64, the address of each shard of each expert; 0 for experts of other tables. Each expert is in
        one of them. What is computed with a table is on the current lane before the next one is asked for.
        """
        out: torch.Tensor | None = None
        parts = [slice(start, start + CHUNK) for start in range(0, len(x), CHUNK)]
        sorted_routes = [sort_routes(ids[part], self.n_experts) for part in parts]
        for table in tables:
            total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
            of_table = only_with(ids, table[0])
            for part, routes in zip(parts, sorted_routes, strict=True):
                combine(
                    self._many(x[part], ids.shape[1], *routes, table),
                    of_table[part],
                    weights[part],
                    self.n_experts,
                    total[part],
                )
            out = total if out is None else out.add_(total)
        assert out is not None, "a layer has a table"
        return out.to(x.dtype)

    def _many(
        self, x: torch.Tensor, k: int, order: torch.Tensor, starts: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """(S, T * K, H): each route's output, of experts that the table has."""
        routes = len(order)
        y = torch.empty(len(self._shards), routes, self.hidden, dtype=torch.float32, device=x.device)
        for shard, address, part in zip(self._shards, table, y, strict=True):
            h = torch.empty(routes, shard.layout.intermediate, dtype=hidden_dtype(x.dtype), device=x.device)
            shard.many.gate_up(x, order, starts, address, k, h)
            shard.many.down(h, starts, address, order, part)
        return y

    def _check(self, example: tuple[Expert, ...], activation: Activation, dtype: torch.dtype) -> float:
        """The larger error of both ways against the reference, relative to the output's norm."""
        tokens = 3
        record = np.zeros(sum(shard.layout.nbytes for shard in self._shards), np.uint8)
        for shard, part in zip(self._shards, example, strict=True):
            shard.layout.pack(part, record[shard.offset : shard.offset + shard.layout.nbytes])
        there = torch.from_numpy(record).to(self._device.torch_device)
        values = np.random.default_rng(0).standard_normal((tokens, self.hidden)).astype(np.float32)
        x = torch.from_numpy(values).to(self._device.torch_device, dtype)
        exact = x.double().cpu().numpy()
        expected = sum(
            reference.run_expert(part, exact, activation.kind, activation.alpha, activation.limit, "none")
            for part in example
        )
        if not _ORDINARY[0] < np.linalg.norm(expected) < _ORDINARY[1]:
            return self._check(tuple(ordinary_bank(s.layout).get(0) for s in self._shards), activation, dtype)
        ids = torch.zeros(tokens, 1, dtype=torch.int64, device=x.device)
        weights = torch.ones(tokens, 1, dtype=torch.float32, device=x.device)
        route = torch.full((1, COLUMNS), -1, dtype=torch.int32, device=x.device)
        route[0, :tokens] = torch.arange(tokens, dtype=torch.int32)
        units = Units(torch.tensor([there.data_ptr()], dtype=torch.int64, device=x.device), route)
        table = torch.zeros(len(self._shards), self.n_experts, dtype=torch.int64)
        table[:, 0] = torch.tensor([there.data_ptr() + shard.offset for shard in self._shards])
        found = [self.few(x, ids, weights, units), self.many(x, ids, weights, [table.to(x.device)])]
        scale = np.linalg.norm(expected)
        return max(float(np.linalg.norm(out.double().cpu().numpy() - expected) / scale) for out in found)


def _gemvs(device: Device, fmt: Format) -> list[Callable[[RecordLayout, Activation, torch.dtype], Gemv]]:
    """What can be used on a device, the faster one first: Triton is near memory's rate where decoding is cheap."""
    found: list[Callable[[RecordLayout, Activation, torch.dtype], Gemv]] = [lambda *of: TritonGemv(*of[:2])]
    if isinstance(device, CudaDevice) and CudaGemv.runs_on(device):
        found.insert(0 if fmt.bits == 4 else 1, lambda *of: CudaGemv(device, *of))
    return found


def only_with(ids: torch.Tensor, address: torch.Tensor) -> torch.Tensor:
    """Ids of experts that have an address (E,), -1 in place of others."""
    inside = (ids >= 0) & (ids < len(address))
    return torch.where(inside & (address != 0)[ids.clamp(0, len(address) - 1)], ids, -1)
