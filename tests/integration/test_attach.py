"""`attach`: experts of a model in memory go to banks, in the bits that `load` gives, or the model stays as it was."""

from __future__ import annotations

import copy
import gc
import io
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import freetoken
from freetoken import formats
from freetoken.banks import LayerBank, make_bank
from freetoken.errors import CapacityError, ConfigError, FormatError, FreeTokenError, UnsupportedError
from freetoken.executor import Activation, Executor
from freetoken.integration.attach import ModuleExperts
from freetoken.integration.operator import layer_of
from freetoken.memory.budget import Budget
from freetoken.memory.guard import Guard
from tests.integration.test_families import HYBRID
from tests.integration.test_families import REFUSED as REFUSED_FAMILIES
from tests.integration.test_logits import QUANTIZERS
from tests.integration.test_transformers import PROMPT, generate, in_child
from tests.support.checkpoints import qwen3_config
from tests.support.families import find_decorated, make_config, make_model
from tests.support.logits import check_logits, collect_logits

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES: dict[
    str, tuple[dict[str, Any], bool, bool]
] = {  # -> changes of the config; fused (in, out)?; g0 u0 g1 u1 ...?
    "aria_text": ({}, True, False),
    "deepseek_v3": ({}, False, False),
    "deepseek_v4": ({}, False, False),
    "ernie4_5_vl_moe": (REFUSED_FAMILIES["ernie4_5_vl_moe"][0], False, False),  # two sets of experts in a layer
    "glm4_moe": ({}, False, False),
    "gpt_oss": ({}, True, True),
    "granitemoe": ({}, False, False),
    "mixtral": ({}, False, False),
    "olmoe": ({}, False, False),
    "qwen3_moe": ({}, False, False),
    "qwen3_5_moe": ({"text_config": HYBRID}, False, False),
}
REFUSED = {  # family -> changes, words; the same as load's where it gets that far
    "gemma4": (REFUSED_FAMILIES["gemma4"][0], "Gemma4TextExperts applies an activation"),
    "inkling2": (REFUSED_FAMILIES["inkling2"][0], "Inkling2Experts applies an activation"),
    "llama4": ({}, "Llama4.* has no experts module"),
    "longcat_flash": ({"zero_expert_num": 0}, "LongcatFlashForCausalLM has no experts module"),
    "muse_spark": (REFUSED_FAMILIES["muse_spark"][0], "MuseSparkExperts: a norm after each expert"),
    "nemotron_h": ({}, "NemotronHExperts has no gate_up_proj"),
}


@pytest.fixture
def qwen3() -> Any:
    """Stock, random, in fp32."""
    return make_model(make_config("qwen3_moe", {}))


def experts_of(model: Any) -> list[torch.nn.Module]:
    return [m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "_apply_gate")]


def records(model: Any) -> list[Any]:
    return [layer_of(m).bank.records for m in experts_of(model)]


def requantize(model: Any, change: Callable[..., torch.Tensor], transposed: bool, interleaved: bool) -> None:
    """Each expert matrix of a stock model replaced by what `change` makes of it, (rows, width) at a time."""
    with torch.no_grad():
        for module in experts_of(model):
            for e in range(len(module.gate_up_proj)):
                both, down = (p[e].T if transposed else p[e] for p in (module.gate_up_proj, module.down_proj))
                half = len(both) // 2
                for rows in (both[0::2], both[1::2]) if interleaved else (both[:half], both[half:]):
                    rows.copy_(change(rows.contiguous()))
                down.copy_(change(down.contiguous()))


def make_family(family: str, changes: dict[str, Any]) -> Any:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return make_model(make_config(family, changes))


# --- right -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_family(family: str, fmt: str) -> None:
    changes, transposed, interleaved = FAMILIES[family]
    model = make_family(family, changes)
    if family not in find_decorated():
        pytest.skip(f"transformers {transformers.__version__} dispatches no experts of {family}")
    stock = make_family(family, changes)
    requantize(stock, QUANTIZERS[fmt], transposed, interleaved)
    assert freetoken.attach(model, expert_format=fmt, threads=1) is model
    check_logits(model, stock)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_block", "mxfp4", "nvfp4", "q4_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["deepseekv3", "gptoss", "mixtral", "qwen3moe"])
