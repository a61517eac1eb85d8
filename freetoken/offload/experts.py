"""The experts of a model on a device: which way a layer's call goes.

    hybrid     as offload, but in a graph the host computes some of what is missing while the rest is fetched
    offload    few tokens: look-up, fetches into slots, products of records with vectors
               many tokens: whole layers streamed through two buffers, matrix products
               not pinned, or not yet: as cpu
    resident   every expert has its slot; the host's copy is dropped
    cpu        the host computes, through the step protocol

A *step* here is a model's forward pass, from its first layer to its last: layer by layer as they are called, or all of
it as a graph that `capture` gives and `launch` replays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from freetoken import settings
from freetoken.device.base import Device, Graph, Lane, Stream, Trip, is_in_duty
from freetoken.device.histogram import BUCKETS, Times
from freetoken.device.immediate import Immediate
from freetoken.duties.steps import StepGraph
from freetoken.errors import CapacityError, ClosedError, DeviceError, FreeTokenError, UnsupportedError
from freetoken.executor import BoundLayer, forked_error
from freetoken.offload.calibrate import Calibration, calibrate
from freetoken.offload.capture import StepCapture, result_for, wait_for
from freetoken.offload.host import HandOff, HostExperts
from freetoken.offload.layer import DeviceLayer
from freetoken.offload.pinning import Pinned, Pinner
from freetoken.offload.records import as_tensor
from freetoken.offload.room import Room
from freetoken.offload.slots import LayerExperts
from freetoken.offload.split import fetch_table, parse_max_fetch
from freetoken.offload.usage import Usage

logger = logging.getLogger(__name__)

_PROMPT_TOKENS = 1024
"""From here on a step waits until banks are pinned, which is 0.09 s a GiB: 16 cores take as long to compute that many
tokens (gpt-oss-120b cut to 12 layers, mxfp4, 19 GiB: 581 tokens/s)."""
_PROBE_BYTES = 64 << 20
"""Of the copy by which the link's rate is found."""


