"""The experts of a model on a device: which way a layer's call goes.

    offload    few tokens: look-up, fetches into slots, products of records with vectors
               many tokens: whole layers streamed through two buffers, matrix products
               not pinned, or not yet: as cpu
    resident   every expert has its slot; the host's copy is dropped
    cpu        the host computes, through the step protocol

A *step* here is a model's forward pass, from its first layer to its last.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from freetoken import settings
from freetoken.device.base import Device, Lane, is_in_duty
from freetoken.errors import CapacityError, ClosedError, DeviceError, UnsupportedError
from freetoken.executor import BoundLayer, forked_error
from freetoken.offload.host import HostExperts
from freetoken.offload.layer import DeviceLayer
from freetoken.offload.pinning import Pinned, Pinner
from freetoken.offload.records import as_tensor
from freetoken.offload.room import Room
from freetoken.offload.slots import LayerExperts, Statistics

logger = logging.getLogger(__name__)

_PROMPT_TOKENS = 1024
"""From here on a step waits until banks are pinned, which is 0.09 s a GiB: 16 cores take as long to compute that many
tokens (gpt-oss-120b cut to 12 layers, mxfp4, 19 GiB: 581 tokens/s)."""
_PROBE_BYTES = 64 << 20
"""Of the copy by which the link's rate is found."""


@dataclass(frozen=True)
class Usage:
    """What of a model's experts is where on a device, and what was moved; bytes.

    statistics: of look-ups, None without slots. fetched_bytes_per_token: into slots. streamed_bytes: copied for many
    tokens at once. link_bps: what a plain copy from pinned memory reached when the first layer was pinned, bytes a
    second; 0 where none was made. host_threads: that compute layers, 0 where none was computed there.
    """

    device: str
    strategy: str
    slots: int
    slot_bytes: int
    buffer_bytes: int
    pinned: Pinned | None
    statistics: Statistics | None
    fetched_bytes_per_token: float
    streamed_bytes: int
    link_bps: float
    kernels: tuple[str, ...]
    host_threads: int

    @property
    def hit_rate(self) -> float | None:
        """Share of wanted experts that were in slots; None before any was looked up."""
        return None if self.statistics is None or not self.statistics.routed else self.statistics.hit_rate


class _Step(threading.local):
    """A thread's forward pass. token: by which the pinner knows it. launched: what the host computes for it."""

    def __init__(self) -> None:
        self.token: object | None = None
        self.launched: list[int] = []


