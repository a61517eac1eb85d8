"""Models on a device: every strategy gives what the CPU gives; refusals, faults and the end of a model.

The device is a simulated one, with kernels in Triton's interpreter, or a GPU where there is one.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from numpy.typing import NDArray

import freetoken
from freetoken import settings
from freetoken.device.base import Device, running_duty
from freetoken.device.simulated import SimulatedDevice
from freetoken.errors import CapacityError, ClosedError, ConfigError, DeviceError, StepError, UnsupportedError
from freetoken.executor import BoundLayer
from freetoken.fidelity import compare_greedy
from freetoken.gpu.gather import Gather
from freetoken.gpu.grouped import GroupedProduct
from freetoken.integration.device import place
from freetoken.integration.operator import layer_of
from freetoken.memory.placement import Placement
from freetoken.offload.experts import DeviceExperts
from freetoken.offload.layer import DeviceLayer
from freetoken.offload.pinning import REFUSED, Pinner
from freetoken.offload.streaming import Streamer
from tests.support.devices import DEVICES, open_for_test

STRATEGIES = ("cpu", "offload", "resident")


def simulated(kind: type[SimulatedDevice] = SimulatedDevice, **how: Any) -> SimulatedDevice:
    """A device on ordinary memory, where kernels for that were chosen (tests/conftest.py)."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles for the GPU here")
    return kind(5, **how)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    yield from open_for_test(request.param, simulated)


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_GPU_RESERVE", "0")


def experts_of(model: Any) -> DeviceExperts:
    layers = [layer for layer in map(layer_of, model.modules()) if isinstance(layer, DeviceLayer)]
    return layers[0].experts


def loaded(folder: Path, device: Device, strategy: str, cache: str | float = "auto", **more: Any) -> Any:
    """With all that can be pinned."""
    cache = cache if strategy == "offload" else "auto"
    how = {"dtype": torch.float32, **more}
    model, _ = freetoken.load(folder, device=device, strategy=strategy, cache=cache, **how)
    experts_of(model).wait_until_pinned()
    return model


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(ids.to(model.device)).logits.cpu()
    return found


def check_same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one - other).norm() <= 1e-4 * other.norm()


@pytest.mark.parametrize(
    ("strategy", "fmt"), [("cpu", "bf16"), ("offload", "bf16"), ("resident", "bf16"), ("offload", "mxfp4")]
)
def test_the_same_logits(tiny: Path, model: Any, device: Device, strategy: str, fmt: str) -> None:
    """In fp32, for one token, few, and as many as are streamed."""
    stock = model if fmt == "bf16" else freetoken.load(tiny, dtype=torch.float32, expert_format=fmt)[0]
    other = loaded(tiny, device, strategy, 0.5, expert_format=fmt)
    for n in (1, 2, 14):
        ids = torch.arange(n)[None] * 7 % 60
        check_same(logits(other, ids), logits(stock, ids))
    facts = freetoken.report(other)
    assert facts.device is not None
    assert (facts.device.strategy, facts.device.pinned is None) == (strategy, strategy != "offload")
    assert (facts.bank_bytes == 0) == (strategy == "resident")
    assert strategy in str(facts)
    if strategy == "offload":
        assert facts.device.streamed_bytes > 0 and facts.device.pinned is not None
        assert facts.device.pinned.layers(REFUSED) == ()
        assert facts.hit_rate is not None and 0 <= facts.hit_rate < 1
        assert facts.fetched_bytes_per_token is not None and facts.fetched_bytes_per_token > 0
    if strategy == "resident":
        assert facts.hit_rate == 1 and facts.slots == facts.layers * facts.experts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_text(gpt_oss: Path, device: Device, strategy: str) -> None:
    """Greedily, token by token, of a model with biases and the clamped activation."""
    stock, _ = freetoken.load(gpt_oss, dtype=torch.float32)
    other = loaded(gpt_oss, device, strategy, 0.6)
    found = compare_greedy(stock, other, torch.tensor([[1, 5, 9, 2]]), 6)
    assert found.tokens == 6
    assert found.margin <= 1e-3, "only tokens that are as good as each other may be exchanged"