class _Step(threading.local):
    """A thread's forward pass. token: by which the pinner knows it. launched: what the host computes for it.

    capture: what its layers are put into instead of being computed.
    """

    def __init__(self) -> None:
        self.token: object | None = None
        self.launched: list[int] = []
        self.capture: StepCapture | None = None


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
        self._shapes, self._dtype = tuple(shapes), dtype
        self._asked_fetch, self._max_fetch = room.max_fetch, parse_max_fetch(room.max_fetch)
        self.calibration: Calibration | None = None
        self._in_graphs = False
        self._waited = torch.zeros(3, BUCKETS, dtype=torch.int64, device=device.torch_device)
        self._counting = torch.ones(1, dtype=torch.int32, device=device.torch_device)
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
                self._slotted = SlottedExperts(device, layers, shapes, room, dtype, self._counting)
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"{device.name} refused memory for slots and buffers: ask for a smaller cache, or raise "
                    f"{settings.GPU_RESERVE.name}",
                    needed=sum(n * shape.slot_bytes for n, shape in zip(room.slots, shapes, strict=True)),
                    available=device.free_bytes(),
                    where=device.name,
                ) from error
        if self._max_fetch is not None:
            self._slotted.pool.split_misses(fetch_table(self._max_fetch))
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
        if self._step.capture is not None:
            return self._put(self._step.capture, layer, x, ids, weights)
        if layer.number == 0:
            self._leave()  # a step that ended between two layers
            if len(x) >= _PROMPT_TOKENS:
                self.wait_until_pinned()  # without the lock: another thread's step may have to end first
        with self._lock, self.device.active():
            self._check_open()
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
        if self._slotted is None or not self._reaches(number):
            assert layer.bound is not None, "only resident layers are not bound, and they have slots"
            return self.host.run(number, layer.bound, self._step.launched, x, ids, weights)
        rest = (n for n in range(number, len(self.layers)) if self._pinner is None or self._pinner.is_pinned(n))
        return self._slotted.run(number, x, ids, weights, rest)

    def _reaches(self, number: int) -> bool:
        """Whether the device computes a layer."""
        return self._slotted is not None and (self._pinner is None or self._pinner.is_pinned(number))

    @property
    def host(self) -> HostExperts:
        """What the host does for the device, made when it is first wanted."""
        if self._host is None:  # else without the lock, which a launch may hold: what is there can be cancelled
            with self._lock:
                self._check_open()  # threads that are begun now would never end
                self._host = self._host or HostExperts(self.device, self._executor)
        return self._host

    # -- whole steps

    def capture(
        self,
        forward: Callable[[], object],
        valid: torch.Tensor | None = None,
        share: StepGraph | None = None,
        *,
        tailed: bool = False,
    ) -> StepGraph:
        """A forward pass as a graph, for `launch`. It is run once before it is captured, so its state moves on.

        forward: computes with fixed tensors on the device, from the first layer to the last. valid: (B,) bool on the
        device, tokens that count: the others have no experts. share: a step that never runs at the same time, whose
        memory is used again. tailed: it is always launched with a tail, which rings `Steps.finished_flag` in the end.
        The graph lasts as long as what is captured stays where it is; the split of misses, what lies in slots and
        whether look-ups are counted may change.

        Waits until banks are pinned; the first one measures how misses are best split. Raises `torch.OutOfMemoryError`,
        and what the forward pass raises.
        """
        self.wait_until_pinned()
        self._begin_graphs()
        with self.not_counting():
            return self.capture_with_trips(forward, valid, share, tailed)[0]

    def capture_with_trips(
        self,
        forward: Callable[[], object],
        valid: torch.Tensor | None = None,
        share: StepGraph | None = None,
        tailed: bool = False,
    ) -> tuple[StepGraph, list[HandOff]]:
        """As `capture`, without its waits, and what the graph leaves to the host."""
        plain = torch.inference_mode(False), torch.no_grad()  # what is made here is written to by anyone
        with self._lock, self.device.active(), plain[0], plain[1]:
            self._check_open()
            if self._step.capture is not None:
                raise FreeTokenError("a capture inside a capture")
            self.host.steps.drain()  # nothing waits while there is a capture
            self._stop_streaming()
            capture = StepCapture(Immediate(), valid)
            self._order(self.device.current())
            try:
                self._step.capture = capture
                forward()
                self.device.synchronize()
                capture.is_warm = True

                def build(stream: Stream) -> None:
                    capture.stream = stream
                    stream.trace(forward)
                    if not tailed:
                        stream.ring(self.host.steps.finished_flag)

                graph = self.device.capture(build, None if share is None else share.graph)
            except BaseException:
                self.forget()  # what was looked up may not have been fetched
                raise
            finally:
                self._step.capture = None
            duties = {self.host.worker: capture.duties} if capture.duties else {}
            return self.host.steps.bind(graph, duties), list(capture.hand_offs.values())

    def _begin_graphs(self) -> None:
        """Once: measure how misses are best split, where nobody has said it, and fill slots."""
        reached = list(filter(self._reaches, range(len(self.layers))))
        with self._lock:
            if self._slotted is None or self._pinner is None or not reached or self._in_graphs:
                return
            if self.strategy == "hybrid" and self._max_fetch is None:
                alike = [n for n in reached if self._shapes[n] == self._shapes[reached[0]]]
                self.calibration = calibrate(self, alike, self._shapes[alike[0]].top_k, self._dtype)
            with self.device.active():
                self._order(self.device.current())
                self._stop_streaming()
                self._slotted.fill(reached)
            self._in_graphs = True

    def split_misses(self, fetches: Sequence[int]) -> None:
        """Of m missing experts of a layer, graphs fetch fetches[m] from now on; (`MOST_ROUTES` + 1) numbers."""
        with self._lock:
            self._check_open()
            if self._slotted is not None:
                self._slotted.pool.split_misses(fetches)

    def forget(self) -> None:
        """No expert is in a slot any more."""
        with self._lock:
            if self._slotted is not None:
                self._slotted.forget()

    def count(self, on: bool) -> None:
        """Whether look-ups and hand-offs are counted from now on; nothing is captured again."""
        with self._lock:
            self._counting.fill_(int(on))

    @contextlib.contextmanager
    def not_counting(self) -> Iterator[None]:
        """Inside, nothing is counted."""
        before = self._counting.clone()
        self.count(False)
        try:
            yield
        finally:
            self._counting.copy_(before)

    def _put(
        self, capture: StepCapture, layer: DeviceLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Put a layer into a graph; its result is there when the graph gets so far."""
        number, bound, reaches = layer.number, layer.bound, self._reaches(layer.number)
        ids, weights = capture.count(ids), capture.as_type(weights, torch.float32)
        x = capture.as_type(x, x.dtype)
        out = result_for(x)
        leaves = self.strategy == "hybrid" or not reaches
        wide = capture.as_type(x, torch.float32 if leaves and x.dtype == torch.float16 else x.dtype)
        total = out if wide is x else result_for(wide)  # the host has no fp16

        def leave(part: slice, ids: torch.Tensor) -> Trip:
            def make() -> HandOff:
                assert bound is not None, "only resident layers are not bound, and nothing is left of them"
                return self.host.hand_off(number, bound, len(ids), ids.shape[1], wide.dtype)

            found = capture.hand_off(number, part.start, make)
            return found.trip(wide[part], ids, weights[part], self._waited, self._counting)

        if reaches:
            assert self._slotted is not None
            self._slotted.put(capture.stream, number, x, ids, weights, total, leave if leaves else None)
        else:
            trip = leave(slice(0, len(ids)), capture.as_type(ids, torch.int32))
            capture.stream.ask(trip)
            capture.stream.kernel(total.zero_)
            wait_for(capture.stream, trip, total)
        if total is not out:
            capture.stream.kernel(lambda: out.copy_(total))
        return out

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Around launches and the waits for them: nothing is pinned meanwhile."""
        token = None if self._pinner is None else self._pinner.begin()
        try:
            yield
        finally:
            if self._pinner is not None:
                self._pinner.end(token)

    def launch(self, step: StepGraph, tail: Graph | None = None) -> int:
        """Launch a step that `capture` gave, and return its number, for `wait`; inside `stepping`.

        It comes after all that this thread's current lane has, and what this thread computes afterwards comes after it.
        tail and errors: see `Steps.launch`.
        """
        with self._lock, self.device.active():
            self._check_open()
            self._stop_streaming()  # experts may leave the slots that it knows
            current, launches = self.device.current(), self.device.launches()
            self._order(launches)
            launches.after(current.mark())
            return self.host.steps.launch(step, tail)

    def wait(self, number: int) -> None:
        """Return when a step has ended; raises the `StepError` of one that failed or was cancelled."""
        self.host.steps.wait(number)

    def _go_on(self, number: int) -> None:
        """This thread's step begins with its first layer, or goes on."""
        self._order(self.device.current())
        if number == 0:
            self._stop_streaming()  # what an earlier step has left
        if self._pinner is None:
            return
        if self._step.token is None:
            self._step.token = self._pinner.begin()
        else:
            self._pinner.heard_of(self._step.token)

    def _order(self, lane: Lane) -> None:
        """What comes next is on this lane, after what was put on another."""
        if self._lane is not None and lane != self._lane:
            lane.after(self._lane.mark())
        self._lane = lane

    def _stop_streaming(self) -> None:
        if self._slotted is not None and self._slotted.streamer is not None:
            self._slotted.streamer.stop()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this model's experts were closed: load it again", what="DeviceExperts")

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
        self._stop_streaming()

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
            fetched, computed = (0.0, 0.0) if pool is None else pool.missed_per_token()
            waited, hand_off, work = (Times.of(counts) for counts in self._waited.tolist())
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
                fetched_per_token=fetched,
                computed_per_token=computed,
                split="" if self.strategy != "hybrid" else str(self.calibration or f"max_fetch={self._asked_fetch}"),
                waits=self.device.waits.kind if waited.count else "",
                waited=waited,
                hand_off=hand_off,
                host_work=work,
            )

    def reset_statistics(self) -> None:
        """Count from 0."""
        with self._lock:
            self._waited.zero_()
            if self._slotted is not None:
                self._slotted.pool.reset_statistics()

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
