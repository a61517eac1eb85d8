"""Host execution: chooses tile functions, checks them once, and runs layers of experts for routed tokens.

Executor        one per model: threads, scratch memory, a lock; calls from several threads queue
BoundLayer      one per layer: a complete bank bound to a tile function and an activation function
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from freetoken import settings
from freetoken.banks import Bank, LayerBank
from freetoken.crowding import CrowdWatch
from freetoken.errors import FreeTokenError, UnsupportedError
from freetoken.formats.base import Format, Matrix
from freetoken.formats.record import Expert, RecordLayout
from freetoken.kernels import reference
from freetoken.kernels._experts import ExpertLayer, Scratch
from freetoken.kernels._isa import LEVELS, TileKernel, available_levels
from freetoken.kernels._shards import ShardedLayer
from freetoken.memory.placement import Placement

logger = logging.getLogger(__name__)

_MAX_TOKENS = 512
"""Tokens handled by one pass over a layer; longer batches are cut, which bounds scratch memory."""

_CHECK_BOUND = {"fp32": 1e-4, "bf16": 2e-2, "int8": 1e-1, "int15": 2e-3, "fp8": 2e-1}
"""Error at which a tile function counts as broken: far above `reference.ERROR_BOUND` for odd weights, far below any
mistake in decoding, which gives errors of the order of 1. fp8: a hidden value near a tie may be rounded to the other
side, which moves it by an eighth at most."""


@dataclass(frozen=True)
class Activation:
    """The gated activation between gate and up, as `kernels.reference.activate` defines it.

    kind: "silu", "silu_limited" with limit, or "swiglu_clamped" with alpha and limit.
    """

    kind: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True)
class KernelChoice:
    """A tile function and how activations reach it.

    act: the precision in force. tier: the level asked of the CPU.
    """

    kernel: TileKernel
    act: str
    tier: str

    @property
    def rounding(self) -> str:
        """What happens to activations before they are prepared for the tile function, as `ExpertLayer` takes it."""
        return self.act if self.act in ("bf16", "fp8") else "none"


def kernel_choices(fmt: Format, act: str, dtype: torch.dtype, tier: str = "auto") -> list[KernelChoice]:
    """Tile functions for a format, best first: one for each lower tier that has another.

    act: "auto" or a precision. auto takes fp32 for an fp32 or fp16 model; for a bf16 model int15 where there is a tile,
    which is nearer to the exact values than bf16 and faster (docs/kernels.md); else bf16 where a bf16 dot serves this
    format, else fp32. A forced bf16 without such a tile rounds activations before an fp32 tile; formats without int8
    and int15 tiles (bf16, fp8_block) take bf16 instead. fp8 rounds them before a bf16 tile where there is one, else an
    fp32 tile: both hold e4m3 times a power of two exactly. Raises `UnsupportedError` for a tier this CPU lacks.
    """
    levels = _levels_up_to(tier)
    kernels: list[TileKernel] = importlib.import_module(f"freetoken.kernels._tile_{fmt.kernels}").kernels()
    choices: list[KernelChoice] = []
    for level in reversed(levels):
        choice = _choose(kernels, level, act, dtype)
        if not choices or choice.kernel.level != choices[-1].kernel.level:
            choices.append(choice)
    return choices


def _levels_up_to(tier: str) -> tuple[str, ...]:
    levels = available_levels()
    if tier == "auto":
        return levels
    if tier not in levels:
        has = ", ".join(levels)
        raise UnsupportedError(f"this CPU has no {tier}; it has {has}", feature=tier, available=has)
    return levels[: levels.index(tier) + 1]


def _choose(kernels: list[TileKernel], level: str, act: str, dtype: torch.dtype) -> KernelChoice:
    def best(wanted: str) -> TileKernel | None:
        rank = LEVELS.index(level)
        usable = [k for k in kernels if k.act == wanted and LEVELS.index(k.level) <= rank]
        return max(usable, key=lambda k: LEVELS.index(k.level), default=None)

    bf16, fp32 = best("bf16"), best("fp32")
    assert fp32 is not None, "every format has a scalar fp32 tile"
    if act == "auto":
        int15 = best("int15")
        if dtype != torch.bfloat16:
            act = "fp32"
        elif int15 is not None and int15.level != "scalar":
            act = "int15"
        else:
            act = "fp32" if bf16 is None else "bf16"
    if act in ("int8", "int15"):
        whole = best(act)
        if whole is not None:
            return KernelChoice(whole, act, level)
        act = "bf16"
    return KernelChoice(fp32 if act == "fp32" else bf16 or fp32, act, level)


class Executor:
    """Runs expert layers of one model on the CPU.

    workers: the CPUs that get a thread each. dtype: the model's. why: the limits behind the choice of workers, for
    reports. placement: which node each worker's CPU is of and which shards it reads. Where experts are cut into shards,
    threads stay on their node's workers' CPUs from their first layer on, but for the caller's own thread, which is
    left alone; else no thread is kept anywhere. Calls queue on a lock. Not usable after fork (OpenMP teams do not
    survive it), nor picklable.
    """

    def __init__(
        self, workers: tuple[int, ...], dtype: torch.dtype, why: str = "", placement: Placement | None = None
    ) -> None:
        self.workers = workers
        self.why = why
        self.placement = placement
        self.dtype = dtype
        self.act = settings.CPU_ACT.read()
        self.tier = settings.CPU_ISA.read()
        _levels_up_to(self.tier)
        self._scratch = Scratch()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._crowd = CrowdWatch(len(workers))
        self._checked: dict[tuple[str, bool], KernelChoice] = {}

    @property
    def shard_step(self) -> int:
        """Shards cut at multiples of this are computed as the whole is: values rounded together stay together."""
        return reference.FP8_GROUP if self.act == "fp8" else 1

    def teams(self, shards: int) -> tuple[int, ...]:
        """The shard that each thread serves; turn by turn where the placement says nothing of so many shards."""
        if self.placement is not None and set(self.placement.teams) == set(range(shards)):
            return self.placement.teams
        return tuple(thread % shards for thread in range(max(len(self.workers), shards)))

    def readers(self, bank: LayerBank, shard: int) -> tuple[int | None, ...]:
        """The nodes of the workers that read a shard of a bank, one for each worker."""
        if self.placement is None:
            return ()
        teams = self.teams(len(bank.shards))
        return tuple(home for home, team in zip(self.placement.homes, teams, strict=False) if team == shard)

    def bind(self, bank: LayerBank, activation: Activation) -> BoundLayer:
        """A layer ready to run. The first bank of each format is checked against the reference, tier by tier."""
        missing = bank.missing
        if missing:
            raise FreeTokenError(f"{bank!r} is incomplete: experts {missing[:8]} were never loaded")
        key = (bank.layout.format.name, bank.layout.bias)
        if key not in self._checked:
            self._checked[key] = self._first_that_agrees(bank.shards[0], activation)
        choice = self._checked[key]
        parts = [_bind(shard, activation, choice) for shard in bank.shards]
        return BoundLayer(self, bank, activation, choice, self._join(parts) if len(parts) > 1 else parts[0])

    def _join(self, parts: list[ExpertLayer]) -> ShardedLayer:
        teams = self.teams(len(parts))
        if self.placement is None or teams != self.placement.teams:
            return ShardedLayer(parts, teams, [()] * len(teams))
        return ShardedLayer(parts, teams, self.placement.seats(self.workers))

    def _first_that_agrees(self, bank: Bank, activation: Activation) -> KernelChoice:
        choices = kernel_choices(bank.layout.format, self.act, self.dtype, self.tier)
        for choice in choices:
            error = check_kernel(bank, activation, choice)
            if error <= _CHECK_BOUND[choice.act]:
                logger.info("%s experts run on %s", bank.layout.format.name, choice)
                return choice
            logger.warning("%r is wrong on this CPU (error %.3g); trying the next tier", choice.kernel, error)
        raise UnsupportedError(
            f"no CPU tile for {bank.layout.format.name} agrees with the reference on this machine; please report it "
            "with the output of `ft info`",
            feature=bank.layout.format.name,
        )

    def run(self, layer: BoundLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed experts' weighted sum for each token.

        x: (B, H) float32, bfloat16 or float16, on the CPU or copied there and back. ids: (B, K) integer, out-of-range
        ids are skipped.
        weights: (B, K) floating. Returns (B, H) in x's dtype.
        """
        if os.getpid() != self._pid:
            raise forked_error()
        if x.device.type == "meta":
            raise UnsupportedError("experts cannot run on the meta device: there is nothing to compute", feature="meta")
        if x.device.type != "cpu":  # a dense part that was moved: right, at the price of two copies
            return self.run(layer, x.cpu(), ids.cpu(), weights.cpu()).to(x.device)
        out = torch.empty(x.shape, dtype=x.dtype)
        wide = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
        target = out if wide is x else torch.empty(x.shape, dtype=torch.float32)
        source, sink = as_numpy(wide.contiguous()), as_numpy(target)
        routes = ids.to(torch.int32).contiguous().numpy()
        factors = weights.to(torch.float32).contiguous().numpy()
        with self._lock:
            for start in range(0, len(routes), _MAX_TOKENS):
                part = slice(start, start + _MAX_TOKENS)
                layer.kernel.run(
                    source[part], routes[part], factors[part], sink[part], self._scratch, len(self.workers)
                )
            self._crowd.look()
        if target is not out:
            out.copy_(target)
        return out

    def __reduce__(self) -> str:
        refuse_copy()