class DeviceExperts:
    """All layers of a model on a device.

    layers: bound to their banks, in the order in which a forward pass calls them. shapes: theirs. room: what
    `choose_room` gave for them. dtype: of hidden states. owns_device: closed with them. Calls from several threads
    queue. Raises `CapacityError` when the device refuses the memory, `UnsupportedError` where no kernel can be used.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[BoundLayer],
        shapes: Sequence[LayerExperts],
        room: Room,
        dtype: torch.dtype,
        *,
        owns_device: bool = False,
    ) -> None:
        self.device = device
        self._owns_device = owns_device
        self.strategy = room.strategy
        self._executor = layers[0].executor
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._lane: Lane | None = None
        self._step = _Step()
        self._host: HostExperts | None = None
        self._pinner: Pinner | None = None
        self._link_bps = 0.0
        resident = room.strategy == "resident"
        self.layers = tuple(
            DeviceLayer(self, i, layer.layout, layer.n_experts, layer.expert_bytes, None if resident else layer)
            for i, layer in enumerate(layers)
        )
        self._slotted = None
        if room.strategy == "cpu":
            return
        try:
            from freetoken.offload.slotted import SlottedExperts
        except ImportError as error:
            raise UnsupportedError(
                f"strategy={room.strategy!r} needs triton ({error}): use a torch for CUDA, which brings it, or "
                "strategy='cpu'",
                feature="triton",
            ) from error
        with device.active():
            try:
                self._slotted = SlottedExperts(device, layers, shapes, room, dtype)
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"{device.name} refused memory for slots and buffers: ask for a smaller cache, or raise "
                    f"{settings.GPU_RESERVE.name}",
                    needed=sum(n * shape.slot_bytes for n, shape in zip(room.slots, shapes, strict=True)),
                    available=device.free_bytes(),
                    where=device.name,
                ) from error
        if not resident:
            self._pinner = Pinner(device, [layer.bank for layer in layers], on_pinned=self._try_link)
            self._pinner.start()

    # -- layers

    def run(self, layer: DeviceLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `DeviceLayer.run`."""
        if os.getpid() != self._pid:
            raise forked_error()
        if x.device.type == "meta":
            raise UnsupportedError("experts cannot run on the meta device: there is nothing to compute", feature="meta")
        on = self.device.torch_device
        if x.device.type != on.type:  # right, at the price of two copies
            return self.run(layer, x.to(on), ids.to(on), weights.to(on)).to(x.device)
        if not len(x):
            return torch.empty_like(x)
        if layer.number == 0:
            self._leave()  # a step that ended between two layers
            if len(x) >= _PROMPT_TOKENS:
                self.wait_until_pinned()  # without the lock: another thread's step may have to end first
        with self._lock, self.device.active():
            if self._closed:
                raise ClosedError("this model's experts were closed: load it again", what="DeviceExperts")
            self._go_on(layer.number)
            try:
                out = self._compute(layer, x.contiguous(), ids.contiguous(), weights.contiguous())
                if layer.number == len(self.layers) - 1:
                    self._finish()
            except BaseException:
                self._abandon()
                raise
            return out

    def _compute(self, layer: DeviceLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        number = layer.number
        if self._slotted is None or (self._pinner is not None and not self._pinner.is_pinned(number)):
            assert layer.bound is not None, "only resident layers are not bound, and they have slots"
            if self._host is None:
                self._host = HostExperts(self.device, self._executor)
            return self._host.run(number, layer.bound, self._step.launched, x, ids, weights)
        rest = [n for n in range(number, len(self.layers)) if self._pinner is None or self._pinner.is_pinned(n)]
        return self._slotted.run(number, x, ids, weights, rest)

    def _go_on(self, number: int) -> None:
        """This thread's step begins with its first layer, or goes on."""
        lane = self.device.current()
        if self._lane is not None and lane != self._lane:
            lane.after(self._lane.mark())
        self._lane = lane
        if number == 0 and self._slotted is not None and self._slotted.streamer is not None:
            self._slotted.streamer.stop()  # what an earlier step has left
        if self._pinner is None:
            return
        if self._step.token is None:
            self._step.token = self._pinner.begin()
        else:
            self._pinner.heard_of(self._step.token)

    def _finish(self) -> None:
        """This thread's step is over; raises what failed of it on the host."""
        if self._host is not None:
            self._host.finish(self._step.launched)
        self._leave()

    def _leave(self) -> None:
        if self._pinner is not None and self._step.token is not None:
            self._pinner.end(self._step.token)
        self._step.token, self._step.launched = None, []

    def _abandon(self) -> None:
        """This thread's step ends before its last layer."""
        self._leave()
        if self._slotted is not None and self._slotted.streamer is not None:
            self._slotted.streamer.stop()

    def _try_link(self, number: int) -> None:
        """Measure a plain copy from the first layer that is pinned; nothing else is on its way."""
        if self._link_bps:
            return
        try:
            self._link_bps = self._copy_rate(number)
        except Exception as error:  # noqa: BLE001 - without a rate everything works
            logger.info("the link's rate was not measured: %s", error)

    def _copy_rate(self, number: int) -> float:
        bound = self.layers[number].bound
        assert bound is not None
        records = as_tensor(bound.bank.shards[0].records).reshape(-1)[:_PROBE_BYTES]
        target = torch.empty(records.shape, dtype=records.dtype, device=self.device.torch_device)
        lane, clock = self.device.lane(), self.device.clock
        for _ in range(2):  # the first one may be the first copy of the process
            start = clock.now()
            lane.copy(target, records)
            self.device.synchronize()
        return records.nbytes / max(clock.now() - start, 1e-9)

    # -- all of them

    def wait_until_pinned(self) -> Pinned | None:
        """Return when each layer's bank was registered with the device or refused; not inside a step."""
        return None if self._pinner is None else self._pinner.wait()

    def usage(self) -> Usage:
        """What is where and what was moved; waits for the device."""
        with self._lock:
            slotted = None if self._closed else self._slotted
            pool = None if slotted is None else slotted.pool
            streamer = None if slotted is None else slotted.streamer
            return Usage(
                device=self.device.name,
                strategy=self.strategy,
                slots=0 if pool is None else sum(pool.slots),
                slot_bytes=0 if pool is None else pool.nbytes,
                buffer_bytes=0 if streamer is None else streamer.nbytes,
                pinned=None if self._pinner is None else self._pinner.status,
                statistics=None if pool is None else pool.statistics(),
                fetched_bytes_per_token=0.0 if pool is None else pool.fetched_bytes_per_token(),
                streamed_bytes=0 if streamer is None else streamer.copied_bytes,
                link_bps=self._link_bps,
                kernels=() if slotted is None else slotted.kernels,
                host_threads=0 if self._host is None else self._host.threads,
            )

    def close(self) -> None:
        """End what is on its way, give back pinned memory and the device's. May be called again, and by anyone."""
        if os.getpid() != self._pid:  # a lock may be held by a thread that did not come along
            return
        if is_in_duty():  # by the collector: a duty's thread may not call the device
            threading.Thread(target=self.close, name="freetoken-close").start()
            return
        with self._lock, contextlib.ExitStack() as steps:
            if self._closed:
                return
            self._closed = True
            self._leave()
            # last in, first out; all of them, whatever one of them raises
            if self._owns_device:
                steps.callback(self.device.close)
            if self._pinner is not None:
                steps.callback(self._pinner.close)
            steps.callback(self._settle)
            if self._host is not None:
                steps.callback(self._host.close)
            self._slotted = None

    def _settle(self) -> None:
        """Nothing reads banks after this."""
        try:
            self.device.synchronize()
        except DeviceError as error:
            logger.warning("while closing: %s", error)
