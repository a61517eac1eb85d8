"""A CUDA device: torch for tensors, streams and graphs, the driver for memory that a graph waits for.

A graph waits by memory operations of its stream where a probe finds that they do, else by host functions. Nothing of
CUDA is imported before a `CudaDevice` is made.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from freetoken.device._host_wait import Stop
from freetoken.device.base import (
    FLAG_WORDS,
    Actor,
    Flag,
    Graph,
    Stream,
    SystemClock,
    Waits,
    make_flags,
    refuse_in_duty,
    start_thread,
)
from freetoken.device.cuda_streams import Capture, CudaGraph, CudaLane
from freetoken.device.driver import KERNELS, Driver, Kernel
from freetoken.device.handoff import Handoff
from freetoken.device.probe import REPLAYS, Host
from freetoken.errors import ConfigError, DeviceError, UnsupportedError

logger = logging.getLogger(__name__)

WAITS = ("memory", "host function")
"""The kinds of `Waits`, in the order in which they are tried."""
EARLY = 90
"""The architecture from which on a kernel can start before the one before it has ended."""
_CLOSE = 5.0
"""Seconds that closing waits for what is on its way."""


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs that are garbage must not be freed by a thread that captures: that ends the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaDevice:
    """See `Device` for what the methods are.

    index: torch's number of the device. waits: one of `WAITS`, which are tried in turn otherwise. probe_s: seconds
    after which a wait of the probe is taken not to wake. Graphs run on `stream`, one after the other: what else touches
    their tensors is put there too.

    Raises `UnsupportedError` where a package, the driver or the device is missing, `DeviceError` where graphs cannot
    wait for the host.
    """

    def __init__(self, index: int = 0, *, waits: str | None = None, probe_s: float = 2.0) -> None:
        if waits is not None and waits not in WAITS:
            expected = " or ".join(map(repr, WAITS))
            raise ConfigError(
                f"waits={waits!r} is not a way to wait, expected {expected}",
                name="waits",
                value=waits,
                expected=expected,
            )
        refuse_in_duty("CudaDevice")
        self.driver = Driver()
        found = torch.cuda.device_count()
        if not 0 <= index < found:
            raise UnsupportedError(
                f"there is no CUDA device {index}: torch {torch.__version__} sees {found} of them",
                feature=f"cuda:{index}",
                available=str(found),
            )
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self.clock = SystemClock()
        self.stop = Stop()
        self._lost = ""
        self._closed = False
        self._launched: set[CudaGraph] = set()  # since the device was last idle: they outlive what they run
        self._streams: list[torch.cuda.Stream] = []
        self._modules: dict[str, tuple[Any, dict[str, Kernel]]] = {}
        self._context = self.driver.call("cuDevicePrimaryCtxRetain", self.driver.call("cuDeviceGet", index))
        major, minor = torch.cuda.get_device_capability(index)
        self.architecture = f"sm_{major}{minor}"
        properties = torch.cuda.get_device_properties(index)
        self.multiprocessors = properties.multi_processor_count
        self.shared_memory = properties.shared_memory_per_multiprocessor  # bytes
        with self.entered("CudaDevice"):
            self.stream = self.stream_of(0)
            self.ring_kernel, self.set_kernel = self.compile(KERNELS, "ring", "set")
            self.handoff = Handoff(self)
            self.host_function = int(self.driver.call("cuGetProcAddress", b"cuLaunchHostFunc", 12000, 0)[0])
        self.waits = self._choose_waits(waits, probe_s)
        logger.info("%s waits for the host by %s: %s", self.name, self.waits.kind, self.waits.why)

    # -- Device

    def flags(self, n: int) -> Sequence[Flag]:
        """See `Device`."""
        return make_flags(n, self.host_tensor((n * FLAG_WORDS * 4,), torch.uint8).numpy())

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        with self.entered("host_tensor"):
            return torch.zeros(*shape, dtype=dtype, device="cpu", pin_memory=True)

    @contextlib.contextmanager
    def register(self, memory: NDArray[Any]) -> Iterator[None]:
        """See `Device`. Memory that cannot be written is registered for reading."""
        if not memory.flags.c_contiguous or not memory.nbytes:
            raise ValueError(f"memory of {memory.nbytes} bytes and strides {memory.strides}, expected one run of bytes")
        api = self.driver.api
        flags = api.CU_MEMHOSTREGISTER_PORTABLE | api.CU_MEMHOSTREGISTER_DEVICEMAP
        if not memory.flags.writeable:
            flags |= api.CU_MEMHOSTREGISTER_READ_ONLY
        with self.entered("register"):
            try:
                self.driver.call("cuMemHostRegister", memory.ctypes.data, memory.nbytes, flags)
            except DeviceError as error:
                raise DeviceError(
                    f"{memory.nbytes} bytes cannot be registered: {error}",
                    operation="register",
                    lost=error.facts["lost"],
                ) from error
        try:
            yield
        finally:
            if not self._lost:
                with self.entered("unregister", closing=True):
                    self.driver.call("cuMemHostUnregister", memory.ctypes.data)

    def capture(self, build: Callable[[Stream], None], share: Graph | None = None) -> CudaGraph:
        """See `Device`. Streams that `build` forks are joined in the end."""
        assert share is None or isinstance(share, CudaGraph)
        pool = None if share is None else share.graph.pool()
        self.is_idle()  # forgets graphs
        with self.entered("capture"), _no_collection():
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            capture = Capture(self)
            stream = capture.next_stream()
            numbers = torch.cuda.get_rng_state(self.torch_device)
            with torch.cuda.stream(stream.stream):
                graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may do as they like
                try:
                    build(stream)
                    if capture.open:
                        raise ValueError(f"{len(capture.open)} forked streams were not joined")
                except BaseException:
                    # what was raised before says why these may fail
                    with contextlib.suppress(torch.AcceleratorError):
                        for other in reversed(list(capture.open)):
                            stream.join(other)
                    with contextlib.suppress(torch.AcceleratorError), warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # that it is empty
                        self._end_capture(graph, numbers)
                    raise
                self._end_capture(graph, numbers)
            graph.instantiate()
            raw = self.driver.api.CUgraph(graph.raw_cuda_graph())
            return CudaGraph(graph, self.driver.call("cuGraphGetNodes", raw)[1], capture)

    def _end_capture(self, graph: torch.cuda.CUDAGraph, numbers: torch.Tensor) -> None:
        """numbers: torch's random state before. Where a capture cannot be ended that state believes it goes on."""
        try:
            graph.capture_end()
        except torch.AcceleratorError:
            fresh = torch.Generator(self.torch_device)
            fresh.set_state(numbers)
            torch.cuda.default_generators[self.torch_device.index].graphsafe_set_state(fresh.graphsafe_get_state())
            raise

    def launch(self, graph: Graph) -> None:
        """See `Device`. Others can run while it blocks."""
        assert isinstance(graph, CudaGraph)
        with self.entered("launch"), torch.cuda.stream(self.stream):
            self._launched.add(graph)
            graph.graph.replay()

    def replay(self, graph: Graph) -> None:
        """See `Device`. What it keeps is the caller's to keep until it is done."""
        assert isinstance(graph, CudaGraph)
        assert not graph.waited, "who waits for the host is launched by `launch`, which can release it"
        with self.entered("replay"):
            graph.graph.replay()

    def launches(self) -> CudaLane:
        """See `Device`."""
        return CudaLane(self, self.stream)

    def current(self) -> CudaLane:
        """See `Device`."""
        return CudaLane(self, torch.cuda.current_stream(self.torch_device))

    def lane(self) -> CudaLane:
        """See `Device`."""
        with self.entered("lane"):
            return CudaLane(self, torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    def active(self) -> contextlib.AbstractContextManager[None]:
        """See `Device`."""
        return torch.cuda.device(self.torch_device)

    def free_bytes(self) -> int:
        """See `Device`."""
        with self.entered("free_bytes"):
            free, _ = torch.cuda.mem_get_info(self.torch_device)
            kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
            return free + kept

    def synchronize(self) -> None:
        """See `Device`."""
        with self.entered("synchronize"):
            torch.cuda.synchronize(self.torch_device)

    def is_idle(self) -> bool:
        """See `Device`."""
        with self.entered("is_idle"):
            idle = self.driver.is_done(self.stream.cuda_stream)
            if idle:
                self._launched.clear()
            return idle

    def spawn(self, actor: Actor) -> None:
        """See `Device`."""
        start_thread(actor)

    def close(self) -> None:
        """See `Device`. Graphs that wait are released; where they do not end, nothing is given back."""
        refuse_in_duty("close")
        if self._closed:
            return
        self._closed = True
        self.stop.set()
        if self._lost:
            return
        with self.entered("close", closing=True):
            if not self._release(self._launched, _CLOSE):
                logger.warning("%s does not end what was launched: its streams are kept", self.name)
                return
            for stream in self._streams:
                self.driver.call("cuStreamDestroy", self.driver.api.CUstream(stream.cuda_stream))
            self.driver.call("cuDevicePrimaryCtxRelease", self.driver.call("cuDeviceGet", self.torch_device.index))

    # -- more than `Device`

    def compile(self, source: str, *names: str) -> list[Kernel]:
        """Kernels of CUDA C, which may use `driver.RING`; raises `DeviceError` with the compiler's words.

        The same source is compiled once, and a kernel of it is one object: who launches it next with less shared memory
        does not take it from others.
        """
        with self.entered("compile"):
            if source not in self._modules:
                self._modules[source] = self.driver.compile(source, self.architecture), {}
            module, kernels = self._modules[source]
            for name in names:
                if name not in kernels:
                    kernels[name] = Kernel(self.driver, module, name, int(self.architecture[3:]) >= EARLY)
            return [kernels[name] for name in names]

    def pointer(self, memory: torch.Tensor | Flag) -> int:
        """Where the device finds memory; raises `DeviceError` for memory of the host that is not registered."""
        address = memory.address if isinstance(memory, Flag) else memory.data_ptr()
        if isinstance(memory, torch.Tensor) and memory.device.type == "cuda":
            return address
        try:
            return int(self.driver.call("cuMemHostGetDevicePointer", address, 0))
        except DeviceError as error:
            raise DeviceError(
                f"the device cannot reach {memory if isinstance(memory, Flag) else tuple(memory.shape)} in the host's "
                f"memory ({error}): make it with host_tensor or flags, or register it",
                operation="pointer",
                lost=error.facts["lost"],
            ) from error

    def stream_of(self, number: int) -> torch.cuda.Stream:
        """A stream of the device's own, 0 that of launches: torch hands out the same 32 in turn."""
        while len(self._streams) <= number:
            new = self.driver.call("cuStreamCreate", self.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._streams.append(torch.cuda.ExternalStream(int(new), device=self.torch_device))  # type: ignore[no-untyped-call]
        return self._streams[number]

    def wait_operations(self, address: int, take: bool) -> list[Any]:
        """Memory operations that wait for a 1, and write 0 if it is taken with that."""
        kinds = self.driver.api.CUstreamBatchMemOpType
        wait = self.driver.api.CUstreamBatchMemOpParams()
        wait.waitValue.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
        wait.waitValue.address, wait.waitValue.value = address, 1
        wait.waitValue.flags = self.driver.api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        if not take:
            return [wait]
        write = self.driver.api.CUstreamBatchMemOpParams()
        write.writeValue.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        write.writeValue.address, write.writeValue.value = address, 0
        write.writeValue.flags = self.driver.api.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        return [wait, write]

    @contextlib.contextmanager
    def entered(self, operation: str, closing: bool = False) -> Iterator[None]:
        """The device's context is this thread's, and errors are `DeviceError`; refused where they cannot help."""
        refuse_in_duty(operation)
        if self._lost:
            raise DeviceError(f"{operation}: the device is lost: {self._lost}", operation=operation, lost=True)
        if self._closed and not closing:
            raise DeviceError(f"{operation}: this device is closed", operation=operation)
        self.driver.call("cuCtxPushCurrent", self._context)
        try:
            with self.driver.translated(operation):
                yield
        except DeviceError as error:
            if error.facts["lost"]:
                self._lost = str(error)
            raise
        finally:
            self.driver.api.cuCtxPopCurrent()

    def _release(self, graphs: Iterable[CudaGraph], seconds: float) -> bool:
        """Set every flag that graphs wait for until they have ended; False if they have not in that time."""
        end = time.monotonic() + seconds
        while not self.driver.is_done(self.stream.cuda_stream):
            for flag in {flag for graph in graphs for flag in graph.waited}:
                flag.value = 1
            if time.monotonic() > end:
                return False
            time.sleep(1e-3)
        return True

    # -- the probe

    def _choose_waits(self, asked: str | None, seconds: float) -> Waits:
        """The first kind of waits that works."""
        failed = ""
        for kind in (asked,) if asked else WAITS:
            self.waits = Waits(kind, "being tried")
            fault = self._probe(seconds)
            if not fault:
                return Waits(kind, failed or f"{REPLAYS} replays of a graph saw what the host answered")
            failed += f"{'; ' if failed else ''}{kind} waits do not work ({fault})"
            logger.warning("%s: %s", self.name, failed)
        raise DeviceError(f"{self.name}: graphs cannot wait for the host: {failed}", operation="probe")

    def _probe(self, seconds: float) -> str:
        """What is wrong with waits as they are now, "" for nothing. Raises if the device does not come back."""
        bell, answer, end = self.flags(3)

        def build(stream: Stream) -> None:
            stream.ring(bell)
            stream.wait(answer)
            stream.ring(end)

        try:
            graph = self.capture(build)
        except DeviceError as error:
            if error.facts["lost"]:
                raise
            return str(error)
        host = Host(bell, answer, end, seconds)
        thread = threading.Thread(target=host.run, name="freetoken-probe", daemon=True)
        thread.start()
        for _ in range(REPLAYS):
            self.launch(graph)
        thread.join()
        with self.entered("probe"):
            if not self._release([graph], seconds):
                raise DeviceError(
                    f"{self.name}: a wait of the kind {self.waits.kind!r} does not wake and cannot be ended: "
                    "restart the process",
                    operation="probe",
                    lost=True,
                )
        return host.fault
