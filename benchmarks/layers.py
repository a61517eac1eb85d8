"""Banks that are larger than any cache, layers over them, and the roof: the fastest plain read of the same memory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freetoken.banks import Bank
from freetoken.executor import Activation, BoundLayer, Executor
from freetoken.formats.base import Format
from freetoken.formats.record import Expert, RecordLayout
from freetoken.kernels import _read
from freetoken.kernels._experts import Scratch


@dataclass(frozen=True)
class Shape:
    """Experts of a model: hidden size, width, how many, how many a token; with biases and the clamped activation."""

    hidden: int
    width: int
    experts: int
    top_k: int
    gpt_oss: bool = False

    def layout(self, fmt: Format) -> RecordLayout:
        """The record in a format."""
        return RecordLayout(fmt, self.hidden, self.width, self.gpt_oss)

    @property
    def activation(self) -> Activation:
        """What is between gate and up."""
        return Activation("swiglu_clamped", 1.702, 7.0) if self.gpt_oss else Activation()

    def __str__(self) -> str:
        return f"{self.hidden}/{self.width} top {self.top_k} of {self.experts}"


def make_expert(layout: RecordLayout, random: np.random.Generator) -> Expert:
    """An expert of small random weights."""

    def matrix(n: int, k: int) -> Any:
        return layout.format.quantize(random.standard_normal((n, k), np.float32) * np.float32(0.05))

    h, i = layout.hidden, layout.intermediate
    biases = [random.standard_normal(n, np.float32) if layout.bias else None for n in (i, i, h)]
    return Expert(matrix(i, h), matrix(i, h), matrix(h, i), *biases)


class Layers:
    """As many layers as `nbytes` of records take, at least one, and tokens for them.

    Every record holds the same expert: a processor cannot tell. dtype: of the model, which chooses the tile function
    together with FREETOKEN_CPU_ACT and FREETOKEN_CPU_ISA.
    """

    def __init__(
        self, shape: Shape, fmt: Format, threads: int, nbytes: int, layers: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.shape, self.threads = shape, threads
        self.layout = shape.layout(fmt)
        self.random = np.random.default_rng(0)
        expert = make_expert(self.layout, self.random)
        count = layers or max(1, -(-nbytes // (shape.experts * self.layout.nbytes)))
        executor = Executor(tuple(range(threads)), dtype)
        self.bound: list[BoundLayer] = []
        for _ in range(count):
            bank = Bank(self.layout, shape.experts)
            bank.put(0, expert)
            bank.records[1:] = bank.records[0]
            bank.mark(range(shape.experts))
            self.bound.append(executor.bind(bank, shape.activation))
        self._scratch = Scratch()
        self._at = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of records that one token reads in a layer."""
        return self.shape.top_k * self.layout.nbytes

    @property
    def memory(self) -> list[NDArray[np.uint8]]:
        """All records."""
        return [shard.records.reshape(-1) for layer in self.bound for shard in layer.bank.shards]

    def routes(self, tokens: int, together: bool = False) -> NDArray[np.int32]:
        """Random experts, those of a token distinct; together: the same for all tokens."""
        drawn = [self.random.permutation(self.shape.experts)[: self.shape.top_k] for _ in range(tokens)]
        return np.stack(drawn[:1] * tokens if together else drawn).astype(np.int32)

    def run(self, ids: Sequence[NDArray[np.int32]], x: NDArray[Any], weights: NDArray[np.float32]) -> float:
        """Seconds of one call for each of `ids`, layer after layer in turn; x: (tokens, hidden), as `ExpertLayer`."""
        out = np.empty_like(x)
        start = time.perf_counter()
        for routes in ids:
            layer = self.bound[self._at]
            self._at = (self._at + 1) % len(self.bound)
            layer.kernel.run(x, routes, weights, out, self._scratch, self.threads)
        return time.perf_counter() - start

    def inputs(self, tokens: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Random activations in bf16 and weights that add up to one."""
        x = torch.from_numpy(self.random.standard_normal((tokens, self.shape.hidden), np.float32))
        weights = np.full((tokens, self.shape.top_k), 1 / self.shape.top_k, np.float32)
        return x.bfloat16().view(torch.uint16).numpy(), weights


def roof(memory: Sequence[NDArray[np.uint8]], threads: int, nbytes: int = 1 << 30) -> float:
    """Bytes per second of the fastest way of plainly reading some of the memory."""
    best = 0.0
    for way in _read.WAYS:
        left, seconds = nbytes, 0.0
        for piece in memory:
            part = piece[: min(left, piece.nbytes) // _read.STEP * _read.STEP]
            start = time.perf_counter()
            _read.read(part, way, threads)
            seconds += time.perf_counter() - start
            left -= part.nbytes
            if left < _read.STEP:
                break
        best = max(best, (nbytes - left) / seconds)
    return best


def bare_loop(layers: Layers, nbytes: int = 1 << 30) -> float:
    """Bytes per second of nothing but a layer's tile function, over the first products' tiles of some experts."""
    layout, fmt, kernel = layers.layout, layers.layout.format, layers.bound[0].choice.kernel
    vector, section = np.zeros(4 * layout.hidden, np.uint8), layout.sections["gate_up"]
    done, seconds = 0, 0.0
    for layer in layers.bound:
        (shard,) = layer.bank.shards
        records = shard.records[: max(1, (nbytes - done) // section[1])]
        start = time.perf_counter()
        _read.multiply(records, section, fmt, layout.hidden, kernel, vector, layers.threads)
        seconds += time.perf_counter() - start
        done += len(records) * section[1]
        if done >= nbytes:
            break
    return done / seconds
