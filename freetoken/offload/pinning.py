"""Host banks registered with a device, layer by layer, by a thread of its own, and never while a step is in flight.

A device reaches registered memory itself, for fetches and for copies that do not wait. Registering needs filled pages,
takes about a tenth of a second for each GiB, and may be refused: by a limit, by a system that has none (WSL has a small
one), by the driver. That is no error: such a layer is computed on the host.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from freetoken import settings
from freetoken.banks import LayerBank
from freetoken.device.base import Device
from freetoken.errors import ConfigError, DeviceError
from freetoken.topology import format_cpu_list
from freetoken.units import format_bytes

logger = logging.getLogger(__name__)

WAITING, PINNED, REFUSED, RELEASED = "waiting", "pinned", "refused", "released"
"""States of a layer's bank."""
LEFT_S = 10.0
"""Seconds after which a step counts as left if nothing was heard of it: an error between two layers is not seen."""


@dataclass(frozen=True)
class Pinned:
    """What of the banks a device reaches. states, sizes: of each layer, in bytes. why: the first refusal's words."""

    states: tuple[str, ...]
    sizes: tuple[int, ...]
    why: str = ""

    def layers(self, state: str = PINNED) -> tuple[int, ...]:
        """The layers in a state."""
        return tuple(layer for layer, found in enumerate(self.states) if found == state)

    def nbytes(self, state: str = PINNED) -> int:
        """The bytes of their banks."""
        return sum(self.sizes[layer] for layer in self.layers(state))

    def __str__(self) -> str:
        parts = [
            f"layers {format_cpu_list(self.layers(state))} {state}, {format_bytes(self.nbytes(state))}"
            for state in (PINNED, WAITING, REFUSED, RELEASED)
            if self.layers(state)
        ]
        return "; ".join(parts) + (f" ({self.why})" if self.why else "")


class Pinner:
    """Registers banks with a device.

    on_pinned: called by the pinning thread with each layer's number, before `is_pinned` says so. limit_bytes: never
    more than this is registered; None for FREETOKEN_PIN_LIMIT. The order is that of the layers; a bank that does not
    fit any more is passed over, smaller ones after it may fit.
    """

    def __init__(
        self,
        device: Device,
        banks: Sequence[LayerBank],
        limit_bytes: int | None = None,
        on_pinned: Callable[[int], object] = lambda layer: None,
    ) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise ConfigError(
                f"limit_bytes is {limit_bytes}, expected 0 or more",
                name="limit_bytes",
                value=limit_bytes,
                expected="0 or more",
            )
        self._device = device
        self._banks = tuple(banks)
        self._limit = settings.PIN_LIMIT.read() << 20 if limit_bytes is None else limit_bytes
        self._on_pinned = on_pinned
        self._states = [WAITING] * len(self._banks)
        self._why = ""
        self._registered: list[contextlib.ExitStack | None] = [None] * len(self._banks)
        self._turn = threading.Condition()
        self._steps: dict[object, float] = {}  # in flight, and when each was last heard of
        self._wanted = False  # a registration waits for a moment without a step
        self._busy = False  # it goes on
        self._stopped = False
        self._thread: threading.Thread | None = None

    # -- what others ask

    def is_pinned(self, layer: int) -> bool:
        """Whether the device reaches all of a layer's bank."""
        return self._states[layer] is PINNED

    @property
    def status(self) -> Pinned:
        """Of all layers, now."""
        return Pinned(tuple(self._states), tuple(bank.nbytes for bank in self._banks), self._why)

    # -- the thread

    def start(self) -> None:
        """Begin in a thread of its own, which does not keep the process alive."""
        self._thread = threading.Thread(target=self.run, name="freetoken-pinning", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Register all that can be: the body of the thread."""
        total = 0
        for layer, bank in enumerate(self._banks):
            if total + bank.nbytes > self._limit:
                self._refuse(layer, f"FREETOKEN_PIN_LIMIT leaves {format_bytes(max(0, self._limit - total))}")
                continue
            with self._between_steps() as go:
                if not go:
                    return
                self._register(layer, bank)
            total += bank.nbytes if self._states[layer] is PINNED else 0
        status = self.status
        if status.layers(REFUSED):
            logger.warning("%s: layers that are refused are computed on the CPU", status)
        else:
            logger.info("%s", status)

    def begin(self) -> object:
        """A step begins: while one is in flight nothing is registered. Waits for a registration that goes on."""
        step = object()
        with self._turn:
            self._turn.wait_for(lambda: not self._busy and not (self._wanted and not self._steps))
            self._steps[step] = time.monotonic()
        return step

    def heard_of(self, step: object) -> None:
        """A step goes on."""
        with self._turn:
            self._turn.wait_for(lambda: not self._busy)
            self._steps[step] = time.monotonic()

    def end(self, step: object) -> None:
        """A step is over."""
        with self._turn:
            self._steps.pop(step, None)
            self._turn.notify_all()

    def _no_step(self) -> bool:
        """Whether none is in flight; one that was left between two layers is not for ever."""
        late = time.monotonic() - LEFT_S
        for step in [step for step, heard in self._steps.items() if heard < late]:
            del self._steps[step]
        return not self._steps

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[bool]:
        """A moment without a step, which steps wait for; False when it is over with pinning.

        A registration that waits has its turn before the next step begins: steps may follow each other closely.
        """
        with self._turn:
            self._wanted = True
            while not (self._stopped or self._no_step()):
                self._turn.wait(LEFT_S / 4)
            self._wanted, self._busy = False, not self._stopped
            go = self._busy
            self._turn.notify_all()
        try:
            yield go
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def _register(self, layer: int, bank: LayerBank) -> None:
        with contextlib.ExitStack() as stack:
            try:
                for shard in bank.shards:
                    stack.enter_context(self._device.register(shard.records.reshape(-1)))
                self._on_pinned(layer)
            except Exception as error:  # noqa: BLE001 - whatever it is, the layer can be computed on the host
                self._refuse(layer, str(error) or type(error).__name__)
                return
            with self._turn:
                if not self._stopped:
                    self._registered[layer] = stack.pop_all()
                    self._states[layer] = PINNED

    def _refuse(self, layer: int, why: str) -> None:
        self._states[layer] = REFUSED
        self._why = self._why or why

    def wait(self) -> Pinned:
        """Return when all layers have been tried; not inside a step."""
        if self._thread is not None:
            self._thread.join()
        return self.status

    def release(self, layer: int) -> None:
        """Give a layer back: its bank may go."""
        stack, self._registered[layer] = self._registered[layer], None
        self._states[layer] = RELEASED
        if stack is not None:
            stack.close()

    def close(self) -> None:
        """End pinning and give all back. Nothing may be in flight that reads banks. May be called again."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for layer in range(len(self._banks)):
            try:
                self.release(layer)
            except DeviceError as error:
                logger.warning("layer %d was not given back: %s", layer, error)
