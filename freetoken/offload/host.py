"""Layers that the host computes for a model on a device, through the step protocol (docs/steps.md).

Each call of a layer is a step: its graph copies hidden states, ids and weights to the host and rings, the coordinator's
team computes the layer in place, the graph waits and copies the result back. Graphs are of fixed sizes, made when they
are first wanted; what a call leaves free has the id -1, of no expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from freetoken.device.base import Device, Stream
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
        self._worker = Worker("experts", self._threads)
        self._steps = Steps(device, [self._worker])
        self._scratch = Scratch()
        self._pairs: dict[tuple[int, int, int, torch.dtype], tuple[_Buffers, _Buffers]] = {}
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
        launched.append(self._steps.launch(graph))
        current.after(launches.mark())
        return here.out[:n].to(x.dtype, copy=True)

    def _buffers(self, size: int, hidden: int, k: int, dtype: torch.dtype) -> tuple[_Buffers, _Buffers]:
        """On the device, and on the host."""
        key = size, hidden, k, dtype
        if key not in self._pairs:
            kinds = (
                ((size, hidden), dtype),
                ((size, k), torch.int32),
                ((size, k), torch.float32),
                ((size, hidden), dtype),
            )
            on = self._device.torch_device
            here = _Buffers(*(torch.zeros(*shape, dtype=kind, device=on) for shape, kind in kinds))
            self._pairs[key] = here, _Buffers(*(self._device.host_tensor(shape, kind) for shape, kind in kinds))
        return self._pairs[key]

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
                stream.ring(self._steps.finished_flag)

            arrays = as_numpy(there.x), there.ids.numpy(), there.weights.numpy(), as_numpy(there.out)
            work = LayerWork(layer.kernel, *arrays, self._scratch, self._threads)
            self._steps.drain()  # nothing waits while there is a capture
            graph = self._device.capture(build)
            duty = Duty("experts", number, work, answer, bell)
            self._graphs[key] = self._steps.bind(graph, {self._worker: [duty]})
        return self._graphs[key]

    def finish(self, launched: Sequence[int]) -> None:
        """Return when steps are done; raises the `StepError` of one that failed or was cancelled with another."""
        for number in launched:
            self._steps.wait(number)

    def close(self) -> None:
        """End what is on its way."""
        self._steps.close()
