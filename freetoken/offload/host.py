"""Layers that the host computes for a model on a device, through the step protocol (docs/steps.md).

Called by itself a layer is a step: its graph copies hidden states, ids and weights to the host and rings, the
coordinator's team computes the layer in place, the graph waits and copies the result back. Graphs are of fixed sizes,
made when they are first wanted; what a call leaves free has the id -1, of no expert. In a graph of many layers
(capture.py) each has a `HandOff`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from freetoken.device.base import Device, Flag, Stream, Trip
from freetoken.duties import Duty, Steps, Worker
from freetoken.duties._layer import LayerWork
from freetoken.duties.steps import StepGraph
from freetoken.executor import BoundLayer, Executor, as_numpy
from freetoken.kernels._experts import Scratch

MOST_TOKENS = 512
"""Of one graph; more tokens are taken in turn. As many as `Executor` takes at once."""


@dataclass(frozen=True)
class _Buffers:
    """What graphs of one size read and write: hidden states, ids, weights and results."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All but the results."""
        return self.x, self.ids, self.weights


@dataclass(frozen=True)
class HandOff:
    """The host's side of a captured layer. times: (3,) int64 on the device; took: (1,) int64 here; see `Trip`."""

    bell: Flag
    answer: Flag
    there: _Buffers
    took: torch.Tensor
    times: torch.Tensor
    duty: Duty

    def trip(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        waited: torch.Tensor,
        counting: torch.Tensor,
    ) -> Trip:
        """With the device's side: x (B, H) as the host computes, ids (B, K) int32, weights (B, K) float32."""
        sent = tuple(zip(self.there.inputs, (x, ids, weights), strict=True))
        return Trip(self.bell, self.answer, ids, sent, self.there.out, self.took, self.times, waited, counting)

    def seconds(self) -> tuple[float, float, float]:
        """Of the last trip: the device's own part, the host's work, all of it. Waits for the device."""
        asked, ready, seen = self.times.tolist()
        return (ready - asked) / 1e9, int(self.took) / 1e9, (seen - asked) / 1e9


class HostExperts:
    """Computes bound layers for tensors that lie on a device.

    Calls are for one thread at a time. An error of a layer comes out of a later call, or of `finish`: what was returned
    is not to be used before that.
    """

    def __init__(self, device: Device, executor: Executor) -> None:
        self._device = device
        cores = len(executor.workers)
        sharded = executor.placement is not None and executor.placement.policy == "shard"
        self._threads = cores if sharded or cores <= 2 else cores - 1  # one is left to the thread that launches
        self.worker = Worker("experts", self._threads)
        self.steps = Steps(device, [self.worker])
        self._scratch = Scratch()
        self._here: dict[tuple[int, int, int, torch.dtype], _Buffers] = {}
        self._there: dict[tuple[int, int, int, torch.dtype], _Buffers] = {}
        self._graphs: dict[tuple[int, int, int, torch.dtype], StepGraph] = {}

    @property
    def threads(self) -> int:
        """That compute."""
        return self._threads

    def run(
        self,
        number: int,
        layer: BoundLayer,
        launched: list[int],
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """As `Executor.run`, for tensors on the device. number: the layer's. launched: gets the steps to `finish`."""
        parts = [
            self._run(number, layer, launched, *(t[start : start + MOST_TOKENS] for t in (x, ids, weights)))
            for start in range(0, len(x), MOST_TOKENS)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(x)

    def _run(
        self,
        number: int,
        layer: BoundLayer,
        launched: list[int],
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        n, k = ids.shape
        dtype = x.dtype if x.dtype in (torch.float32, torch.bfloat16) else torch.float32
        size = 1 << (n - 1).bit_length()
        here, _ = self._buffers(size, x.shape[1], k, dtype)
        graph = self._graph(number, layer, size, k, dtype)
        current, launches = self._device.current(), self._device.launches()

        def fill() -> None:
            here.x[:n].copy_(x)
            here.ids[:n].copy_(ids)
            here.ids[n:].fill_(-1)
            here.weights[:n].copy_(weights)

        current.kernel(fill)
        launches.after(current.mark())
        launched.append(self.steps.launch(graph))
        current.after(launches.mark())
        return here.out[:n].to(x.dtype, copy=True)

    def _buffers(self, size: int, hidden: int, k: int, dtype: torch.dtype) -> tuple[_Buffers, _Buffers]:
        """On the device, and on the host."""
        key = size, hidden, k, dtype
        if key not in self._here:
            on = self._device.torch_device
            with torch.inference_mode(False):  # they are used inside and outside of that
                self._here[key] = _Buffers(
                    *(torch.zeros(*shape, dtype=kind, device=on) for shape, kind in _kinds(*key))
                )
        return self._here[key], self._host_buffers(*key)

    def _host_buffers(self, size: int, hidden: int, k: int, dtype: torch.dtype) -> _Buffers:
        key = size, hidden, k, dtype
        if key not in self._there:
            with torch.inference_mode(False):
                self._there[key] = _Buffers(*(self._device.host_tensor(*kind) for kind in _kinds(*key)))
        return self._there[key]

    def _graph(self, number: int, layer: BoundLayer, size: int, k: int, dtype: torch.dtype) -> StepGraph:
        key = number, size, k, dtype
        if key not in self._graphs:
            here, there = self._buffers(size, layer.bank.layout.hidden, k, dtype)
            bell, answer = self._device.flags(2)

            def build(stream: Stream) -> None:
                for target, source in zip(there.inputs, here.inputs, strict=True):
                    stream.copy(target, source)
                stream.ring(bell)
                stream.wait(answer)
                stream.copy(here.out, there.out)
                stream.ring(self.steps.finished_flag)

            work = LayerWork(layer.kernel, *_arrays(there), self._scratch, self._threads)
            self.steps.drain()  # nothing waits while there is a capture
            graph = self._device.capture(build)
            duty = Duty("experts", number, work, answer, bell)
            self._graphs[key] = self.steps.bind(graph, {self.worker: [duty]})
        return self._graphs[key]

    def hand_off(self, number: int, layer: BoundLayer, tokens: int, k: int, dtype: torch.dtype) -> HandOff:
        """For so many tokens of a layer in a graph; dtype: float32 or bfloat16. Makes memory: not during a capture.

        Layers of the same sizes share buffers: they are computed one after the other.
        """
        there = self._host_buffers(tokens, layer.bank.layout.hidden, k, dtype)
        bell, answer = self._device.flags(2)
        took = self._device.host_tensor((1,), torch.int64)
        times = torch.zeros(3, dtype=torch.int64, device=self._device.torch_device)
        work = LayerWork(layer.kernel, *_arrays(there), self._scratch, self._threads, took.numpy())
        return HandOff(bell, answer, there, took, times, Duty("experts", number, work, answer, bell))

    def finish(self, launched: Sequence[int]) -> None:
        """Return when steps are done; raises the `StepError` of one that failed or was cancelled with another."""
        for number in launched:
            self.steps.wait(number)

    def close(self) -> None:
        """End what is on its way."""
        self.steps.close()


def _arrays(there: _Buffers) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """As `LayerWork` takes them."""
    return as_numpy(there.x), there.ids.numpy(), there.weights.numpy(), as_numpy(there.out)


def _kinds(size: int, hidden: int, k: int, dtype: torch.dtype) -> tuple[tuple[tuple[int, int], torch.dtype], ...]:
    """Shapes and dtypes of `_Buffers`."""
    return ((size, hidden), dtype), ((size, k), torch.int32), ((size, k), torch.float32), ((size, hidden), dtype)
