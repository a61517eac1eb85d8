"""`DecodeGraph`: decode steps of a model as graphs, captured when they are first wanted and replayed from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

import torch

from freetoken.device.base import Graph, Stream
from freetoken.duties.steps import StepGraph
from freetoken.offload.experts import DeviceExperts

SIZES = (1, 2, 4, 8)
"""Sequences of a step, of which some may be padding."""
SHORTEST = 512
"""Tokens of the shortest cache that a step reads; longer ones have twice as many each."""


def size_of(rows: int) -> int | None:
    """The smallest of `SIZES` with room for so many sequences; None where there is none."""
    return next((size for size in SIZES if size >= rows), None)


def length_of(tokens: int) -> int:
    """The shortest length of a cache with room for so many tokens."""
    return max(SHORTEST, 1 << (tokens - 1).bit_length())


class StepModel(Protocol):
    """A model's forward pass on tensors that stay where they are."""

    @property
    def valid(self) -> torch.Tensor:
        """(rows,) bool on the device: which of the rows are sequences that go on; others want no experts."""

    @property
    def moved(self) -> Sequence[torch.Tensor]:
        """What a step or its tail changes and the next one reads, but for the cache at the current token."""

    def forward(self, rows: int, length: int) -> None:
        """One token of each of the first rows, which see `length` columns of the cache; leaves logits."""


class DecodeGraph:
    """Steps of a model on a device, as graphs for each number of rows and length of the cache, and their tails.

    A size is captured when it is first wanted: nobody waits for, or gives memory to, one that is never used; all of
    them use the same memory. What the capture has moved is put back.

    What may not change between replays: where the model's parameters lie, its attention and experts implementations,
    which layers of experts are pinned, and where the tensors of its `StepModel` lie; `forget` is called when one of
    these has changed. What may: what the tensors hold, which experts are in slots, how misses are split, and whether
    anything is counted.
    """

    def __init__(self, experts: DeviceExperts, model: StepModel) -> None:
        self._experts, self._model = experts, model
        self._device = experts.device
        self._steps: dict[tuple[int, int], StepGraph] = {}
        self._tails: dict[Hashable, Graph] = {}

    def step(self, rows: int, length: int) -> StepGraph:
        """The step of so many rows; raises what its forward pass or its capture raises."""
        key = rows, length
        if key not in self._steps:
            share = next(iter(self._steps.values()), None)
            with self.unmoved():
                valid = None if rows == 1 else self._model.valid[:rows]  # a step of no row is never launched
                self._steps[key] = self._experts.capture(
                    lambda: self._model.forward(rows, length), valid, share, tailed=True
                )
        return self._steps[key]

    def tail(
        self, key: Hashable, work: Callable[[], object], send: Callable[[Stream], object], moved: Sequence[torch.Tensor]
    ) -> Graph:
        """The tail that does `work` and then sends. moved: what it changes besides, as `StepModel`'s."""
        if key not in self._tails:
            steps = self._experts.host.steps

            def build(stream: Stream) -> None:
                stream.trace(work)
                send(stream)
                stream.ring(steps.finished_flag)

            steps.drain()  # nothing waits while there is a capture
            with self.unmoved(moved):
                work()
                self._tails[key] = self._device.capture(build)
        return self._tails[key]

    def forget_tail(self, key: Hashable) -> None:
        """Nobody wants it any more."""
        self._tails.pop(key, None)

    def forget(self) -> None:
        """Capture steps again when they are wanted: the cache moves. Returns when none is on its way."""
        self._experts.host.steps.drain()
        self._steps.clear()

    @contextlib.contextmanager
    def between(self) -> Iterator[None]:
        """Around what the caller computes on the tensors of steps: it comes after those that were launched."""
        self._device.current().after(self._device.launches().mark())
        yield

    @contextlib.contextmanager
    def unmoved(self, more: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """What a step moves, these tensors and torch's random numbers are afterwards as they were before."""
        on = self._device.torch_device
        with self.between(), torch.random.fork_rng([on] if on.type == "cuda" else []):
            moved = (*self._model.moved, *more)
            before = [tensor.clone() for tensor in moved]
            try:
                yield
            finally:
                for tensor, value in zip(moved, before, strict=True):
                    tensor.copy_(value)
