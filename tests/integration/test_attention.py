"""Steps attend by the kernel, with transformers' results, and transformers' own is what everybody else has."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

import freetoken
import freetoken.gpu.attention as kernel
from freetoken.device.base import Device
from freetoken.errors import ConfigError
from freetoken.integration import attention, compiled
from freetoken.integration.attention import implementation, step_attention
from freetoken.integration.fixed_cache import FixedForward, why_not_fixed
from tests.integration.test_compiled import begun, of_family, part, texts
from tests.integration.test_compiled import check_steps as check_compiled
from tests.integration.test_fixed_cache import PROMPT, TAKEN, WINDOW, check_steps, family
from tests.support.devices import DEVICES, open_for_test, with_interpreter

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, by its own compiler
]

WIDE = {"gemma4_text": 1}
"""Layers of a family whose heads are wider than the kernel takes."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(attention, "INTERPRETED", True)
    caplog.set_level(logging.INFO, "freetoken.integration.attention")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The queries of all calls of the kernel from steps."""
    attend, seen = kernel.attend, list[torch.Tensor]()

    def count(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        if getattr(attention._stepping, "is_on", False):  # else a function is tried, or a recorded step done again
            seen.append(query)
        return attend(query, *rest)

    monkeypatch.setattr(kernel, "attend", count)
    return seen


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    yield from open_for_test(request.param, lambda: with_interpreter(5))


@pytest.fixture
def on(device: Device) -> torch.device:
    return device.torch_device


@pytest.mark.parametrize("name", TAKEN)
def test_the_logits_of_transformers_own(name: str, on: torch.device, calls: list[torch.Tensor]) -> None:
    """Of every family that is captured, with padding on the left, beyond the window, and a row that is no sequence."""
    model = family(name, **({TAKEN[name]: WINDOW} if TAKEN[name] else {})).to(on)
    check_steps(model, 2, PROMPT + 10)
    assert len(calls) == 2 * (len(model.model.layers) - WIDE.get(name, 0))


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_what_the_user_chose_stands_in_the_config(name: str, on: torch.device, calls: list[torch.Tensor]) -> None:
    """But while a step runs, also where that fails; and is what another thread has meanwhile."""
    model = family("qwen3_moe").to(on)
    model.set_attn_implementation(name)
    fixed, ids = FixedForward(model, 1, 16), torch.tensor([[5, 6, 7], [7, 8, 9]], device=on)[:, :1]
    with torch.no_grad():
        expected, found = model(ids).logits, list[Any]()

        def elsewhere() -> None:
            with torch.no_grad():
                found.extend((model(ids).logits, why_not_fixed(model), implementation(model.config)))

        def seen(module: Any, args: Any) -> None:
            if threading.current_thread() is threading.main_thread() and not found:
                names.append(model.config._attn_implementation)
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()
                if len(names) == 1:
                    raise InterruptedError

        names = list[str]()
        hook = model.model.layers[0].register_forward_pre_hook(seen)
        with pytest.raises(InterruptedError):
            fixed.forward(1, 16)
        assert names == [f"freetoken_{name}"] and not calls
        assert torch.equal(found[0], expected) and found[1:] == [None, name]
        assert model.config._attn_implementation == name
        hook.remove()
        fixed.forward(1, 16)
        assert len(calls) == 2 and model.config._attn_implementation == name


def test_another_attention_that_is_chosen_during_a_step_stays(on: torch.device) -> None:
    model = family("qwen3_moe").to(on)
    fixed = FixedForward(model, 1, 16)
    model.model.norm.register_forward_hook(lambda *_: model.set_attn_implementation("eager"))
    with torch.no_grad():
        fixed.forward(1, 16)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("name", "backend"), [("qwen3_moe", "aot_eager"), ("gpt_oss", "inductor")])
def test_compiled_steps(name: str, backend: str, calls: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece, and layers of a kind share a graph."""
    with_interpreter(0)
    monkeypatch.setenv("FREETOKEN_COMPILE", "on")
    monkeypatch.setattr(compiled, "BACKEND", backend)
    monkeypatch.setattr(compiled, "OPTIONS", {})
    model = of_family(name, num_hidden_layers=4)
    fixed = begun(model)
    check_compiled(fixed, steps=2)
    assert not part(fixed).why_not
    assert part(fixed)._graphs == 3, "layers, norm and rotary embedding"
    assert len(calls) == 4 * 2 * 2


