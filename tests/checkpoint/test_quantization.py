"""What configs declare, in every dialect, and that what is not known is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freetoken.checkpoint.quantization import Quantization, declared
from freetoken.checkpoint.safetensors import Checkpoint, open_checkpoint
from freetoken.errors import CheckpointError
from tests.support.checkpoints import MODELOPT, MODELOPT_SIDECAR, NATIVE_MXFP4, compressed_tensors


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
    assert declared(of()) == Quantization("none", ("bf16",))


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
    both = declared(of(NATIVE_MXFP4, sidecar=MODELOPT_SIDECAR))
    assert both.method == "mxfp4"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "awq"}, ("config.json", "'awq'", "supported: compressed-tensors, modelopt, mxfp4")),
        ({"quant_method": "fp8"}, ("'fp8'",)),
        ({"quant_method": "gptq", "bits": 4}, ("'gptq'",)),
        ({"quant_method": ["modelopt"]}, ("['modelopt']",)),
        ({}, ("None",)),
        ("nvfp4", ("a str",)),
        (["nvfp4"], ("a list",)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("'FP8'", "supported: NVFP4, W4A16_NVFP4")),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, ("'MIXED_PRECISION'",)),
        ({"quant_method": "modelopt"}, ("None",)),
        ({"quant_method": "modelopt", "quant_algo": ["NVFP4"]}, ("['NVFP4']",)),
        (compressed_tensors("float-quantized"), ("group_0", "'float-quantized'", "nvfp4-pack-quantized")),
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
        ("lm_head", "model.lm_head", False),
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
    assert Quantization("modelopt", ("nvfp4",), (pattern,)).ignores(module) is ignored


SHARED = {
    "bf16-transformers-deepseekv3": ("none", "bf16"),
    "bf16-transformers-deepseekv4": ("none", "bf16"),
    "bf16-transformers-gptoss": ("none", "bf16"),
    "bf16-transformers-mixtral": ("none", "bf16"),
    "bf16-transformers-qwen3moe": ("none", "bf16"),
    "fp4-deepseekv4-constructed": "quant_method 'fp8'",
    "fp8block-llmcompressor-qwen3moe256": "format 'float-quantized'",
    "fp8block-transformers-qwen3moe256": "quant_method 'fp8'",
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
"""Folder -> (method, format), or what the refusal names."""


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
        assert (found.method, found.formats) == (expected[0], (expected[1],))