@dataclass(frozen=True, eq=False)
class BoundLayer:
    """One layer's complete bank, in one piece or in shards, bound to what runs it."""

    executor: Executor
    bank: LayerBank
    activation: Activation
    choice: KernelChoice
    kernel: ExpertLayer | ShardedLayer

    @property
    def bound(self) -> BoundLayer:
        """This layer: it is on the host."""
        return self

    @property
    def layout(self) -> RecordLayout:
        """Of whole experts."""
        return self.bank.layout

    @property
    def n_experts(self) -> int:
        """E."""
        return self.bank.n_experts

    @property
    def expert_bytes(self) -> int:
        """Of one expert's records, of all shards."""
        return self.bank.nbytes // self.bank.n_experts

    def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `Executor.run`."""
        return self.executor.run(self, x, ids, weights)

    def __deepcopy__(self, memo: object) -> BoundLayer:
        refuse_copy()


def refuse_copy() -> NoReturn:
    """What copying or pickling a model with banks comes to."""
    raise UnsupportedError(
        "experts in host banks cannot be copied or pickled; call freetoken.load again where the model is needed",
        feature="pickle",
    )


def forked_error() -> UnsupportedError:
    """Use in a child process of what was made before the fork."""
    return UnsupportedError(
        "this model was loaded before a fork and cannot run in the child; load it in the child instead", feature="fork"
    )


def check_kernel(bank: Bank, activation: Activation, choice: KernelChoice) -> float:
    """Error of one tile function against the reference that rounds as the choice does, relative to the output's norm.

    Expert 0 of the bank is computed, for one token and for many where there is a tile function for these; where its
    weights are so extreme that fp32 itself gives no ordinary number, an expert of ordinary random weights in the same
    layout is.
    """
    tokens = 17 if choice.kernel.many else 1
    x = np.random.default_rng(0).standard_normal((tokens, bank.layout.hidden)).astype(np.float32)
    values = (x.astype(np.float64), activation.kind, activation.alpha, activation.limit, choice.rounding)
    expected = reference.run_expert(bank.get(0), *values)
    if not 1e-20 < np.linalg.norm(expected) < 1e20:
        bank = ordinary_bank(bank.layout)
        expected = reference.run_expert(bank.get(0), *values)
    layer, errors = _bind(bank, activation, choice), []
    for part in {1, tokens}:
        ids, weights = np.zeros((part, 1), np.int32), np.ones((part, 1), np.float32)
        out = np.empty_like(x[:part])
        layer.run(x[:part], ids, weights, out, Scratch(), 1)
        errors.append(float(np.linalg.norm(out - expected[:part]) / np.linalg.norm(expected[:part])))
    return float(np.max(errors))


def ordinary_bank(layout: RecordLayout) -> Bank:
    """One expert of ordinary random weights, to check kernels with."""
    random = np.random.default_rng(1)

    def matrix(n: int, k: int) -> Matrix:
        return layout.format.quantize(random.standard_normal((n, k), np.float32) / np.float32(np.sqrt(k)))

    h, i = layout.hidden, layout.intermediate
    biases = [random.standard_normal(n, np.float32) for n in (i, i, h)] if layout.bias else [None] * 3
    bank = Bank(layout, 1)
    bank.put(0, Expert(matrix(i, h), matrix(i, h), matrix(h, i), *biases))
    return bank


def _bind(bank: Bank, activation: Activation, choice: KernelChoice) -> ExpertLayer:
    return ExpertLayer(
        bank.records,
        bank.layout,
        choice.kernel,
        activation.kind,
        activation.alpha,
        activation.limit,
        choice.rounding,
    )


def as_numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    """A view: bf16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.uint16).numpy()
    return tensor.detach().numpy()
