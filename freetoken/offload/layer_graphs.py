"""Few tokens of a layer that is called by itself, as one small graph from the third call of a size on.

A look-up, a fetch, two products and a sum are microseconds on a device, and launching each takes the host about as long
as they take together: where whole steps are not replayed, the host is what a token waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from freetoken import settings
from freetoken.device.base import Device, Graph, Stream
from freetoken.device.immediate import Immediate
from freetoken.errors import DeviceError

logger = logging.getLogger(__name__)

_CALLS = 2
"""Of a size, before it is captured: short prompts have sizes that come once."""

Put = Callable[[Stream, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Puts a layer's experts for x (B, H), ids (B, K), weights (B, K) on a stream; their sum goes to the last, (B, H)."""


@dataclass(frozen=True)
class _Call:
    """A captured call, which reads and writes these tensors."""

    graph: Graph
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: torch.Tensor


class LayerGraphs:
    """The calls of a device's layers that were captured. For one thread at a time.

    There are at most as many for a layer as sizes that few tokens can have, 8. A capture that fails is the last one.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: dict[tuple[object, ...], int] = {}
        self._calls: dict[tuple[object, ...], _Call] = {}
        self._captures = settings.GRAPH.read() != "off"

    def run(
        self, put: Put, number: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """(B, H), the caller's own; None where nothing was done: in first calls, and in a capture of the caller's."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        key = number, ids.shape, x.dtype, ids.dtype, weights.dtype
        call = self._calls.get(key)
        if call is not None:
            with torch.no_grad():  # or the tensors given would remember who gave them
                for mine, given in zip(call.given, (x, ids, weights), strict=True):
                    mine.copy_(given)
            self._device.replay(call.graph)
            return call.out.clone()
        if not self._captures:
            return None
        self._seen[key] = self._seen.get(key, 0) + 1
        may_block = not self._device.is_idle()  # behind a graph that waits for the host
        if may_block or self._seen[key] <= _CALLS:
            return None
        out = torch.empty_like(x)
        put(Immediate(), number, x, ids, weights, out)  # compiles what the capture needs
        self._capture(key, put, number, x, ids, weights)
        return out

    def _capture(
        self, key: tuple[object, ...], put: Put, number: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        share = next((call.graph for call in self._calls.values()), None)
        try:
            with torch.inference_mode(False), torch.no_grad():  # what is made here is written to by anyone
                given = torch.zeros_like(x), torch.full_like(ids, -1), torch.zeros_like(weights)
                out = torch.zeros_like(x)
                graph = self._device.capture(lambda stream: put(stream, number, *given, out), share)
        except (DeviceError, RuntimeError) as error:
            if isinstance(error, DeviceError) and error.facts["lost"]:
                raise
            self._captures = False
            what = f"layer {number} with {len(x)} tokens"
            logger.info("%s was not captured, and no other will be: their kernels are launched each: %s", what, error)
            return
        self._calls[key] = _Call(graph, given, out)
