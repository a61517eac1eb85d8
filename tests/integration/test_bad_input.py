"""Whatever is wrong with a checkpoint or an argument: one line, our class, naming file and tensor, and no bank yet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import freetoken
from freetoken import formats
from freetoken.checkpoint.inspect import transient_bytes
from freetoken.checkpoint.safetensors import open_checkpoint
from freetoken.checkpoint.scan import scan
from freetoken.errors import CapacityError, CheckpointError, ConfigError, FormatError, FreeTokenError, UnsupportedError
from freetoken.memory.budget import Budget
from tests.support.checkpoints import (
    DIALECTS,
    EXPERTS,
    HIDDEN,
    WIDTH,
    Tensors,
    bf16,
    forbid_banks,
    fp32,
    matrix,
    qwen3_config,
    qwen3_tensors,
    write_folder,
    write_qwen3,
    write_sharded,
    write_tokenizer,
)


@pytest.fixture(autouse=True)
def _no_banks(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_banks(monkeypatch)


def check_refused(folder: Path | str, error: type[FreeTokenError], *words: str, **arguments: Any) -> FreeTokenError:
    with pytest.raises(error) as caught:
        freetoken.load(folder, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return caught.value


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", qwen3_config(), qwen3_tensors())
    (folder / "model-00002-of-00002.safetensors").unlink()
    check_refused(folder, CheckpointError, "model-00002-of-00002.safetensors", "download it")


def test_a_truncated_shard(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", qwen3_config(), qwen3_tensors())
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    check_refused(folder, CheckpointError, str(file), "truncated")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    check_refused(tmp_path / "absent", CheckpointError, "absent does not exist")
    check_refused("no such name", CheckpointError, "no such name does not exist")


def test_a_hub_id_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    check_refused(
        "nobody/nothing", CheckpointError, "nobody/nothing is neither a local folder nor available", "HF_HUB_OFFLINE"
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer(tmp_path: Path, name: str) -> None:
    folder = write_qwen3(tmp_path / "m")
    write_tokenizer(folder)
    (folder / name).write_text('{"a": ')
    check_refused(folder, CheckpointError, str(folder), "tokenizer cannot be used")


# --- tensors ---------------------------------------------------------------------------------------------------------

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.down_proj"


def put(name: str, tensor: Any) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def zeros(*shape: int) -> Any:
    return bf16(np.zeros(shape))


TENSORS: dict[str, tuple[str, Callable[[Tensors], object], tuple[str, ...]]] = {
    "dense missing": ("bf16", drop(Q_PROJ), (f"first {Q_PROJ!r}", "missing")),
    "norm missing": ("bf16", drop("model.norm.weight"), ("first 'model.norm.weight'",)),
    "router missing": ("modelopt", drop("model.layers.1.mlp.gate.weight"), ("'model.layers.1.mlp.gate.weight'",)),
    "embeddings missing": ("ct-mxfp4", drop("model.embed_tokens.weight"), ("'model.embed_tokens.weight'",)),
    "dense of another shape": ("bf16", put(Q_PROJ, zeros(64, 32)), (Q_PROJ, "[64, 32]", "[64, 64]")),
    "dense of one dimension": ("bf16", put(Q_PROJ, zeros(4096)), (Q_PROJ, "[4096]", "[64, 64]")),
    "router of another shape": ("bf16", put("model.layers.1.mlp.gate.weight", zeros(5, 64)), ("[5, 64]", "[4, 64]")),
    "dense of integers": ("bf16", put(Q_PROJ, ("I32", np.zeros((64, 64), np.int32))), (Q_PROJ, "is I32")),
    "dense of bytes": (
        "modelopt",
        put(Q_PROJ, ("U8", np.zeros((64, 32), np.uint8))),
        ("self_attn.q_proj", "no scales"),
    ),
    "dense of bare fp8": ("bf16", put(Q_PROJ, ("F8_E4M3", np.zeros((64, 64), np.uint8))), (Q_PROJ, "is F8_E4M3")),
    "norm of integers": ("bf16", put("model.norm.weight", ("I64", np.ones(64, np.int64))), ("is I64",)),
    "expert missing": ("bf16", drop(f"{EXPERT}.weight"), ("model.layers.1.mlp.experts", "expert 2 has no down_proj")),
    "expert of another shape": ("bf16", put(f"{EXPERT}.weight", zeros(HIDDEN, 16)), (EXPERT, "[64, 16]", "[64, 32]")),
    "expert of integers": ("bf16", put(f"{EXPERT}.weight", ("I8", np.zeros((64, 32), np.int8))), (EXPERT, "is I8")),
    "scale missing": ("modelopt", drop(f"{EXPERT}.weight_scale"), (EXPERT, "no scales (weight_scale)")),
    "global missing": ("modelopt", drop(f"{EXPERT}.weight_scale_2"), (EXPERT, "no global (weight_scale_2)")),
    "global of zero": ("modelopt", put(f"{EXPERT}.weight_scale_2", fp32(0)), (f"{EXPERT}.weight_scale_2", "0.0")),
    "divisor of zero": ("ct-nvfp4", put(f"{EXPERT}.weight_global_scale", fp32(0, shape=(1,))), (EXPERT, "0.0")),
    "scale of NaN": ("modelopt", put(f"{EXPERT}.weight_scale", ("F8_E4M3", np.full((64, 2), 0x7F, "u1"))), ("NaN",)),
    "scale of 255": ("ct-mxfp4", put(f"{EXPERT}.weight_scale", ("U8", np.full((64, 1), 255, "u1"))), ("255",)),
    "unclaimed": ("bf16", put(f"{EXPERT}.rotation", zeros(3)), (f"nothing claims '{EXPERT}.rotation'",)),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_damaged_tensor(tmp_path: Path, case: str) -> None:
    dialect, damage, words = TENSORS[case]
    tensors = qwen3_tensors(dialect)
    damage(tensors)
    config = qwen3_config(quantization_config=DIALECTS[dialect][0])
    folder = write_folder(tmp_path / "m", config, tensors)
    error = check_refused(folder, CheckpointError, str(folder), *words)
    assert error.file.startswith(str(folder))  # type: ignore[attr-defined]
    assert error.tensor  # type: ignore[attr-defined]


def test_a_bias_of_integers(tmp_path: Path) -> None:
    tensors = qwen3_tensors()
    for layer in (0, 1):
        for name, n in {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}.items():
            tensors[f"model.layers.{layer}.self_attn.{name}.bias"] = ("I64", np.ones(n, np.int64))
    folder = write_folder(tmp_path / "m", qwen3_config(attention_bias=True), tensors)
    check_refused(folder, CheckpointError, "_proj.bias", "torch.int64", "builds torch.bfloat16")


def test_a_dense_scale_that_is_no_number(tmp_path: Path) -> None:
    tensors = qwen3_tensors("modelopt")
    parts = matrix(np.random.default_rng(1), "modelopt", 64, HIDDEN)
    parts["weight_scale"][1][0, 0] = 0x7F
    tensors |= {f"{Q_PROJ.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in parts.items()}
    folder = write_folder(tmp_path / "m", qwen3_config(quantization_config=DIALECTS["modelopt"][0]), tensors)
    check_refused(folder, CheckpointError, f"{Q_PROJ}_scale", "NaN")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.0.self_attn.q_proj.R_input.weight", ("Linear 'model.layers.0.self_attn.q_proj'",)),
        ("model.layers.0.self_attn.q_proj.bias", ("Linear 'model.layers.0.self_attn.q_proj'",)),
        ("model.layers.0.mlp.junk.weight", ("Qwen3MoeSparseMoeBlock 'model.layers.0.mlp'",)),
    ],
)
def test_a_tensor_that_no_module_has_a_place_for(tmp_path: Path, name: str, words: tuple[str, ...]) -> None:
    folder = write_folder(tmp_path / "m", qwen3_config(), qwen3_tensors() | {name: bf16(np.ones((64, 64)))})
    check_refused(folder, CheckpointError, f"nothing claims the tensor {name!r}", *words)


# --- configs ---------------------------------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[dict[str, Any], type[FreeTokenError], tuple[str, ...]]] = {
    "more experts": ({"num_experts": 5}, CheckpointError, ("num_experts 5", "has 4 experts")),
    "fewer experts": ({"num_experts": 3}, CheckpointError, ("num_experts 3", "has 4 experts")),
    "no experts": ({"num_experts": 0}, CheckpointError, ("num_experts 0", "has 4 experts")),
    "wider experts": ({"moe_intermediate_size": 64}, CheckpointError, ("moe_intermediate_size 64", "width 32")),
    "another hidden size": ({"hidden_size": 32}, CheckpointError, ("hidden size 64", "hidden_size 32")),
    "fewer layers": ({"num_hidden_layers": 1}, CheckpointError, ("claims the experts model.layers.1.mlp.experts",)),
    "more layers": ({"num_hidden_layers": 3}, CheckpointError, ("model.layers.2.mlp.experts",)),
    "a dense layer": ({"mlp_only_layers": [0]}, CheckpointError, ("claims the experts model.layers.0.mlp.experts",)),
    "more heads": ({"num_attention_heads": 8}, CheckpointError, ("model.layers.0.self_attn.",)),
    "no heads": ({"num_attention_heads": 0}, CheckpointError, ("ZeroDivisionError",)),
    "a larger vocabulary": ({"vocab_size": 100}, CheckpointError, ("[96, 64]", "[100, 64]")),
    "biases": ({"attention_bias": True}, CheckpointError, ("model.layers.0.self_attn.k_proj.bias",)),
    "too many per token": ({"num_experts_per_tok": 9}, CheckpointError, ("num_experts_per_tok 9", "has 4 experts")),
    "fewer than one per token": ({"num_experts_per_tok": -1}, CheckpointError, ("num_experts_per_tok -1",)),
    "an unknown family": ({"model_type": "nope"}, CheckpointError, ("config.json", "nope")),
    "no family": ({"model_type": None}, CheckpointError, ("config.json",)),
    "a dense family": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        UnsupportedError,
        ("LlamaForCausalLM has no experts module",),
    ),
    "a family that does not dispatch": ({"model_type": "llama4"}, UnsupportedError, ("Llama4ForCausalLM",)),
    "a family of other experts": ({"model_type": "gpt_oss"}, CheckpointError, ("biases False", "with True")),
    "an unknown activation": ({"hidden_act": "gelu"}, UnsupportedError, ("Qwen3MoeExperts", "GELUActivation")),
    "an activation of no name": ({"hidden_act": "foo"}, CheckpointError, ("'foo'",)),
    "a word for a number": ({"num_hidden_layers": "two"}, CheckpointError, ("num_hidden_layers", "expected int")),
    "an unknown dtype": ({"dtype": "nope"}, CheckpointError, ("config.json", "nope")),
    "a dtype we lack": ({"dtype": "float64"}, ConfigError, ("float64", "float32, bfloat16, float16")),
    "an unknown rope": ({"rope_parameters": {"rope_type": "nope"}}, CheckpointError, ("nope",)),
    "padding outside": ({"pad_token_id": 1000}, CheckpointError, ("Padding_idx",)),
    "an unknown method": ({"quantization_config": {"quant_method": "awq"}}, CheckpointError, ("'awq'",)),
    "an unknown algorithm": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}},
        CheckpointError,
        ("quant_algo 'W4A8_AWQ'", "NVFP4"),
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_contradicts_or_is_not_known(tmp_path: Path, case: str) -> None:
    changes, error, words = CONFIGS[case]
    check_refused(write_folder(tmp_path / "m", qwen3_config(**changes), qwen3_tensors()), error, *words)


def test_an_unknown_algorithm_in_the_sidecar(tmp_path: Path) -> None:
    sidecar = {"quantization": {"quant_algo": "W4A8_AWQ"}}
    folder = write_folder(tmp_path / "m", qwen3_config(), qwen3_tensors(), sidecar)
    check_refused(folder, CheckpointError, "hf_quant_config.json", "'W4A8_AWQ'")


# --- numbers that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.gate.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_dense_weight_that_is_no_number(tmp_path: Path, name: str, value: float) -> None:
    tensors = qwen3_tensors()
    shape = tensors[name][1].shape
    array = np.full(shape, 0.5)
    array.flat[array.size // 2] = value
    tensors[name] = bf16(array)
    folder = write_folder(tmp_path / "m", qwen3_config(), tensors)
    check_refused(folder, CheckpointError, name, "NaN or infinite")


# --- arguments and memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"expert_format": "q9_9"}, ("unknown expert format 'q9_9'", ", ".join(formats.names()))),
        ({"expert_format": 4}, ("unknown expert format 4",)),
        ({"threads": 0}, ("threads=0",)),
        ({"threads": "many"}, ("threads='many'",)),
        ({"dtype": "int8"}, ("int8", "float32, bfloat16, float16")),
        ({"dtype": torch.float64}, ("float64",)),
        ({"device_map": "auto"}, ("load() takes no device_map",)),
        ({"state_dict": {}}, ("load() takes no state_dict",)),
        ({"quantization_config": {}}, ("load() takes no quantization_config",)),
        ({"ignore_mismatched_sizes": True}, ("load() takes no ignore_mismatched_sizes",)),
        ({"output_loading_info": True}, ("load() takes no output_loading_info",)),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be(tmp_path: Path, arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    check_refused(write_qwen3(tmp_path / "m"), ConfigError, *words, **arguments)


@pytest.mark.parametrize("name", ["FREETOKEN_CPU_ISA", "FREETOKEN_CPU_ACT"])
def test_a_setting_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "warp")
    check_refused(write_qwen3(tmp_path / "m"), ConfigError, f"{name}='warp'", "auto")


def test_an_argument_that_transformers_does_not_know(tmp_path: Path) -> None:
    check_refused(write_qwen3(tmp_path / "m"), CheckpointError, "'warp'", warp=9)


def test_a_width_that_the_format_cannot_hold(tmp_path: Path) -> None:
    width = 48  # three blocks of nvfp4, one and a half of mxfp4 and q8_0
    tensors = qwen3_tensors()
    for layer in (0, 1):
        for e in range(EXPERTS):
            at = f"model.layers.{layer}.mlp.experts.{e}"
            tensors[f"{at}.gate_proj.weight"] = tensors[f"{at}.up_proj.weight"] = zeros(width, HIDDEN)
            tensors[f"{at}.down_proj.weight"] = zeros(HIDDEN, width)
    folder = write_folder(tmp_path / "m", qwen3_config(moe_intermediate_size=width), tensors)
    for fmt in ("mxfp4", "q8_0"):
        check_refused(folder, FormatError, f"{fmt}: the expert width is 48", "multiple", "32", expert_format=fmt)


def test_more_bytes_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_qwen3(tmp_path / "m")
    monkeypatch.setattr("freetoken.memory.budget.available", lambda *args, **kwargs: Budget(100_000, "some/memory.max"))
    error = check_refused(folder, CapacityError, "some/memory.max", "97.7 KiB")
    assert error.available == 100_000  # type: ignore[attr-defined]
    banks = 2 * EXPERTS * (3 * HIDDEN * WIDTH * 2)
    dense = sum(t[1].nbytes for n, t in qwen3_tensors().items() if ".experts." not in n)
    needed = error.needed  # type: ignore[attr-defined]
    found = scan(open_checkpoint(folder))
    assert banks + dense <= needed - transient_bytes(found) <= 1.1 * (banks + dense)


def test_memory_is_asked_for_before_scales_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_qwen3(tmp_path / "m", "modelopt")
    monkeypatch.setattr("freetoken.memory.budget.available", lambda *args, **kwargs: Budget(0, "MemAvailable"))
    monkeypatch.setattr(
        "freetoken.checkpoint.safetensors.Checkpoint.read", lambda *args: pytest.fail("a tensor was read")
    )
    check_refused(folder, CapacityError, "MemAvailable")


def test_errors_survive_pickling_with_their_facts(tmp_path: Path) -> None:
    import pickle

    folder = write_folder(tmp_path / "m", qwen3_config(num_experts=5), qwen3_tensors())
    error = check_refused(folder, CheckpointError)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.file, copy.tensor) == (str(error), error.file, error.tensor)  # type: ignore[attr-defined]
    json.dumps(copy.facts)