def test_the_same_bits_as_by_load(shared_dir: Path, name: str, dtype: torch.dtype, fmt: str) -> None:
    folder = shared_dir / "checkpoints" / f"bf16-transformers-{name}"
    attached = freetoken.attach(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), expert_format=fmt
    )
    loaded, _ = freetoken.load(folder, dtype=dtype, expert_format=fmt)
    for ours, theirs in zip(records(attached), records(loaded), strict=True):
        assert (ours == theirs).all()
    assert torch.equal(collect_logits(attached, 96), collect_logits(loaded, 96))
    assert attached.state_dict().keys() == loaded.state_dict().keys()
    assert attached.config.to_dict() == loaded.config.to_dict()
    assert attached.is_quantized and attached.quantization_method == loaded.quantization_method
    facts = freetoken.report(attached)
    assert facts == freetoken.report(loaded)
    assert facts.formats == (fmt,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_wide_weights_are_rounded_as_by_load(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = make_model(make_config(family, {}))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.01)  # now bf16 holds hardly any of them
    model = model.to(dtype)
    model.save_pretrained(tmp_path)
    loaded, _ = freetoken.load(tmp_path, dtype=dtype, expert_format="nvfp4")
    for ours, theirs in zip(records(freetoken.attach(model, expert_format="nvfp4")), records(loaded), strict=True):
        assert (ours == theirs).all()


def test_bf16_experts_are_kept_without_a_name(qwen3: Any) -> None:
    stock = copy.deepcopy(qwen3)
    model = freetoken.attach(qwen3.to(torch.bfloat16))
    assert freetoken.report(model).formats == ("bf16",)
    weights = experts_of(stock)[0].gate_up_proj[3].detach()
    assert torch.equal(torch.from_numpy(layer_of(experts_of(model)[0]).bank.get(3).gate.dequantize()), weights[:32])


def test_it_lives_as_a_loaded_model_does(qwen3: Any) -> None:
    stock = copy.deepcopy(qwen3)
    model = freetoken.attach(qwen3.train(), expert_format="bf16", threads=1)
    assert generate(model, max_new_tokens=30) == generate(stock, max_new_tokens=30)
    assert model.get_experts_implementation() == {"": "freetoken"}
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert not [n for n in model.state_dict() if ".experts" in n]
    assert "Qwen3MoeForCausalLM: 2 expert layers of 4 experts, top 2" in str(freetoken.report(model))
    for action in (lambda: copy.deepcopy(model), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
            action()
    with pytest.raises(ValueError, match="not supported for quantized model"):
        model.half()


def test_saving_is_refused(qwen3: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be saved"):
        freetoken.attach(qwen3, expert_format="q8_0").save_pretrained(tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_use_after_fork_is_refused(qwen3: Any) -> None:
    model = freetoken.attach(qwen3, expert_format="bf16", threads=1)
    assert in_child(lambda: model(input_ids=PROMPT)).startswith("UnsupportedError: this model was loaded before a fork")


def test_a_model_of_the_same_config_object_stays_as_it_is() -> None:
    config = make_config("qwen3_moe", {})
    one, other = make_model(config), make_model(config)
    before = collect_logits(other, 96)
    freetoken.attach(one, expert_format="mxfp4", threads=1)
    assert torch.equal(collect_logits(other, 96), before)
    assert other.get_experts_implementation() == {"": "eager"}
    assert one.get_experts_implementation() == {"": "freetoken"}


def test_configs_of_parts_stay_parts_of_the_whole() -> None:
    model = freetoken.attach(make_family("qwen3_5_moe", {"text_config": HYBRID}), expert_format="bf16", threads=1)
    if hasattr(model, "visual") or hasattr(model.model, "language_model"):
        assert model.model.language_model.config is model.config.text_config
    assert {module.config._experts_implementation for module in experts_of(model)} == {"freetoken"}


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_layer_is_freed_before_the_next_bank_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(make_config("qwen3_moe", {"num_hidden_layers": 4}))
    parameters = [[weakref.ref(p) for p in module.parameters()] for module in experts_of(model)]
    alive: list[int] = []

    def counting(*arguments: Any) -> LayerBank:
        alive.append(sum(any(ref() is not None for ref in layer) for layer in parameters))
        return make_bank(*arguments)

    monkeypatch.setattr("freetoken.integration.attach.make_bank", counting)
    freetoken.attach(model, expert_format="nvfp4", threads=1)
    assert alive == [4, 3, 2, 1]
    gc.collect()
    assert not [ref for layer in parameters for ref in layer if ref() is not None]


def test_what_is_asked_of_memory(qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bank at a time: those that come later lie where parameters were; q8_0 banks are smaller than those."""
    before = collect_logits(qwen3, 96)
    layout = freetoken.formats.record.RecordLayout(formats.get("q8_0"), 64, 32)
    bank = 4 * layout.nbytes + ModuleExperts("", experts_of(qwen3)[1], layout, 4, Activation("silu")).transient_bytes
    monkeypatch.setenv("FREETOKEN_LOAD_MIN_AVAILABLE", "0")
    room = Budget(bank - 1, "some/memory.max")
    monkeypatch.setattr("freetoken.memory.budget.available", lambda *args, **kwargs: room)
    with pytest.raises(
        CapacityError, match=r"attaching the experts of Qwen3MoeForCausalLM .*some/memory\.max"
    ) as error:
        freetoken.attach(qwen3, expert_format="q8_0")
    assert error.value.needed == bank  # type: ignore[attr-defined]
    assert torch.equal(collect_logits(qwen3, 96), before)
    room = Budget(bank, "some/memory.max")
    freetoken.attach(qwen3, expert_format="q8_0")


def test_memory_that_runs_short_stops_it(qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stops a load; what was not moved is, the next time."""
    before, checks = collect_logits(qwen3, 96), iter(range(100))

    def check(self: Guard) -> None:
        if next(checks) == 4:
            raise CapacityError("memory is short", needed=1, available=0, where="here")

    with monkeypatch.context() as patch:
        patch.setattr(Guard, "check", check)
        with pytest.raises(CapacityError, match="memory is short"):
            freetoken.attach(qwen3, expert_format="bf16", threads=1)
    freetoken.attach(qwen3, expert_format="bf16")
    torch.testing.assert_close(collect_logits(qwen3, 96), before, atol=1e-2, rtol=0)


# --- refused, and then as it was -------------------------------------------------------------------------------------


def put(model: Any, name: str, parameter: Any) -> None:
    setattr(experts_of(model)[1], name, parameter)


def tie(model: Any) -> None:
    first, second = experts_of(model)
    second.down_proj = first.down_proj


def tie_data(model: Any) -> None:
    first, second = experts_of(model)
    second.down_proj = torch.nn.Parameter(first.down_proj.data)


def tie_outside(model: Any) -> None:
    model.extra = torch.nn.Module()
    model.extra.kept = experts_of(model)[1].down_proj


class PackedParameter(torch.nn.Parameter):
    """As bitsandbytes' are."""


def spoil(value: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        with torch.no_grad():
            experts_of(model)[1].down_proj[2, 5, 7] = value

    return change


def widen(model: Any) -> None:
    module = experts_of(model)[1]
    module.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 48, 64))
    module.down_proj = torch.nn.Parameter(torch.zeros(4, 64, 24))


CASES: dict[str, tuple[Callable[[Any], object], type[FreeTokenError], str]] = {
    "meta": (lambda m: put(m, "down_proj", torch.nn.Parameter(torch.empty(4, 64, 32, device="meta"))), UnsupportedError,
             r"layers\.1\.mlp\.experts\.down_proj \(Qwen3MoeExperts\) is on the meta device"),
    "packed": (lambda m: put(m, "down_proj", PackedParameter(torch.zeros(4, 64, 32))), UnsupportedError,
               "is a .*plain tensors, neither packed nor sharded"),
    "fp8": (lambda m: put(m, "down_proj", torch.nn.Parameter(torch.zeros(4, 64, 32).to(torch.float8_e4m3fn), False)),
            UnsupportedError, "is torch.float8_e4m3fn; attach"),
    "fp64": (lambda m: put(m, "down_proj", torch.nn.Parameter(torch.zeros(4, 64, 32).double())), UnsupportedError,
             "is torch.float64; attach"),
    "a quantizer": (lambda m: setattr(m, "hf_quantizer", transformers.quantizers.AutoHfQuantizer.from_config(
                        transformers.FineGrainedFP8Config())), UnsupportedError, r"is quantized \(fp8\)"),
    "one parameter in two modules": (tie, UnsupportedError, r"layers\.0\.mlp\.experts and .*layers\.1.* share"),
    "two parameters of one tensor": (tie_data, UnsupportedError, r"layers\.0\.mlp\.experts and .*layers\.1.* share"),
    "a tie with something else": (tie_outside, UnsupportedError, "extra and .* share"),
    "another parameter": (lambda m: put(m, "scale", torch.nn.Parameter(torch.ones(4))), UnsupportedError, "'scale'"),
    "no down": (lambda m: put(m, "down_proj", None), UnsupportedError, "expected .*'down_proj'"),
    "a bias that is not there": (lambda m: put(m, "has_bias", True), UnsupportedError, "gate_up_proj_bias"),
    "a part of the experts": (lambda m: put(m, "num_experts", 8), UnsupportedError, "for 8 experts, all of them in"),
    "expert parallel": (lambda m: put(m, "_is_expert_parallel", True), UnsupportedError, "all of them in this process"),
    "tensor parallel": (lambda m: setattr(m, "_tp_size", 2), UnsupportedError, "split over several processes"),
    "another activation": (lambda m: put(m, "act_fn", torch.nn.GELU()), UnsupportedError, "applies an activation"),
    "no gate": (lambda m: put(m, "has_gate", False), UnsupportedError, "without a gate"),
    "NaN": (spoil(float("nan")), FormatError, r"layers\.1\.mlp\.experts: down of expert 2: row 5 holds a NaN"),
    "infinite": (spoil(float("inf")), FormatError, "down of expert 2: row 5 holds a NaN or infinite"),
    "too large for bf16": (spoil(3.4e38), FormatError, "down of expert 2: row 5 holds a NaN or infinite"),
    "a width": (widen, FormatError, "nvfp4: the expert width is 24"),
}  # fmt: skip


def state(model: Any) -> dict[str, Any]:
    """Everything that attaching changes, by identity where there is one."""
    return {
        "parameters": [(n, id(p), p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)],
        "configs": [id(m.__dict__.get("config")) for m in model.modules()],
        "config": model.config.to_dict(),
        "implementation": model.get_experts_implementation(),
        "training": model.training,
        "quantized": getattr(model, "is_quantized", None),
        "hooks": [len(m._forward_pre_hooks) for m in model.modules()],
        "layers": [layer_of(m) for m in model.modules()],
    }


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused_changes_nothing(qwen3: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    change, error, words = CASES[case]
    change(qwen3)
    before = state(qwen3)
    monkeypatch.setattr("freetoken.integration.attach.make_bank", lambda *args: pytest.fail("a bank was made"))
    with pytest.raises(error, match=words) as caught:
        freetoken.attach(qwen3.train(), expert_format="nvfp4")
    assert "\n" not in str(caught.value)
    assert state(qwen3) == before | {"training": True}


@pytest.mark.parametrize("bias", ["gate_up_proj_bias", "down_proj_bias"])
def test_a_bias_that_is_no_number(bias: str) -> None:
    model = make_model(make_config("gpt_oss", {}))
    with torch.no_grad():
        getattr(experts_of(model)[1], bias)[3, 9] = torch.inf
    before = state(model)
    with pytest.raises(FormatError, match="of expert 3: the bias holds a NaN or infinite number"):
        freetoken.attach(model, expert_format="nvfp4")
    assert state(model) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "float32 weights, which no format holds whole; name the expert_format"),
        ({"expert_format": "q9_9"}, "unknown expert format 'q9_9'"),
        ({"expert_format": "nvfp4", "threads": 0}, "threads=0"),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be(qwen3: Any, arguments: dict[str, Any], words: str) -> None:
    before = collect_logits(qwen3, 96)
    with pytest.raises(ConfigError, match=words):
        freetoken.attach(qwen3, **arguments)
    assert torch.equal(collect_logits(qwen3, 96), before)


def test_a_model_in_fp64(qwen3: Any) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match="float64"):
        freetoken.attach(qwen3.double(), expert_format="nvfp4")


def test_what_is_no_model_of_transformers(qwen3: Any) -> None:
    for other in (torch.nn.Linear(2, 2), experts_of(qwen3)[0], None, "a/path"):
        with pytest.raises(ConfigError, match="takes a model of transformers"):
            freetoken.attach(other)


def test_a_model_without_experts() -> None:
    small = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no experts module"):
        freetoken.attach(transformers.LlamaForCausalLM(small))


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be(family: str) -> None:
    changes, words = REFUSED[family]
    model = make_family(family, changes)
    before = state(model)
    with pytest.raises(UnsupportedError, match=words):
        freetoken.attach(model, expert_format="bf16")
    assert state(model) == before


def test_experts_quantized_by_transformers() -> None:
    """FP8Experts has other parameters under the same names, and scales beside them."""
    model = make_model(make_config("qwen3_moe", {}))
    for layer in model.model.layers:
        layer.mlp.experts = FP8Experts(model.config, block_size=(32, 32))
    with pytest.raises(UnsupportedError, match=r"no experts module|float8"):
        freetoken.attach(model, expert_format="nvfp4")


def test_experts_offloaded_by_accelerate(qwen3: Any) -> None:
    accelerate.cpu_offload(qwen3)
    with pytest.raises(UnsupportedError, match="is on the meta device: load its weights first, and without offloading"):
        freetoken.attach(qwen3, expert_format="nvfp4")


def test_twice(qwen3: Any, tiny: Path) -> None:
    for model in (freetoken.attach(qwen3, expert_format="nvfp4"), freetoken.load(tiny)[0]):
        before = records(model)
        with pytest.raises(
            ConfigError, match="of this Qwen3MoeForCausalLM lie in banks already; for another format load"
        ):
            freetoken.attach(model, expert_format="mxfp4")
        assert all(now is then for now, then in zip(records(model), before, strict=True))


# --- interrupted -----------------------------------------------------------------------------------------------------


def interrupt_at(monkeypatch: pytest.MonkeyPatch, layer: int, error: type[BaseException]) -> None:
    bind, calls = Executor.bind, []

    def bind_or_not(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == layer:
            raise error
        return bind(*arguments)

    monkeypatch.setattr(Executor, "bind", bind_or_not)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupted_before_the_first_layer_is_done(
    qwen3: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    before, logits = state(qwen3), collect_logits(qwen3, 96)
    interrupt_at(monkeypatch, 1, error)
    with pytest.raises(error):
        freetoken.attach(qwen3, expert_format="nvfp4")
    assert state(qwen3) == before
    assert torch.equal(collect_logits(qwen3, 96), logits)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupted_later_it_says_so_and_can_be_finished(
    qwen3: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    whole = freetoken.attach(copy.deepcopy(qwen3), expert_format="nvfp4", threads=1)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2, error)
        with pytest.raises(error):
            freetoken.attach(qwen3, expert_format="nvfp4")
    with pytest.raises(FreeTokenError, match="if attach was interrupted, call it again to finish"):
        qwen3(input_ids=PROMPT)
    freetoken.attach(qwen3, expert_format="nvfp4", threads=1)
    assert torch.equal(collect_logits(qwen3, 96), collect_logits(whole, 96))
    assert not [n for n in qwen3.state_dict() if ".experts" in n]


@pytest.mark.parametrize("step", ["drop_parameters", "finish"])
def test_interrupted_at_the_end_it_says_so_and_can_be_finished(
    qwen3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str
) -> None:
    whole = freetoken.attach(copy.deepcopy(qwen3), expert_format="nvfp4", threads=1)
    module, calls = sys.modules["freetoken.integration.attach"], []
    real = getattr(module, step)

    def do_or_not(*arguments: Any) -> Any:
        calls.append(1)
        if step == "finish" or len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, step, do_or_not)
        with pytest.raises(KeyboardInterrupt):
            freetoken.attach(qwen3, expert_format="nvfp4", threads=1)
    with pytest.raises(FreeTokenError, match="if attach was interrupted, call it again to finish"):
        qwen3(input_ids=PROMPT)
    with pytest.raises(UnsupportedError, match="cannot be saved"):
        qwen3.save_pretrained(tmp_path)
    freetoken.attach(qwen3, expert_format="nvfp4", threads=1)
    assert torch.equal(collect_logits(qwen3, 96), collect_logits(whole, 96))
    assert not [n for n in qwen3.state_dict() if ".experts" in n]
    assert not any(p.requires_grad for p in qwen3.parameters())


def test_the_wide_weights_are_named(qwen3: Any) -> None:
    qwen3.to(torch.bfloat16)
    experts_of(qwen3)[1].down_proj.data = experts_of(qwen3)[1].down_proj.data.float()
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj holds torch\.float32 weights"):
        freetoken.attach(qwen3)


def test_a_config_from_the_hub_needs_nothing_else() -> None:
    """A model from a plain config of transformers, with its default experts function and in training mode."""
    config = transformers.Qwen3MoeConfig(**{k: v for k, v in qwen3_config().items() if k != "model_type"})
    model = transformers.Qwen3MoeForCausalLM(config)
    freetoken.attach(model, expert_format="fp8_block")
    assert len(generate(model)[0]) == 18
