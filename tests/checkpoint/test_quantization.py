"""What configs declare, in every dialect, and that what is not known is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freetoken.checkpoint.quantization import PLAIN, Quantization, Scheme, declared, for_all
from freetoken.checkpoint.safetensors import Checkpoint, open_checkpoint
from freetoken.errors import CheckpointError
from tests.support.checkpoints import (
    MODELOPT,
    MODELOPT_SIDECAR,
    NATIVE_MXFP4,
    compressed_fp8,
    compressed_tensors,
    fp8,
)


def group_of(written: str, **weights: Any) -> dict[str, Any]:
    section = compressed_tensors(written)
    section["config_groups"]["group_0"]["weights"] |= weights
    return section


def of(section: Any = None, sidecar: Any = None, **config: Any) -> Checkpoint:
    if section is not None:
        config["quantization_config"] = section
    return Checkpoint(Path("some/folder"), config, sidecar, {})


def check_refused(checkpoint: Checkpoint, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        declared(checkpoint)
    message = str(caught.value)
    assert "\n" not in message
    for word in ("some/folder", *words):
        assert word in message


def test_no_declaration_is_bf16() -> None:
    assert declared(of()) == Quantization("none", for_all(PLAIN))


@pytest.mark.parametrize(
    ("section", "method", "fmt"),
    [
        (NATIVE_MXFP4, "mxfp4", "mxfp4"),
        (compressed_tensors("nvfp4-pack-quantized"), "compressed-tensors", "nvfp4"),
        (compressed_tensors("mxfp4-pack-quantized"), "compressed-tensors", "mxfp4"),
        (MODELOPT, "modelopt", "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "modelopt", "nvfp4"),
    ],
)
def test_each_dialect(section: dict[str, Any], method: str, fmt: str) -> None:
    for checkpoint in (of(section), of(text_config={"quantization_config": section})):
        found = declared(checkpoint)
        assert (found.method, found.formats, found.source) == (method, (fmt,), "config.json")


def test_a_format_named_once_for_all_groups() -> None:
    section = compressed_tensors("nvfp4-pack-quantized")
    del section["config_groups"]["group_0"]["format"]
    assert declared(of(section)).formats == ("nvfp4",)


def test_groups_of_two_formats() -> None:
    section = compressed_tensors("nvfp4-pack-quantized")
    section["config_groups"]["group_1"] = {"format": "mxfp4-pack-quantized"}
    assert declared(of(section)).formats == ("nvfp4", "mxfp4")


def test_the_sidecar_counts_when_the_config_is_silent() -> None:
    found = declared(of(sidecar=MODELOPT_SIDECAR))
    assert (found.method, found.formats, found.source) == ("modelopt", ("nvfp4",), "hf_quant_config.json")
    assert found.ignores("lm_head")
    unquantized = declared(of(sidecar={"quantization": {"quant_algo": None}}))
    assert (unquantized.method, unquantized.formats) == ("none", ("bf16",))
    assert declared(of(MODELOPT, sidecar=MODELOPT_SIDECAR)) == declared(of(MODELOPT))


@pytest.mark.parametrize(
    ("section", "sidecar", "words"),
    [
        (NATIVE_MXFP4, MODELOPT_SIDECAR, ("it declares modelopt (nvfp4)", "config.json declares mxfp4 (mxfp4)")),
        (MODELOPT, {"quantization": {"quant_algo": "FP8"}}, ("it declares modelopt (fp8_block)",)),
        (MODELOPT, {"quantization": {"quant_algo": None}}, ("it declares none",)),
    ],
)
def test_a_sidecar_that_contradicts_the_config(section: Any, sidecar: Any, words: tuple[str, ...]) -> None:
    check_refused(of(section, sidecar=sidecar), "hf_quant_config.json", "remove one", *words)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "awq"}, ("config.json", "'awq'", "supported: compressed-tensors, fp8, modelopt, mxfp4")),
        (fp8([128]), ("weight_block_size is [128]", "expected two positive numbers")),
        (fp8([128, 0]), ("[128, 0]",)),
        (fp8([128, True]), ("[128, True]",)),
        (fp8([128, 128], fmt="e5m2"), ("fmt 'e5m2'", "supported: e4m3")),
        (
            compressed_tensors("nvfp4-pack-quantized") | {"transform_config": {"config_groups": {}}},
            ("transform_config",),
        ),
        (
            compressed_tensors("nvfp4-pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            ("sparsity_config", "sparse-24-bitmask"),
        ),
        (group_of("nvfp4-pack-quantized", group_size=32), ("group_0: group_size is 32, nvfp4 has 16",)),
        (group_of("mxfp4-pack-quantized", group_size=16), ("group_size is 16, mxfp4 has 32",)),
        (group_of("nvfp4-pack-quantized", num_bits=8), ("num_bits is 8",)),
        (group_of("nvfp4-pack-quantized", symmetric=False), ("symmetric is False",)),
        (MODELOPT | {"group_size": 32}, ("group_size is 32, nvfp4 has 16",)),
        (compressed_fp8("token"), ("group_0", "float8", "strategy 'token'")),
        (compressed_fp8("tensor", type="int"), ("int8", "strategy 'tensor'")),
        (compressed_fp8("block"), ("block_structure is None",)),
        (compressed_fp8("group", group_size="x"), ("group_size is [1, 'x']",)),
        ({"quant_method": "gptq", "bits": 4}, ("'gptq'",)),
        ({"quant_method": ["modelopt"]}, ("['modelopt']",)),
        ({}, ("None",)),
        ("nvfp4", ("a str",)),
        (["nvfp4"], ("a list",)),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, ("'W4A8_AWQ'", "supported: NVFP4, W4A16_NVFP4")),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, ("'MIXED_PRECISION'",)),
        ({"quant_method": "modelopt"}, ("None",)),
        ({"quant_method": "modelopt", "quant_algo": ["NVFP4"]}, ("['NVFP4']",)),
        (compressed_tensors("float-quantized"), ("group_0", "weights of None4", "strategy None")),
        (compressed_tensors("mxfp8-quantized"), ("group_0", "'mxfp8-quantized'", "nvfp4-pack-quantized")),
        (compressed_tensors("pack-quantized"), ("'pack-quantized'",)),
        ({"quant_method": "compressed-tensors"}, ("config_groups",)),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, ("config_groups",)),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": 3}}, ("group_0", "None")),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"format": {}}}, "format": []}, ("[]",)),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_name(section: Any, words: tuple[str, ...]) -> None:
    check_refused(of(section), *words)


@pytest.mark.parametrize("name", ["fp4", "fp8", None, "int4", ["fp4"]])
def test_the_type_of_experts_that_deepseek_v4_names(name: Any) -> None:
    config = {} if name is None else {"expert_dtype": name}
    checkpoint = of(fp8([64, 64]), **config)
    if name in ("fp4", "fp8", None):
        found = declared(checkpoint)
        expected = Scheme("ds_fp4") if name == "fp4" else Scheme("fp8_block", (64, 64))
        assert found.schemes_of(["layers.0.ffn.experts.0.w1"]) == (expected,)
        assert found.schemes_of(["layers.0.ffn.shared_experts.w1"]) == (Scheme("fp8_block", (64, 64)),)
    else:
        check_refused(checkpoint, f"expert_dtype {name!r}", "supported: fp4, fp8")


@pytest.mark.parametrize(
    ("section", "block"),
    [
        (fp8([128, 64]), (128, 64)),
        (fp8(None), (0, 0)),
        (compressed_fp8("tensor"), (0, 0)),
        (compressed_fp8("channel"), (1, 0)),
        (compressed_fp8("group", group_size=256), (1, 256)),
        (compressed_fp8("block", block_structure=[96, 128]), (96, 128)),
        (MODELOPT | {"quant_algo": "FP8"}, (0, 0)),
        (MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, (1, 0)),
    ],
)
def test_what_shares_a_scale(section: dict[str, Any], block: tuple[int, int]) -> None:
    assert declared(of(section)).schemes_of(["model.layers.0.mlp.experts"]) == (Scheme("fp8_block", block),)


MIXED = {
    "config_groups": {
        "group_0": {"format": "nvfp4-pack-quantized", "targets": ["re:.*experts.*", "model.layers.2.mlp.shared"]},
        "group_1": compressed_fp8("channel")["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]},
    },
    "quant_method": "compressed-tensors",
    "ignore": ["re:.*layers[.]1[.]mlp.*"],
}


@pytest.mark.parametrize(
    ("module", "schemes"),
    [
        ("model.layers.0.mlp.experts.0.gate_proj", (Scheme("nvfp4"),)),
        ("model.language_model.layers.0.mlp.experts.0.gate_proj", (Scheme("nvfp4"),)),
        ("model.layers.2.mlp.shared.gate_proj", (Scheme("nvfp4"),)),
        ("model.layers.0.self_attn.q_proj", (Scheme("fp8_block", (1, 0)),)),
        ("model.layers.1.mlp.experts.0.gate_proj", (PLAIN,)),
        ("lm_head", (PLAIN,)),
    ],
)
def test_groups_say_which_modules_they_are_for(module: str, schemes: tuple[Scheme, ...]) -> None:
    assert declared(of(MIXED, format="mixed-precision")).schemes_of([module]) == schemes


def test_a_scheme_for_each_module_by_modelopt() -> None:
    layers = {
        "model.layers.0.mlp.experts.0.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    }
    sidecar = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    for checkpoint in (of(sidecar=sidecar), of(sidecar["quantization"] | {"quant_method": "modelopt"})):
        found = declared(checkpoint)
        assert (found.method, found.formats) == ("modelopt", ("nvfp4", "fp8_block"))
        assert found.schemes_of(["model.language_model.layers.0.mlp.experts.0.gate_proj"]) == (Scheme("nvfp4"),)
        assert found.schemes_of(["model.layers.0.self_attn.q_proj"]) == (Scheme("fp8_block", (0, 0)),)
        assert found.schemes_of(["model.layers.0.mlp.experts.1.gate_proj"]) == (PLAIN,)
    layers["model.layers.1.mlp"] = {"quant_algo": "INT4_AWQ"}
    check_refused(of(sidecar=sidecar), "hf_quant_config.json", "model.layers.1.mlp: quant_algo 'INT4_AWQ'")


@pytest.mark.parametrize(
    ("sidecar", "words"),
    [
        ({"quantization": {"quant_algo": "W4A8_AWQ"}}, ("hf_quant_config.json", "'W4A8_AWQ'")),
        ({"quantization": []}, ("hf_quant_config.json", "quantization")),
        ({}, ("hf_quant_config.json", "quantization")),
    ],
)
def test_a_sidecar_that_is_not_known(sidecar: Any, words: tuple[str, ...]) -> None:
    check_refused(of(sidecar=sidecar), *words)


@pytest.mark.parametrize(
    ("pattern", "module", "ignored"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.language_model.lm_head", True),
        ("head", "lm_head", False),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1", "model.language_model.layers.1.mlp.experts", True),
        ("language_model.model.layers.1.*", "model.language_model.layers.1.mlp.experts", True),
        ("re:model.layers.1.*", "model.language_model.layers.1.mlp.experts", True),
        ("model.layers.1", "model.layers.1.mlp.experts", True),
        ("model.layers.1", "model.layers.10.mlp.experts", False),
        ("model.layers.*.self_attn", "model.layers.0.self_attn", True),
        ("*mlp.gate", "model.layers.0.mlp.gate", True),
        ("*mlp.gate", "model.layers.0.mlp.experts.0.gate_proj", False),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate_proj", False),
        ("re:(", "anything", False),
    ],
)
def test_patterns_of_modules_left_alone(pattern: str, module: str, ignored: bool) -> None:
    assert Quantization("modelopt", for_all(Scheme("nvfp4")), (pattern,)).ignores(module) is ignored


SHARED = {
    "bf16-transformers-deepseekv3": ("none", "bf16"),
    "bf16-transformers-deepseekv4": ("none", "bf16"),
    "bf16-transformers-gptoss": ("none", "bf16"),
    "bf16-transformers-mixtral": ("none", "bf16"),
    "bf16-transformers-qwen3moe": ("none", "bf16"),
    "fp4-deepseekv4-constructed": ("fp8", "ds_fp4", "fp8_block"),
    "fp8block-llmcompressor-qwen3moe256": ("compressed-tensors", "fp8_block"),
    "fp8block-transformers-qwen3moe256": ("fp8", "fp8_block"),
    "mxfp4-native-gptoss-repacked": ("mxfp4", "mxfp4"),
    "mxfp4a16-llmcompressor-gptoss": ("compressed-tensors", "mxfp4"),
    "mxfp4a16-llmcompressor-qwen3moe": ("compressed-tensors", "mxfp4"),
    "nvfp4-llmcompressor-qwen3moe": ("compressed-tensors", "nvfp4"),
    "nvfp4-modelopt-gptoss": ("modelopt", "nvfp4"),
    "nvfp4-modelopt-mixtral": ("modelopt", "nvfp4"),
    "nvfp4-modelopt-qwen3moe": ("modelopt", "nvfp4"),
    "nvfp4a16-llmcompressor-deepseekv3": ("compressed-tensors", "nvfp4"),
    "nvfp4a16-llmcompressor-qwen3moe": ("compressed-tensors", "nvfp4"),
    "nvfp4a16-modelopt-qwen3moe": ("modelopt", "nvfp4"),
    "w4a16-llmcompressor-qwen3moe256": "format 'pack-quantized'",
}
"""Folder -> (method, formats), or what the refusal names."""


def test_the_table_names_every_folder(shared_dir: Path) -> None:
    folders = {f.parent.name for f in (shared_dir / "checkpoints").glob("*/config.json")}
    assert folders == set(SHARED)


@pytest.mark.parametrize("name", SHARED)
def test_real_tools(shared_dir: Path, name: str) -> None:
    checkpoint = open_checkpoint(shared_dir / "checkpoints" / name)
    expected = SHARED[name]
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            declared(checkpoint)
    else:
        found = declared(checkpoint)
        assert (found.method, found.formats) == (expected[0], expected[1:])