def test_experts_cut_for_two_nodes(tiny: Path, model: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and buffers hold an expert's shards one after the other."""
    where = Placement("shard", (0, 1), "for this test", (0, 1), (0, 1), {0: (0,), 1: (1,)}, True)
    monkeypatch.setattr("freetoken.integration.transformers.choose", lambda *_: where)
    for strategy in STRATEGIES:
        other = loaded(tiny, device, strategy, 0.5, threads=2)
        for n in (1, 12):
            ids = torch.arange(n)[None] * 5 % 60
            check_same(logits(other, ids), logits(model, ids))


class Refusing(SimulatedDevice):
    """Registers nothing from the second layer on."""

    n = 0

    @contextlib.contextmanager
    def register(self, memory: NDArray[Any]) -> Iterator[None]:
        self.n += 1
        if self.n > 1:
            raise DeviceError("no more", operation="register")
        with super().register(memory):
            yield


def test_layers_that_cannot_be_pinned(tiny: Path, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """They are computed on the host, beside others that are not, and it is said once."""
    with caplog.at_level(logging.WARNING):
        other = loaded(tiny, simulated(Refusing), "offload", 0.5)
    assert "computed on the CPU" in caplog.text and len(caplog.records) == 1
    for n in (1, 12, 2):
        ids = torch.arange(n)[None]
        check_same(logits(other, ids), logits(model, ids))
    usage = experts_of(other).usage()
    assert usage.pinned is not None and (usage.pinned.layers(), usage.host_threads > 0) == ((0,), True)
    assert "refused" in str(freetoken.report(other))


def test_before_anything_is_pinned(tiny: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.offload.pinning.Pinner.start", lambda self: None)
    other, _ = freetoken.load(tiny, device=simulated(), strategy="offload", cache=0.5, dtype=torch.float32)
    ids = torch.arange(5)[None]
    check_same(logits(other, ids), logits(model, ids))
    pinner = experts_of(other)._pinner
    assert pinner is not None
    pinner.run()
    check_same(logits(other, ids), logits(model, ids))


def test_a_prompt_waits_for_banks_to_be_pinned(
    tiny: Path, model: Any, monkeypatch: pytest.MonkeyPatch, small_reserve: None
) -> None:
    """A few tokens do not."""
    monkeypatch.setattr("freetoken.offload.experts._PROMPT_TOKENS", 12)
    start = Pinner.start
    with monkeypatch.context() as context:
        context.setattr(Pinner, "start", lambda self: None)
        other, _ = freetoken.load(tiny, device=simulated(), strategy="offload", cache=0.5, dtype=torch.float32)
    for tokens, begins in ((2, False), (12, True)):
        pinner = experts_of(other)._pinner
        assert pinner is not None
        if begins:
            start(pinner)
        ids = torch.arange(tokens)[None]
        check_same(logits(other, ids), logits(model, ids))
        usage = experts_of(other).usage()
        assert usage.pinned is not None and usage.pinned.layers() == ((0, 1) if begins else ())
    assert usage.streamed_bytes


@pytest.mark.parametrize(
    ("strategy", "cache", "error", "words"),
    [
        ("fast", "auto", ConfigError, "strategy='fast'"),
        ("offload", "much", ConfigError, "cache='much'"),
        ("offload", 1.5, ConfigError, "cache=1.5"),
        ("offload", 1, CapacityError, "smallest"),
        ("offload", "900GiB", CapacityError, None),
    ],
)
def test_refused_before_anything_is_allocated(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    cache: str | float,
    error: type[Exception],
    words: str | None,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a bank was made")

    monkeypatch.setattr("freetoken.integration.transformers._load_dense", never)
    if words is None:  # as much as all experts take is enough
        monkeypatch.undo()
        assert loaded(tiny, simulated(), strategy, cache) is not None
        return
    with pytest.raises(error, match=words):
        freetoken.load(tiny, device=simulated(), strategy=strategy, cache=cache)


def test_a_device_that_is_too_small(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.integration.transformers._load_dense", lambda *_: pytest.fail("loaded"))
    with pytest.raises(CapacityError, match="the dense part needs"):
        freetoken.load(tiny, device=simulated(memory_bytes=1000))
    monkeypatch.setenv("FREETOKEN_GPU_RESERVE", "64")
    for strategy in ("resident", "offload"):
        with pytest.raises(CapacityError, match=r"can be had|smallest"):
            freetoken.load(tiny, device=simulated(memory_bytes=64 << 20), strategy=strategy)


def test_words_without_a_device(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="device='tpu'"):
        freetoken.load(tiny, device="tpu")
    for more in ({"strategy": "offload"}, {"cache": 0.5}):
        for none in ("cpu", " CPU", torch.device("cpu")):
            with pytest.raises(ConfigError, match="about a device"):
                freetoken.load(tiny, device=none, **more)
    for odd in (0, None, b"cuda"):
        with pytest.raises(ConfigError, match="device="):
            freetoken.load(tiny, device=odd)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="no CUDA device"):
            freetoken.load(tiny, device="cuda")


def test_what_fits_is_resident(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = freetoken.load(tiny, device=simulated())
    assert experts_of(whole).strategy == "resident"
    needed = freetoken.report(freetoken.load(tiny)[0]).bank_bytes
    dense = sum(p.nbytes for p in whole.parameters())
    part, _ = freetoken.load(tiny, device=simulated(memory_bytes=needed + dense - 1))
    assert experts_of(part).strategy == "offload"
    assert settings.GPU_RESERVE.read() == 0


def test_a_deleted_model_gives_everything_back(tiny: Path) -> None:
    device = simulated(Counting)
    other = loaded(tiny, device, "offload", 0.5)
    logits(other, torch.arange(3)[None])
    assert device.registered
    records = [weakref.ref(layer.bound.bank) for layer in experts_of(other).layers if layer.bound is not None]
    del other
    gc.collect()
    assert not device.registered and not any(ref() for ref in records)


class Counting(SimulatedDevice):
    """Knows what is registered, and whether it was closed."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.registered: list[int] = []
        self.closed = 0

    @contextlib.contextmanager
    def register(self, memory: NDArray[Any]) -> Iterator[None]:
        self.registered.append(memory.ctypes.data)
        try:
            yield
        finally:
            self.registered.remove(memory.ctypes.data)

    def close(self) -> None:
        self.closed += 1


def test_a_dense_part_that_does_not_arrive(tiny: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model stays on the CPU, as it was, and nothing is pinned."""
    device = simulated(Counting)
    other, _ = freetoken.load(tiny, dtype=torch.float32)
    to, calls = type(other).to, [0]

    def fail(self: Any, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise torch.OutOfMemoryError("no")
        return to(self, *args)

    monkeypatch.setattr(type(other), "to", fail)
    with pytest.raises(CapacityError, match="the dense part needs"):
        place(other, device, "offload", 0.5)
    assert not device.registered
    ids = torch.arange(5)[None]
    check_same(logits(other, ids), logits(model, ids))
    place(other, device, "offload", 0.5)
    check_same(logits(other, ids), logits(model, ids))


def test_a_device_is_closed_by_who_opened_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = simulated(Counting)
    other, _ = freetoken.load(tiny, device=mine)
    del other
    gc.collect()
    assert not mine.closed
    theirs = simulated(Counting)
    monkeypatch.setattr("freetoken.integration.device.open_device", lambda name: theirs)
    other, _ = freetoken.load(tiny, device="cuda")
    assert not theirs.closed
    del other
    gc.collect()
    assert theirs.closed == 1
    with pytest.raises(ConfigError, match="cache='much'"):
        freetoken.load(tiny, device="cuda", strategy="offload", cache="much")
    assert theirs.closed == 2


EXIT = """
import contextlib, os, sys
from freetoken.device.simulated import SimulatedDevice
import freetoken

class Telling(SimulatedDevice):
    @contextlib.contextmanager
    def register(self, memory):
        try:
            yield
        finally:
            print("given back", flush=True)

from freetoken.integration.operator import layer_of
model, _ = freetoken.load(sys.argv[1], device=Telling(), strategy="offload", cache=0.5)
layers = [layer for layer in map(layer_of, model.modules()) if layer is not None]
print(layers[0].experts.wait_until_pinned(), flush=True)
"""


def test_the_end_of_a_process_gives_everything_back(tiny: Path) -> None:
    simulated()
    done = subprocess.run([sys.executable, "-c", EXIT, tiny], capture_output=True, text=True, timeout=100, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("layers 0-1 pinned") and lines[1:] == ["given back"] * 2


def test_resident_drops_the_hosts_copy(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    banks: list[Any] = []
    made = freetoken.integration.transformers._make_bank

    def remember(*args: Any) -> Any:
        bank = made(*args)
        banks.append(weakref.ref(bank))
        return bank

    monkeypatch.setattr("freetoken.integration.transformers._make_bank", remember)
    other = loaded(tiny, simulated(), "resident")
    gc.collect()
    assert banks and not any(ref() for ref in banks)
    logits(other, torch.arange(3)[None])


def test_an_error_in_a_step_leaves_the_model_usable(tiny: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of streaming, and in the middle of a few tokens."""
    other = loaded(tiny, simulated(), "offload", 0.5)
    kernels: Any = experts_of(other)._slotted
    for n, name in ((12, "many"), (1, "few")):
        ids = torch.arange(n)[None] % 60
        last = kernels._kernels[-1]
        real: Callable[..., Any] = getattr(type(last), name)

        def fail(self: Any, *args: Any, real: Callable[..., Any] = real) -> Any:
            if fail.calls == 1:  # type: ignore[attr-defined]
                raise RuntimeError("a kernel")
            fail.calls += 1  # type: ignore[attr-defined]
            return real(self, *args)

        fail.calls = 0  # type: ignore[attr-defined]
        monkeypatch.setattr(type(last), name, fail)
        with pytest.raises(RuntimeError, match="a kernel"):
            logits(other, ids)
        monkeypatch.undo()
        monkeypatch.setenv("FREETOKEN_GPU_RESERVE", "0")
        check_same(logits(other, ids), logits(model, ids))
    pinner = experts_of(other)._pinner
    assert pinner is not None and not pinner._steps


def test_what_is_refused_afterwards(tiny: Path) -> None:
    other = loaded(tiny, simulated(), "offload", 0.5)
    ids = torch.arange(3)[None]
    for refuse in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="cannot be copied"):
            refuse(other)
    with pytest.raises(ConfigError, match="a model once"):
        place(other, simulated())
    assert not other.hf_quantizer.is_compileable
    pid = os.fork()
    if pid == 0:
        try:
            logits(other, ids)
        except UnsupportedError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    experts_of(other).close()
    experts_of(other).close()
    with pytest.raises(ClosedError, match="closed"):
        logits(other, ids)
    assert "offload" in str(freetoken.report(other))


@pytest.mark.parametrize("fails", ["_gather", "pointer", "gather"])
def test_slots_that_were_not_filled_are_not_believed(
    tiny: Path, model: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Whatever comes between a look-up and the end of its fetches."""
    other = loaded(tiny, simulated(), "offload", 0.5)
    slotted = experts_of(other)._slotted
    ids = torch.tensor([[3]])

    def fail(*_: object) -> None:
        monkeypatch.undo()
        monkeypatch.setenv("FREETOKEN_GPU_RESERVE", "0")
        raise KeyboardInterrupt

    what: Any = {"_gather": slotted, "pointer": experts_of(other).device, "gather": Gather}[fails]
    monkeypatch.setattr(what, "__call__" if fails == "gather" else fails, fail)
    with pytest.raises(KeyboardInterrupt):
        logits(other, ids)
    for _ in range(2):
        check_same(logits(other, ids), logits(model, ids))


def direct(experts: DeviceExperts, number: int, tokens: int, seed: int) -> None:
    """One layer called by itself, against the host."""
    layer = experts.layers[number]
    assert layer.bound is not None
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, layer.layout.hidden, generator=random)
    ids = torch.randint(-1, layer.n_experts + 1, (tokens, 2), generator=random)
    weights = torch.rand(tokens, 2, generator=random)
    check_same(layer.run(x, ids, weights), layer.bound.run(x, ids, weights))


def test_few_and_many_tokens_in_any_order(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of many does not believe slots that few have changed; matrix products in pieces; groups of two experts."""
    monkeypatch.setattr("freetoken.offload.room._SHARE", 1 << 40)  # buffers hold one expert
    monkeypatch.setattr("freetoken.gpu.layer.CHUNK", 5)
    other = loaded(tiny, simulated(), "offload", 0.5)
    experts = experts_of(other)
    calls = [
        (0, 1),
        (1, 1),
        (0, 11),
        (1, 1),
        (1, 11),
        (0, 11),
        (1, 12),
        (0, 1),
        (0, 1),
        (0, 11),
        (1, 1),
        (1, 1),
        (1, 11),
    ]
    for seed, (number, tokens) in enumerate(calls):
        direct(experts, number, tokens, seed)


def test_layers_that_are_not_pinned_are_not_streamed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = loaded(tiny, simulated(Refusing), "offload", 0.5)
    begun: list[list[int]] = []
    begin = Streamer.begin
    monkeypatch.setattr(
        Streamer, "begin", lambda self, rest, there: begun.append(list(rest)) or begin(self, rest, there)
    )
    logits(other, torch.arange(12)[None])
    assert begun == [[0]]


def test_a_failure_on_the_host_is_raised_before_the_step_is_over(
    tiny: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another thread's step comes between."""
    other = loaded(tiny, simulated(), "cpu")
    experts, ids = experts_of(other), torch.arange(3)[None]
    check_same(logits(other, ids), logits(model, ids))
    assert experts._host is not None
    steps = experts._host.steps
    launch = steps.launch

    def cancelled(graph: Any) -> int:
        monkeypatch.setattr(steps, "launch", launch)
        number = launch(graph)
        steps.cancel()
        return number

    x, routes, weights = torch.ones(1, experts.layers[0].layout.hidden), torch.tensor([[0, 1]]), torch.ones(1, 2)
    for between in (False, True):
        monkeypatch.setattr(steps, "launch", cancelled)
        experts.layers[0].run(x, routes, weights)
        if between:
            with ThreadPoolExecutor(1) as pool:
                check_same(pool.submit(logits, other, ids).result(), logits(model, ids))
        with pytest.raises(StepError, match="cancelled"):
            experts.layers[1].run(x, routes, weights)
    check_same(logits(other, ids), logits(model, ids))


def test_kernels_that_are_wrong_are_not_used(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = GroupedProduct.down

    def wrong(self: Any, h: torch.Tensor, *rest: Any) -> None:
        down(self, h * 1.1, *rest)

    monkeypatch.setattr(GroupedProduct, "down", wrong)
    with pytest.raises(UnsupportedError, match=r"no kernel for bf16 agrees .* strategy='cpu'"):
        loaded(tiny, simulated(), "offload", 0.5)


def test_an_expert_without_an_output(tiny: Path) -> None:
    """Kernels are checked with another one."""
    other, _ = freetoken.load(tiny, dtype=torch.float32)
    for layer in map(layer_of, other.modules()):
        if isinstance(layer, BoundLayer):
            bank = layer.bank.shards[0]
            expert = bank.get(0)
            bank.put(0, replace(expert, down=replace(expert.down, codes=np.zeros_like(expert.down.codes))))
    ids = torch.arange(2)[None]
    expected = logits(other, ids)
    place(other, simulated(), "offload", 0.5)
    experts_of(other).wait_until_pinned()
    check_same(logits(other, ids), expected)


def test_closing_gives_back_whatever_fails(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = simulated(Counting)
    other = loaded(tiny, device, "offload", 0.5)

    def fail() -> None:
        assert device.registered
        raise RuntimeError("the device does not answer")

    monkeypatch.setattr(device, "synchronize", fail)
    with pytest.raises(RuntimeError, match="does not answer"):
        experts_of(other).close()
    assert not device.registered


def test_closing_in_a_child_touches_nothing(tiny: Path) -> None:
    """Not even a lock that a thread of the parent holds."""
    other = loaded(tiny, simulated(), "offload", 0.5)
    experts = experts_of(other)
    with experts._lock:
        pid = os.fork()
        if pid == 0:
            threading.Thread(target=lambda: (experts.close(), os._exit(0))).start()
            time.sleep(5)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_duty_may_collect_a_model(tiny: Path) -> None:
    """Its thread may not call the device, so another one closes."""
    device = simulated(Counting)
    other = loaded(tiny, device, "offload", 0.5)
    with running_duty():
        experts_of(other).close()
    end = time.monotonic() + 10
    while device.registered and time.monotonic() < end:
        time.sleep(0.01)
    assert not device.registered


def test_a_link_that_cannot_be_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> float:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(DeviceExperts, "_copy_rate", full)
    other = loaded(tiny, simulated(), "offload", 0.5)
    usage = experts_of(other).usage()
    assert usage.pinned is not None and usage.pinned.layers() == (0, 1) and usage.link_bps == 0


def test_steps_keep_banks_from_being_pinned(tiny: Path) -> None:
    """A step is from the first layer to the last."""
    other = loaded(tiny, simulated(), "offload", 0.5)
    experts = experts_of(other)
    pinner = experts._pinner
    assert pinner is not None
    hidden = experts.layers[0].layout.hidden
    x, ids = torch.zeros(1, hidden), torch.zeros(1, 2, dtype=torch.int64)
    weights = torch.ones(1, 2)
    seen = []
    for layer in (*experts.layers, experts.layers[0], *experts.layers):
        layer.run(x, ids, weights)
        seen.append(len(pinner._steps))
    n = len(experts.layers)
    assert seen == [1] * (n - 1) + [0] + [1] * n + [0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generate(tiny: Path, model: Any, device: Device, strategy: str) -> None:
    """transformers' own loop, with a static cache too, which would be compiled."""
    other = loaded(tiny, device, strategy, 0.5)
    ids = torch.arange(4)[None] + 3
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    there = ids.to(other.device)
    for more in ({}, {"cache_implementation": "static"}):
        found = other.generate(there, attention_mask=torch.ones_like(there), **how, **more)
        np.testing.assert_array_equal(found.cpu(), expected)


def test_counting_is_switched(tiny: Path, model: Any) -> None:
    """By a model's user, from its first look-up on; a model without a device has nothing to count."""
    other = loaded(tiny, simulated(), "offload", 0.5)
    ids = torch.tensor([[3]])
    found = []
    for on, reset in ((True, True), (False, False), (True, False), (False, True)):
        freetoken.count_statistics(other, on, reset=reset)
        logits(other, ids)
        facts = freetoken.report(other).device
        assert facts is not None and facts.statistics is not None
        found.append(facts.statistics.routed)
    assert found[0] > 0 and found == [found[0], found[0], 2 * found[0], 0]
    freetoken.count_statistics(model, False)
    with pytest.raises(freetoken.FreeTokenError, match="no banks"):
        freetoken.count_statistics(torch.nn.Linear(1, 1))
