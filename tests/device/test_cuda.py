"""The CUDA device: what can be asked without one everywhere, the rest where there is one."""

from __future__ import annotations

import ctypes
import enum
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from freetoken.device._host_wait import HostWait, Stop
from freetoken.device.base import Stream, make_flags, refuse_in_duty, running_duty, start_thread
from freetoken.device.cuda import WAITS, CudaDevice
from freetoken.device.driver import LOST, Driver
from freetoken.device.probe import REPLAYS, Host
from freetoken.device.simulated import SimulatedDevice
from freetoken.duties import Duty, Line, Worker
from freetoken.errors import ConfigError, DeviceError, UnsupportedError


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


def fake_driver(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Let `cuda.bindings` be these functions, and no device behind them."""
    bindings = ModuleType("cuda.bindings")
    api = SimpleNamespace(
        CUresult=CUresult,
        CUstream=int,
        cuInit=lambda flags: (CUresult.CUDA_SUCCESS,),
        cuGetErrorString=lambda code: (CUresult.CUDA_SUCCESS, code.name[11:].lower().encode()),
        **functions,
    )
    monkeypatch.setattr(bindings, "driver", api, raising=False)
    monkeypatch.setattr(bindings, "nvrtc", SimpleNamespace(), raising=False)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def test_nothing_of_cuda_is_imported_before_there_is_a_device() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import freetoken.device.cuda; "
        "print([name for name in set(sys.modules) - before if name.split('.')[0] in ('cuda', 'triton')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(UnsupportedError, match=r'needs the package cuda-bindings .*pip install "freetoken\[gpu\]"'):
        CudaDevice()


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    fake_driver(monkeypatch)
    monkeypatch.setattr(sys.modules["cuda.bindings"].driver, "cuInit", no_library)
    with pytest.raises(UnsupportedError, match=r"driver cannot be used .*libcuda"):
        CudaDevice()


def test_a_missing_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"there is no CUDA device 99: torch .* sees [0-9]+ of them"):
        CudaDevice(99)


def test_another_way_to_wait_is_refused() -> None:
    with pytest.raises(ConfigError, match="'memory' or 'host function'"):
        CudaDevice(waits="spin")


def test_a_thread_that_runs_a_duty_is_refused() -> None:
    with running_duty(), pytest.raises(DeviceError, match="the work of a duty called CudaDevice"):
        CudaDevice()


def test_work_that_a_worker_does_is_refused() -> None:
    failed: list[BaseException] = []
    worker = Worker("rows", on_failure=lambda duty, step, error: failed.append(error))
    answer = make_flags(1)[0]
    worker.post(Line([Duty("rows", None, CudaDevice, answer)]), 0, 1)
    start_thread(worker)
    end = time.monotonic() + 20
    while worker.done == 0:
        assert time.monotonic() < end
        time.sleep(1e-3)
    worker.stop()
    assert [type(error) for error in failed] == [DeviceError]
    assert "the work of a duty called CudaDevice" in str(failed[0])
    with running_duty():
        pass
    refuse_in_duty("launch")  # this thread runs none


@pytest.mark.parametrize("strided", [True, False])
def test_copies_are_of_tensors_that_are_alike(strided: bool) -> None:
    target = torch.zeros(4, 4)
    source = torch.zeros(4, 4).T if strided else torch.zeros(4)
    with pytest.raises(ValueError, match="expected contiguous" if strided else r"copy of torch.Size\(\[4\]\)"):
        SimulatedDevice(0).capture(lambda stream: stream.copy(target, source))


def test_errors_of_the_driver_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(
        monkeypatch,
        cuGood=lambda *arguments: (CUresult.CUDA_SUCCESS, *arguments),
        cuBad=lambda: (CUresult.CUDA_ERROR_INVALID_VALUE, None),
        cuStreamQuery=lambda stream: (CUresult(stream),),
    )
    driver = Driver()
    assert driver.call("cuGood", 7) == 7
    assert driver.call("cuGood", 7, 8) == [7, 8]
    with pytest.raises(DeviceError, match=r"cuBad: CUDA_ERROR_INVALID_VALUE \(invalid_value\)$") as caught:
        driver.call("cuBad")
    assert caught.value.facts == {"operation": "cuBad", "lost": False}
    with pytest.raises(DeviceError, match="cuOther: CUDA error 12345"):
        driver.check("cuOther", 12345)
    assert driver.is_done(0) and not driver.is_done(600)
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS .*restart the process") as caught:
        driver.is_done(700)
    assert caught.value.facts["lost"]


def test_errors_of_torch_have_the_names_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(monkeypatch)
    driver = Driver()
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    with pytest.raises(DeviceError, match="launch: CUDA error: an illegal memory access"), driver.translated("launch"):
        raise error
    error.error_code = 700  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match="launch: CUDA_ERROR_ILLEGAL_ADDRESS") as caught, driver.translated("launch"):
        raise error
    assert caught.value.facts["lost"] and caught.value.__cause__ is error
    with pytest.raises(ValueError, match="mine"), driver.translated("launch"):
        raise ValueError("mine")


def test_the_errors_that_lose_a_device_exist() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    known = set(bindings.CUresult.__members__)
    assert {"CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED"} < known & LOST
    assert len(LOST - known) < 4  # an older driver lacks some


ENQUEUE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class FakeQueue:
    """Enqueues host functions as a driver does: each runs in a thread of its own."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.stream = 0
        self._callback = ENQUEUE(self._enqueue)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def _enqueue(self, stream: int, function: int, data: int) -> int:
        self.stream = stream
        self.threads.append(threading.Thread(target=HOST_FUNCTION(function), args=(data,), daemon=True))
        self.threads[-1].start()
        return 17

    def ends(self, seconds: float = 10.0) -> bool:
        self.threads[-1].join(seconds)
        return not self.threads[-1].is_alive()


@pytest.mark.parametrize("take", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_host_function_waits_for_its_flag(take: bool, late: bool) -> None:
    flag, queue = make_flags(1)[0], FakeQueue()
    flag.value = 2 if late else 1
    wait = HostWait(flag.words, take, Stop())
    assert wait.enqueue(queue.address, 99) == 17 and queue.stream == 99
    if late:
        assert not queue.ends(0.1), "it did not wait"
        flag.value = 1
    assert queue.ends()
    assert flag.value == (0 if take else 1)


def test_a_stopped_host_function_takes_nothing() -> None:
    flag, queue, stop = make_flags(1)[0], FakeQueue(), Stop()
    wait = HostWait(flag.words, True, stop)
    wait.enqueue(queue.address, 0)
    assert not queue.ends(0.1)
    stop.set()
    assert queue.ends()
    wait.enqueue(queue.address, 0)
    assert queue.ends(), "it waited after it was stopped"
    assert flag.value == 0


def test_a_host_function_wants_a_flag_and_a_queue() -> None:
    with pytest.raises(ValueError, match="words is empty"):
        HostWait(np.zeros(0, np.uint32), True, Stop())
    with pytest.raises(ValueError, match="null pointer"):
        HostWait(np.zeros(1, np.uint32), True, Stop()).enqueue(0, 0)


def replay(device: str, flags: Any, stopped: threading.Event) -> None:
    """What a device does with the probe's graph: as it should, or not."""
    bell, answer, end = flags
    for i in range(1, REPLAYS + 1):
        bell.value = 0 if device == "silent" else 2 * i
        while answer.value != 1 and device != "hasty":
            if stopped.is_set():
                return
            time.sleep(1e-4)
        answer.value = 1 if device == "greedy" else 0
        end.value = 0 if device == "endless" else 2 * i


@pytest.mark.parametrize(
    ("device", "fault"),
    [
        ("good", ""),
        ("silent", "the host does not see the bell within 0.2 s"),
        ("hasty", "the graph went on before it was answered"),
        ("greedy", "the graph does not see the answer within 0.2 s"),
        ("endless", "the graph does not end within 0.2 s"),
    ],
)
def test_the_probe_says_what_is_wrong(device: str, fault: str) -> None:
    flags, stopped = make_flags(3), threading.Event()
    host = Host(*flags, seconds=0.2)
    replaying = threading.Thread(target=replay, args=(device, flags, stopped))
    replaying.start()
    host.run()
    stopped.set()
    replaying.join()
    assert host.fault == fault


# -- with a device


@pytest.fixture(params=WAITS)
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    device = CudaDevice(waits=request.param)
    yield device
    device.close()


def finish(device: CudaDevice, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not device.is_idle():
        assert time.monotonic() < end, "what was launched does not end"
        time.sleep(1e-4)


def check_works(device: CudaDevice) -> None:
    """A graph that uses everything computes what it should."""
    host, back = device.host_tensor((64,), torch.float32), device.host_tensor((64,), torch.float32)
    x = torch.zeros(64, device=device.torch_device)
    y = torch.zeros(64, device=device.torch_device)
    bell, answer = device.flags(2)
    torch.cuda.synchronize()

    def build(stream: Stream) -> None:
        stream.wait(answer)
        stream.copy(x, host)
        side = stream.fork()
        side.kernel(lambda: y.copy_(x * 3))
        stream.kernel(lambda: x.add_(1))
        stream.join(side)
        stream.kernel(lambda: y.add_(x))
        stream.copy(back, y)
        stream.ring(bell)

    graph = device.capture(build)
    assert graph.nodes >= 8
    for i in range(1, 4):
        device.launch(graph)
        host[:] = torch.arange(64) + i
        assert bell.value == 2 * i - 2 and not device.is_idle()
        answer.value = 1
        finish(device)
        assert bell.value == 2 * i and answer.value == 0
        assert torch.equal(back, (torch.arange(64) + i) * 4.0 + 1)


@pytest.mark.gpu
def test_a_graph_waits_for_what_the_host_writes(device: CudaDevice) -> None:
    check_works(device)
    assert device.waits.why == "6 replays of a graph saw what the host answered"


@pytest.mark.gpu
def test_flags_change_as_on_the_simulated_device(device: CudaDevice) -> None:
    seen = []
    for some in (device, SimulatedDevice(0)):
        bell, kept, taken = some.flags(3)

        def build(stream: Stream, bell: Any = bell, kept: Any = kept, taken: Any = taken) -> None:
            stream.ring(bell)
            stream.ring(bell, answered=True)
            stream.ring(bell)
            stream.wait(kept, take=False)
            stream.wait(taken)
            stream.take(taken)
            stream.ring(bell, answered=True)

        graph = some.capture(build)
        bell.value, kept.value, taken.value = 0xFFFFFFFA, 1, 1
        some.launch(graph)
        while not some.is_idle():
            some.clock.pause(1e-4)
        seen.append([flag.value for flag in (bell, kept, taken)])
    assert seen[0] == seen[1] == [3, 1, 0]


@pytest.mark.gpu
def test_more_forks_than_torch_has_streams(device: CudaDevice) -> None:
    x = torch.zeros(80, device=device.torch_device)
    x[0].add_(1)
    torch.cuda.synchronize()

    def build(stream: Stream) -> None:
        sides = [stream.fork() for _ in range(80)]
        for i, side in enumerate(sides):
            side.kernel(lambda i=i: x[i].add_(i))  # type: ignore[misc]
        for side in sides:
            stream.join(side)

    device.launch(device.capture(build))
    finish(device)
    assert x.tolist() == [1, *range(1, 80)]


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_device_as_it_was(device: CudaDevice) -> None:
    def forget(stream: Stream) -> None:
        stream.fork().kernel(lambda: torch.zeros(1, device=device.torch_device))

    def raising(stream: Stream) -> None:
        stream.fork()
        raise KeyboardInterrupt

    def synchronizing(stream: Stream) -> None:
        stream.kernel(torch.cuda.synchronize)

    x = torch.zeros(3, device=device.torch_device)
    with pytest.raises(ValueError, match="1 forked streams were not joined"):
        device.capture(forget)
    with pytest.raises(KeyboardInterrupt):
        device.capture(raising)
    numbers = torch.cuda.get_rng_state()
    with pytest.raises(DeviceError, match="capture: CUDA_ERROR_STREAM_CAPTURE"):
        device.capture(synchronizing)
    assert torch.equal(torch.cuda.get_rng_state(), numbers)
    torch.rand(3, device=device.torch_device)
    assert not torch.equal(torch.cuda.get_rng_state(), numbers)
    with pytest.raises(DeviceError, match=r"the device cannot reach .* register it"):
        device.capture(lambda stream: stream.copy(x, torch.zeros(3)))
    with pytest.raises(ValueError, match="copy of"):
        device.capture(lambda stream: stream.copy(x, x[:2]))
    check_works(device)


@pytest.mark.gpu
def test_garbage_does_not_end_a_capture(device: CudaDevice) -> None:
    """A graph in a cycle is freed by whichever thread allocates next."""
    x = torch.zeros(3, device=device.torch_device)

    def allocate() -> None:
        graph: list[object] = [device.capture(lambda stream: stream.kernel(lambda: x.add_(1)))]
        graph.append(graph)
        del graph
        device.capture(lambda stream: [stream.kernel(lambda: x.add_(1)) for _ in range(3000)] and None)

    allocate()
    assert gc.isenabled()
    check_works(device)


@pytest.mark.gpu
def test_registered_memory_is_reached_and_a_refusal_leaves_no_error_behind(device: CudaDevice) -> None:
    memory = np.arange(1 << 16, dtype=np.float32)
    x = torch.zeros(1 << 16, device=device.torch_device)
    torch.cuda.synchronize()
    with device.register(memory):
        device.launch(device.capture(lambda stream: stream.copy(x, torch.from_numpy(memory))))
        finish(device)
        assert torch.equal(x.cpu(), torch.from_numpy(memory))
        with pytest.raises(DeviceError, match=r"262144 bytes cannot be registered: .*ALREADY_REGISTERED") as caught:
            device.register(memory).__enter__()
        assert not caught.value.facts["lost"]
        torch.cuda.check_error(0)
        assert (x + 1).sum().item() > 0  # torch looks for an error that was left behind
    with device.register(memory):  # it was unregistered, and may be again
        pass
    with pytest.raises(ValueError, match="one run of bytes"), device.register(memory[::2]):
        pass
    with pytest.raises(ValueError, match="memory of 0 bytes"), device.register(memory[:0]):
        pass
    check_works(device)


@pytest.mark.gpu
def test_other_threads_may_use_it(device: CudaDevice) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(check_works, device).result()


@pytest.mark.gpu
def test_the_work_of_a_duty_may_not_call_it(device: CudaDevice) -> None:
    graph = device.capture(lambda stream: stream.ring(device.flags(1)[0]))
    calls = [
        device.is_idle,
        lambda: device.launch(graph),
        lambda: device.flags(1),
        lambda: device.register(np.zeros(4096, np.uint8)).__enter__(),
        lambda: device.capture(lambda stream: None),
        device.close,
    ]
    for call in calls:
        with running_duty(), pytest.raises(DeviceError, match="the work of a duty called"):
            call()
    check_works(device)


@pytest.mark.gpu
def test_closing_releases_a_graph_that_waits(device: CudaDevice) -> None:
    answers, end = device.flags(3), device.flags(1)[0]

    def build(stream: Stream) -> None:
        for answer in answers:
            stream.wait(answer)
        stream.ring(end)

    graph = device.capture(build)
    device.launch(graph)
    device.launch(graph)
    time.sleep(0.05)
    assert end.value == 0
    device.close()
    assert end.value == 4
    device.close()
    with pytest.raises(DeviceError, match="launch: this device is closed"):
        device.launch(graph)


@pytest.mark.gpu
def test_kernels_are_compiled_and_faults_named(device: CudaDevice) -> None:
    (kernel,) = device.compile(
        'extern "C" __global__ void ask(int *x, unsigned *bell, int by) { *x += by; ft_ring(bell, 0); }', "ask"
    )
    x, bell = torch.zeros(1, dtype=torch.int32, device=device.torch_device), device.flags(1)[0]
    torch.cuda.synchronize()

    def build(stream: Stream) -> None:
        stream.kernel(lambda: kernel(x.data_ptr(), device.pointer(bell), ctypes.c_int(5)))

    graph = device.capture(build)
    device.launch(graph)
    device.launch(graph)
    finish(device)
    assert (x.item(), bell.value) == (10, 4)
    with pytest.raises(DeviceError, match=r'nvrtcCompileProgram.*identifier "nothing" is undefined'):
        device.compile('extern "C" __global__ void f() { nothing; }', "f")
    with pytest.raises(DeviceError, match="CUDA_ERROR_NOT_FOUND"):
        device.compile('extern "C" __global__ void f() { }', "g")


@pytest.mark.gpu
def test_one_kernel_launched_with_more_and_with_less_shared_memory(device: CudaDevice) -> None:
    """By two who compiled it: what one says does not hold for the other's launches."""
    first, second = (device.compile('extern "C" __global__ void f(int *x) { *x += 1; }', "f")[0] for _ in range(2))
    x = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
    for kernel, shared in ((first, 96 << 10), (second, 64 << 10), (first, 96 << 10)):
        kernel(x.data_ptr(), shared=shared)
    assert x.item() == 3


# -- the probe


@pytest.mark.gpu
def test_memory_is_what_is_waited_for_where_it_works() -> None:
    device = CudaDevice()
    assert device.waits.kind in WAITS and device.waits.why
    check_works(device)
    device.close()


def change_waits(monkeypatch: pytest.MonkeyPatch, **fields: int) -> None:
    ask = CudaDevice.wait_operations

    def changed(self: CudaDevice, address: int, take: bool) -> list[Any]:
        operations = ask(self, address, take)
        for name, value in fields.items():
            setattr(operations[0].waitValue, name, value)
        return operations

    monkeypatch.setattr(CudaDevice, "wait_operations", changed)


@pytest.mark.gpu
def test_the_probe_sees_a_wait_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    change_waits(monkeypatch, flags=0, value=0)  # at least 0
    device = CudaDevice()
    assert device.waits.kind == "host function"
    assert device.waits.why == "memory waits do not work (the graph went on before it was answered)"
    check_works(device)
    device.close()
    with pytest.raises(DeviceError, match="graphs cannot wait for the host: memory waits do not work"):
        CudaDevice(waits="memory")


@pytest.mark.gpu
def test_the_probe_sees_an_operation_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    change_waits(monkeypatch, flags=0xFFFF)
    device = CudaDevice()
    assert device.waits.kind == "host function"
    assert "memory waits do not work (cuStreamBatchMemOp: CUDA_ERROR_" in device.waits.why
    check_works(device)
    device.close()


@pytest.mark.gpu
def test_the_probe_survives_a_wait_that_does_not_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = CudaDevice.flags

    def flags(self: CudaDevice, n: int) -> Any:
        made.extend(make(self, n))
        return made[-n:]

    monkeypatch.setattr(CudaDevice, "flags", flags)
    change_waits(monkeypatch, value=2)  # which nobody answers
    with pytest.raises(DeviceError, match="does not wake and cannot be ended: restart the process") as caught:
        CudaDevice(probe_s=0.3)
    assert caught.value.facts["lost"]
    end = time.monotonic() + 20
    while made[2].value < 12 and time.monotonic() < end:  # let it go after all
        made[1].value = 2
        time.sleep(1e-3)
    assert made[2].value == 12


LOSING = """
import torch
from freetoken.device.cuda import CudaDevice
from freetoken.errors import DeviceError
device = CudaDevice()
(kernel,) = device.compile('extern "C" __global__ void bad(int *x) { *x = 1; }', "bad")
device.launch(device.capture(lambda stream: stream.kernel(lambda: kernel(8))))
for call in (lambda: [device.is_idle() for _ in range(100_000)], device.is_idle, lambda: device.flags(1)):
    try:
        call()
    except DeviceError as error:
        print(error.lost, error)
device.close()
print("closed")
"""


@pytest.mark.gpu
def test_a_lost_device_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", LOSING], capture_output=True, text=True, check=False, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and lines.pop() == "closed", done.stdout + done.stderr
    assert all(line.startswith("True ") and "CUDA_ERROR_ILLEGAL_ADDRESS" in line for line in lines)