@pytest.mark.parametrize("name", ["tiny", "gpt_oss"])
def test_the_same_text(
    name: str, device: Device, request: pytest.FixtureRequest, calls: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of steps that are replayed."""
    monkeypatch.setenv("FREETOKEN_GPU_RESERVE", "0")
    monkeypatch.setattr("freetoken.decode.graph.SHORTEST", 16)
    folder: Path = request.getfixturevalue(name)
    stock, _ = freetoken.load(folder, dtype=torch.float32)
    model, _ = freetoken.load(folder, device=device, strategy="cpu", dtype=torch.float32)
    for rows in (1, 3):
        assert torch.equal(texts(model, rows, 4), texts(stock, rows, 4))
        assert calls and calls[-1].shape[0] == (1 if rows == 1 else 4)


# -- what the kernel is not for


def plain(*args: Any, **given: Any) -> Any:
    return modeling_mixtral.eager_attention_forward(*args, **given)


def scaled(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **given: Any) -> Any:
    return plain(module, query, key, value, mask, scaling=scaling * 1.5, **given)


def unknown(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
    return plain(module, query, key, value, mask + module.slopes, **given)


@pytest.mark.parametrize(
    ("function", "why"), [(scaled, "computes something else"), (unknown, "asks for more"), (None, "not found")]
)
@pytest.mark.parametrize("dtype", kernel.DTYPES, ids=str)
def test_functions_that_do_something_else(
    function: Any, why: str, dtype: torch.dtype, on: torch.device, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    model = family("qwen3_moe").to(on, dtype)
    model.set_attn_implementation("eager")
    assert step_attention(model) is not None and not caplog.messages
    monkeypatch.setattr(attention, "_is_of_transformers", lambda call: True)
    monkeypatch.setattr(modeling_qwen3_moe, "eager_attention_forward", function)
    assert step_attention(model) is None
    assert len(caplog.messages) == 1 and why in caplog.messages[0]
    assert "transformers' own eager: that of Qwen3MoeAttention" in caplog.messages[0]


def test_what_is_not_transformers_own(
    on: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Is not exchanged, even if it does the same on a try: a function, a class, a forward."""

    class Own(modeling_qwen3_moe.Qwen3MoeAttention):  # type: ignore[misc]
        pass

    def refused(why: str) -> bool:
        caplog.clear()
        return step_attention(model) is None and why in caplog.text

    model = family("qwen3_moe").to(on)
    attending = model.model.layers[0].self_attn
    with monkeypatch.context() as patch:
        model.set_attn_implementation("eager")
        patch.setattr(modeling_qwen3_moe, "eager_attention_forward", plain)
        assert refused("that of Qwen3MoeAttention is not transformers' own")
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", functools.wraps(ALL_ATTENTION_FUNCTIONS["sdpa"])(plain))
        model.set_attn_implementation("sdpa")
        assert refused("that of Qwen3MoeAttention is not transformers' own")
    assert step_attention(model) is not None
    with monkeypatch.context() as patch:
        patch.setattr(attending, "__class__", Own)
        assert refused("Own is not transformers' own, or depends on what it is called")
    with monkeypatch.context() as patch:
        patch.setitem(vars(attending), "forward", attending.forward)
        assert refused("a forward of its own")
    assert step_attention(model) is not None


@pytest.mark.parametrize("name", ["minimax_m3_vl.MiniMaxM3VLAttention", "deepseek_v32.DeepseekV32Attention"])
def test_classes_that_ask_how_their_attention_is_called(name: str) -> None:
    family, _, kind = name.partition(".")
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    assert not attention._looks_up_only(getattr(module, kind))
    assert attention._looks_up_only(modeling_gemma4.Gemma4TextAttention)


def test_sinks_that_a_function_leaves_out(on: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """As sdpa does: the kernel would join them."""
    model = family("gpt_oss").to(on)
    assert step_attention(model) is not None
    model.config._attn_implementation = "sdpa"
    assert step_attention(model) is None
    assert "computes something else" in caplog.text


@pytest.mark.parametrize(
    "asked",
    [
        {"dropout": 0.5}, {"scaling": None}, {"softcap": 3.0}, {"s_aux": 1.0}, {"position_bias": 1.0}, {"anything": 1},
        {"mask": None}, {"mask": "bool"}, {"mask": "heads"}, {"tokens": 2}, {"width": 512}, {"dtype": torch.float64},
        {"sinks": 3},
    ],
    ids=str,
)  # fmt: skip
def test_calls_that_ask_for_more(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Get transformers' function, with all that was given."""
    with_interpreter(0)
    model = family("qwen3_moe")
    model.set_attn_implementation("eager")
    module = model.model.layers[0].self_attn
    used = step_attention(model)
    assert used is not None
    found = list[Any]()
    own = attention._functions["eager", type(module)]

    def own_function(*args: Any, **given: Any) -> str:
        found.append((args, given))
        return "transformers'"

    monkeypatch.setitem(attention._functions, ("eager", type(module)), own._replace(call=own_function))
    tokens, width = asked.get("tokens", 1), asked.get("width", 16)
    query, key = (torch.ones(2, heads, n, width, dtype=asked.get("dtype")) for heads, n in ((4, tokens), (2, 9)))
    mask: Any = torch.zeros(2, 1, tokens, 9)
    if "mask" in asked:
        mask = {"bool": mask == 0, "heads": mask.expand(-1, 4, -1, -1)}.get(asked["mask"])
    given = {"scaling": 0.25, "dropout": 0.0, "sliding_window": None, "position_bias": None, "use_cache": True}
    with used.used(model):
        call = ALL_ATTENTION_FUNCTIONS.get_interface(model.config._attn_implementation, None)
        few = torch.ones(2, 2, 9, 16)
        out = call(module, torch.ones(2, 4, 1, 16), few, few, torch.zeros(2, 1, 1, 9), **given)
        assert out[0].shape == (2, 1, 4, 16) and out[1] is None and not found
        given |= {
            name: value for name, value in asked.items() if name not in ("mask", "tokens", "width", "dtype", "sinks")
        }
        if "sinks" in asked:
            module.sinks = torch.nn.Parameter(torch.zeros(asked["sinks"]))
        assert call(module, query, key, key, mask, **given) == "transformers'"
    args, kwargs = found[0]
    assert args[1] is query and args[4] is mask and kwargs == given


def test_outside_of_a_step(on: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks it up by the name that stands there meanwhile, as another thread may, has transformers' own."""
    model = family("qwen3_moe").to(on)
    assert step_attention(model) is not None
    monkeypatch.setattr(kernel, "attend", None)
    query, few = torch.ones(2, 4, 1, 16, device=on), torch.ones(2, 2, 9, 16, device=on)
    call = ALL_ATTENTION_FUNCTIONS.get_interface("freetoken_sdpa", None)
    out, _ = call(
        model.model.layers[0].self_attn, query, few, few, torch.zeros(2, 1, 1, 9, device=on), scaling=0.25, dropout=0.0
    )
    assert out.shape == (2, 1, 4, 16)


def test_softcap(monkeypatch: pytest.MonkeyPatch, calls: list[torch.Tensor]) -> None:
    """Is the kernel's where the function that it stands for knows it."""
    with_interpreter(0)
    capped = modeling_gemma4.eager_attention_forward
    monkeypatch.setattr(modeling_qwen3_moe, "eager_attention_forward", capped)
    model = family("qwen3_moe")
    model.set_attn_implementation("eager")
    used, module = step_attention(model), model.model.layers[0].self_attn
    assert used is not None
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, n, 16, generator=random) * 3 for heads, n in ((4, 1), (2, 9), (2, 9)))
    given: dict[str, Any] = {"attention_mask": torch.zeros(1, 1, 1, 9), "scaling": 0.25, "softcap": 3.0}
    with used.used(model):
        call = ALL_ATTENTION_FUNCTIONS.get_interface(model.config._attn_implementation, None)
        found, expected = (function(module, query, key, value, **given)[0] for function in (call, capped))
    assert len(calls) == 1
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_kernel_that_fails(
    on: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Is not used."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernel, "attend", fail)
    monkeypatch.setattr(attention, "_try", attention._try.__wrapped__)  # what was tried before is remembered
    assert step_attention(family("qwen3_moe").to(on)) is None
    assert "has a kernel that fails: RuntimeError: no compiler" in caplog.text


def test_an_implementation_that_is_chosen_later(on: torch.device, calls: list[torch.Tensor]) -> None:
    """Was not tried, so it stays as it is."""
    model = family("qwen3_moe").to(on)
    fixed = FixedForward(model, 1, 16)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        fixed.forward(1, 16)
        assert not calls
        model.set_attn_implementation("sdpa")
        fixed.forward(1, 16)
    assert len(calls) == 2


def test_where_there_is_no_interpreter_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "INTERPRETED", False)
    assert step_attention(family("qwen3_moe")) is None


def test_the_setting(on: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("qwen3_moe").to(on)
    assert FixedForward(model, 1, 16)._attention is not None
    monkeypatch.setenv("FREETOKEN_ATTENTION", "transformers")
    assert FixedForward(model, 1, 16)._attention is None
    monkeypatch.setenv("FREETOKEN_ATTENTION", "ours")
    with pytest.raises(ConfigError, match="FREETOKEN_ATTENTION"):
        FixedForward(model, 1, 16)
