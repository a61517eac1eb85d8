"""Our top-k in the place of torch's: where it is exchanged, where it is not, and that texts stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

import freetoken
from freetoken.device.base import Device
from freetoken.gpu import topk
from freetoken.integration import compiled
from freetoken.integration.topk import OwnTopK, exchange_topk
from tests.integration.test_compiled import COMPILED, begun, of_family, ours, part, texts
from tests.support.devices import DEVICES, open_for_test, with_interpreter

OURS = torch.ops.freetoken.topk.default
THEIRS = torch.ops.aten.topk.default

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, by its own compiler
]


@pytest.fixture
def interpreted() -> None:
    """For tests on ordinary memory."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles for the GPU here")


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which of both operators are called, and for how many values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Any, int]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (OURS, THEIRS):
            self.found.append((func, args[0].shape[-1]))
        return func(*args, **(kwargs or {}))


TAKEN: list[Callable[[torch.Tensor], Any]] = [
    lambda x: torch.topk(x, 2),
    lambda x: torch.topk(x, 2, dim=-1),
    lambda x: torch.topk(x, k=2, dim=1, sorted=False),
    lambda x: torch.topk(input=x, k=2, largest=True),
    lambda x: x.topk(2),
    lambda x: x.topk(k=2, dim=-1),
    lambda x: x.view(-1, 3, 4).topk(2, dim=-1),
]
LEFT: list[Callable[[torch.Tensor], Any]] = [
    lambda x: torch.topk(x, 2, dim=0),
    lambda x: torch.topk(x, 2, largest=False),
    lambda x: x.topk(2, -1, False),
    lambda x: x.repeat(1, 2).topk(17),
    lambda x: x.repeat(1, 90).topk(2),
    lambda x: x.double().topk(2),
    lambda x: x.view(-1, 3, 4).topk(2, dim=1),
    lambda x: torch.topk(x, 2, axis=-1),  # type: ignore[call-overload]
]


def two(call: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = call(x)
        return found.values * 2, found[1]

    return run


def through_dynamo(call: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        exchange_topk(graph)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(two(call), backend=backend, fullgraph=True, dynamic=False)


def through_mode(call: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def run(x: torch.Tensor) -> Any:
        with OwnTopK():
            return two(call)(x)

    return run


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("through", [through_dynamo, through_mode])
@pytest.mark.parametrize("call", [*TAKEN, *LEFT])
@torch.no_grad()
def test_what_is_exchanged(call: Callable[[torch.Tensor], Any], through: Any) -> None:
    """And all else is as it is without."""
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    wanted = two(call)(x)
    with Calls() as calls:
        found = through(call)(x)
    assert [func for func, _ in calls.found] == [OURS if call in TAKEN else THEIRS]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("through", [through_dynamo, through_mode])
def test_gradients_are_torchs(through: Any) -> None:
    x = torch.randn(3, 12, requires_grad=True)
    through(TAKEN[0])(x)[0].sum().backward()
    assert x.grad is not None and x.grad.count_nonzero() == 6


def test_outside_and_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 12)
    with Calls() as calls:
        with OwnTopK():
            pass
        x.topk(2)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with OwnTopK():
            found = x.topk(2)
    assert [func for func, _ in calls.found] == [THEIRS, THEIRS]
    assert torch.equal(found.values, x.topk(2).values)


@pytest.mark.usefixtures("interpreted")
def test_what_only_a_call_can_say() -> None:
    """Places for the results, and numbers that are none of Python's: torch's own; a graph that hands on both as one."""
    x = torch.randn(3, 12)
    places = x.new_empty(3, 2), x.new_empty(3, 2, dtype=torch.int64)
    with Calls() as calls, OwnTopK():
        torch.topk(x, 2, out=places)
        torch.topk(x, np.int64(2))  # type: ignore[call-overload]
    assert OURS not in [func for func, _ in calls.found]
    assert torch.equal(places[0], x.topk(2).values)
    graph = torch.fx.symbolic_trace(lambda x: torch.topk(x, 2))
    for node in graph.graph.nodes:
        node.meta["example_value"] = x
    exchange_topk(graph)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [torch.topk]


def test_devices_that_no_kernel_was_compiled_for_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "runs_on", lambda device: device.type == "cuda")
    with Calls() as calls, OwnTopK():
        torch.randn(3, 12).topk(2)
    assert [func for func, _ in calls.found] == [THEIRS]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("name", "compiles"),
    [
        *((name, "off") for name in ("deepseek_v3", "gpt_oss", "granitemoe_swa", "qwen3_moe")),
        *((name, "on") for name in ("deepseek_v3", "gpt_oss")),
        ("qwen3_moe", "given up"),
    ],
)
@torch.no_grad()
def test_steps_choose_with_it(name: str, compiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of families with softmax before or after the choice, and with groups; their logits stay."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setenv("FREETOKEN_COMPILE", "off" if compiles == "off" else "on")
    model = of_family(name, **({"n_group": 2, "topk_group": 1} if name == "deepseek_v3" else {}))
    fixed = begun(model)
    if compiles == "given up":
        monkeypatch.setattr(compiled, "KINDS", 1)
        for number, layer in enumerate(model.model.layers):
            layer.input_layernorm.variance_epsilon = 1e-6 * (1 + number)
    fixed.forward(2, 32)
    with Calls() as plain:
        fixed.run(2, 32)
    expected = fixed.logits.clone()
    fixed.logits.zero_()
    with Calls() as calls:
        fixed.forward(2, 32)
    if compiles != "off":
        assert bool(part(fixed).why_not) == (compiles == "given up")
    assert {func for func, _ in plain.found} == {THEIRS}
    assert calls.found == [(OURS, n) for _, n in plain.found]
    assert (fixed.logits - expected).norm() <= 1e-5 * expected.norm()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    yield from open_for_test(request.param, lambda: with_interpreter(5))


@pytest.mark.parametrize(("name", "compiles"), [("tiny", True), ("gpt_oss", False)])
def test_texts_stay(
    name: str,
    compiles: bool,
    device: Device,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of captured steps, whose capture calls the kernel for each layer."""
    monkeypatch.setenv("FREETOKEN_COMPILE", "on" if compiles else "off")
    monkeypatch.setenv("FREETOKEN_GPU_RESERVE", "0")
    if device.torch_device.type == "cpu":
        monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    caplog.set_level("INFO", "freetoken.integration.compiled")
    folder: Path = request.getfixturevalue(name)
    stock, _ = freetoken.load(folder, dtype=torch.float32)
    model, _ = freetoken.load(folder, device=device, strategy="cpu", dtype=torch.float32)
    called, original = [], topk.is_known

    def is_known(x: torch.Tensor, k: int) -> bool:
        called.append(x.shape)
        return original(x, k)

    monkeypatch.setattr(topk, "is_known", is_known)
    for rows in (1, 3):
        called.clear()
        assert torch.equal(texts(model, rows), texts(stock, rows))
        assert called
    assert any(COMPILED in line for line in ours(caplog)) == compiles
