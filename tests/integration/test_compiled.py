"""Layers of captured steps compiled: the same tokens, few graphs, and steps as they are where that cannot be.

What inductor makes is invisible to the simulated device's graphs, so a backend that leaves operations as they are
stands for it there.
"""

from __future__ import annotations

import gc
import logging
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.integrations.moe import ExpertsInterface

import freetoken
from freetoken.device.base import Device
from freetoken.errors import ConfigError
from freetoken.integration import compiled
from freetoken.integration.fixed_cache import FixedForward, cache_argument
from freetoken.integration.plan import find_experts
from tests.integration.test_fixed_cache import TAKEN, WINDOW, family
from tests.support.devices import DEVICES, open_for_test, with_interpreter

LENGTH = 32
PROMPT = 11
NEW = 6
COMPILED = "modules compiled as"
UNCOMPILED = "without being compiled"
IMPLEMENTATION = "tests_one_product"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, by its own compiler
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
]


def one_product(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """In place of experts, whose own forward in transformers waits for the routes: it differs from layer to layer."""
    return x * module.gate_up_proj.flatten()[0] * weights.sum(-1, keepdim=True)


ExpertsInterface.register(IMPLEMENTATION, one_product)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cuda":
        compiled.BACKEND = "inductor"  # put back by the fixture below
    yield from open_for_test(request.param, lambda: with_interpreter(5))


@pytest.fixture(autouse=True)
def compiles(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setenv("FREETOKEN_COMPILE", "on")
    monkeypatch.setenv("FREETOKEN_GPU_RESERVE", "0")
    monkeypatch.setattr("freetoken.offload.calibrate._REPLAYS", 1)
    caplog.set_level(logging.INFO, "freetoken.integration.compiled")
    caplog.set_level(logging.INFO, "freetoken.integration.graph_generate")


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of the log that are not torch's own."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("freetoken")]


def of_family(name: str, **changes: Any) -> Any:
    model = family(name, **changes)
    for module in find_experts(model).values():
        module.config._experts_implementation = IMPLEMENTATION
    return model


@torch.no_grad()
def begun(model: Any, rows: int = 2) -> FixedForward:
    """Prompts are read, the next step is the first one."""
    ids = torch.randint(3, 60, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    fixed = FixedForward(model, rows, LENGTH)
    fixed.begin(cache, None, torch.full((rows, 1), PROMPT - 1), PROMPT)
    fixed.feed(ids[:, 0])
    return fixed


def part(fixed: FixedForward) -> compiled.CompiledLayers:
    assert fixed._compiled is not None
    return fixed._compiled


@torch.no_grad()
def check_steps(fixed: FixedForward, rows: int = 2, steps: int = 3, before: Any = None) -> None:
    """Compiled or not, the same logits. before: a tensor that steps change."""
    for step in range(steps):
        kept = None if before is None else before.clone()
        fixed.run(rows, LENGTH)
        expected = fixed.logits[:rows].clone()
        fixed.logits.zero_()
        if before is not None:
            assert not torch.equal(before, kept)
            after = before.clone()
            before.copy_(kept)
        fixed.forward(rows, LENGTH)
        assert before is None or torch.equal(before, after)
        assert (fixed.logits[:rows] - expected).norm() <= 1e-5 * expected.norm()
        fixed.feed(torch.arange(rows) + 5 + step)


@pytest.mark.parametrize("name", TAKEN)
def test_the_same_logits(name: str) -> None:
    """Of every family that is captured, beyond the window too."""
    model = of_family(name, **({TAKEN[name]: WINDOW} if TAKEN[name] else {}))
    fixed = begun(model)
    check_steps(fixed)
    assert not part(fixed).why_not and part(fixed)._graphs


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_layers_of_a_kind_share_a_graph(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """However many there are; others are only made for other shapes."""
    for layers in (2, 20):
        caplog.clear()
        model = of_family(name, num_hidden_layers=layers)
        fixed = begun(model)
        check_steps(fixed)
        assert part(fixed)._graphs == 3, "layers, norm and rotary embedding"
        assert [line.partition(" in ")[0] for line in ours(caplog)] == [f"{layers + 2} {COMPILED} 3 graphs"]
        check_steps(fixed, 1)
        assert fixed.grow(2 * LENGTH)
        check_steps(fixed, 2, 1)
        assert part(fixed)._graphs == 9


def test_hooks() -> None:
    """Such as a benchmark's, which put what a table on the device says in the place of a router's choice."""
    model = of_family("qwen3_moe", num_hidden_layers=6)
    at = torch.zeros(1, dtype=torch.int64)
    fixed = begun(model)

    def choose(table: torch.Tensor, last: bool) -> Any:
        def hook(module: Any, args: Any) -> Any:
            x, ids, weights = args
            weights = weights * table.index_select(0, at)
            if last:
                at.add_(1).remainder_(7)
            return x, ids, weights

        return hook

    for number, module in enumerate(find_experts(model).values()):
        module.register_forward_pre_hook(choose(torch.rand(7, 1) * (1 + number), number == 5))
    check_steps(fixed, before=at)
    assert not part(fixed).why_not
    assert part(fixed)._graphs == 4, "the last layer's hook does more"


def test_another_thread_runs_it_as_it_is() -> None:
    """While this one compiles; and nothing stays behind."""
    model = of_family("qwen3_moe")
    fixed = begun(model)
    ids = torch.ones(1, 1, dtype=torch.int64)
    with torch.no_grad():
        expected, found = model(ids).logits, []

        def run() -> None:
            with torch.no_grad():
                found.append(model(ids).logits)

        with part(fixed).used(model, 0):
            assert all("forward" in vars(layer) for layer in model.model.layers)
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            assert not part(fixed)._graphs
            model(ids)
            assert part(fixed)._graphs == 3
    assert torch.equal(found[0], expected)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_was_compiled_can_go() -> None:
    model = of_family("qwen3_moe")
    check_steps(begun(model), 2, 1)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def breaks(graph: Any, inputs: Any) -> Any:
    raise ValueError("\nno compiler\nand more")


@pytest.mark.parametrize("how", ["compiler", "forward", "kinds"])
def test_what_cannot_be_compiled(how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One line, and the same logits."""
    model = of_family("qwen3_moe", num_hidden_layers=4)
    why = "no compiler"
    if how == "compiler":
        monkeypatch.setattr(compiled, "BACKEND", breaks)
        monkeypatch.setattr(compiled, "lookup_backend", lambda backend: backend)
    elif how == "forward":
        layer, why = model.model.layers[1], "a forward of its own"
        layer.forward = layer.forward
    else:
        monkeypatch.setattr(compiled, "KINDS", 2)
        why = "RecompileLimit"
        for number, layer in enumerate(model.model.layers):
            layer.input_layernorm.variance_epsilon = 1e-6 * (1 + number)
    fixed = begun(model)
    check_steps(fixed)
    assert why in part(fixed).why_not
    assert [why in line and "\n" not in line for line in ours(caplog) if UNCOMPILED in line] == [True]
    assert ("forward" in vars(model.model.layers[1])) == (how == "forward")


def test_warnings_as_errors_do_not_end_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor says something of the kind of every softmax whose reduction it splits."""

    def warns(graph: Any, inputs: Any) -> Any:
        warnings.warn("\nOnline softmax is disabled on the fly since Inductor\ndecides", stacklevel=2)
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", warns)
    monkeypatch.setattr(compiled, "lookup_backend", lambda backend: backend)
    model = of_family("qwen3_moe")
    fixed = begun(model)
    check_steps(fixed)
    assert part(fixed)._graphs and not part(fixed).why_not


def texts(model: Any, rows: int, new: int = NEW) -> torch.Tensor:
    """Greedily, of prompts of different lengths."""
    ids = torch.arange(rows * 5).view(rows, 5) * 7 % 50 + 3
    mask = torch.ones_like(ids)
    mask[1:, 0] = 0
    given = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    found: torch.Tensor = model.generate(
        **given, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found.cpu()


@pytest.mark.parametrize("strategy", ["cpu", "hybrid", "resident"])
@pytest.mark.parametrize("name", ["tiny", "gpt_oss"])
def test_the_same_text(
    name: str,
    strategy: str,
    device: Device,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of steps that are replayed, one text and several; with experts on the host, on the device and on both."""
    folder: Path = request.getfixturevalue(name)
    how: dict[str, Any] = {"cache": 0.5} if strategy == "hybrid" else {}
    stock, _ = freetoken.load(folder, dtype=torch.float32)
    model, _ = freetoken.load(folder, device=device, strategy=strategy, dtype=torch.float32, **how)
    for rows in (1, 3):
        caplog.clear()
        assert torch.equal(texts(model, rows), texts(stock, rows))
        lines = ours(caplog)
        assert [COMPILED in line for line in lines] == [True], f"once, and nothing is left uncaptured: {lines}"


def test_a_step_that_cannot_be_compiled_is_captured(
    tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", breaks)
    monkeypatch.setattr(compiled, "lookup_backend", lambda backend: backend)
    stock, _ = freetoken.load(tiny, dtype=torch.float32)
    model, _ = freetoken.load(tiny, device=device, strategy="resident", dtype=torch.float32)
    for rows in (1, 3):
        assert torch.equal(texts(model, rows), texts(stock, rows))
    assert [UNCOMPILED in line for line in ours(caplog)] == [True]


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_family("qwen3_moe")
    monkeypatch.setenv("FREETOKEN_COMPILE", "")
    assert begun(model)._compiled is None, "off unless it is asked for"
    monkeypatch.setenv("FREETOKEN_COMPILE", "yes")
    with pytest.raises(ConfigError, match="FREETOKEN_COMPILE"):
        begun(model)
