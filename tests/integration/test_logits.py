"""The requirement: fp32 logits within 1e-4 of the stock model built from independently dequantized weights.

The stock model is transformers' own class with its own eager experts; its weights come from tests/support/oracle.py.
Compared are a padded batch of two, and several tokens fed one by one into the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.integrations import finegrained_fp8

import freetoken
from freetoken import formats
from freetoken.integration.operator import layer_of
from tests.support.checkpoints import DIALECTS, write_qwen3
from tests.support.logits import check_logits, collect_logits
from tests.support.oracle import dequantize_folder, dequantize_matrix, map_experts, stock_model

LOADS = {  # folder -> format of its experts
    "bf16-transformers-deepseekv3": "bf16",
    "bf16-transformers-deepseekv4": "bf16",
    "bf16-transformers-gptoss": "bf16",
    "bf16-transformers-mixtral": "bf16",
    "bf16-transformers-qwen3moe": "bf16",
    "fp4-deepseekv4-constructed": "ds_fp4",
    "fp8block-llmcompressor-qwen3moe256": "fp8_block",
    "fp8block-transformers-qwen3moe256": "fp8_block",
    "mxfp4-native-gptoss-repacked": "mxfp4",
    "mxfp4a16-llmcompressor-gptoss": "mxfp4",
    "mxfp4a16-llmcompressor-qwen3moe": "mxfp4",
    "nvfp4-llmcompressor-qwen3moe": "nvfp4",
    "nvfp4-modelopt-gptoss": "nvfp4",
    "nvfp4-modelopt-mixtral": "nvfp4",
    "nvfp4-modelopt-qwen3moe": "nvfp4",
    "nvfp4a16-llmcompressor-deepseekv3": "nvfp4",
    "nvfp4a16-llmcompressor-qwen3moe": "nvfp4",
    "nvfp4a16-modelopt-qwen3moe": "nvfp4",
}
REFUSED = {  # folder -> what the error says
    "w4a16-llmcompressor-qwen3moe256": (freetoken.CheckpointError, "'pack-quantized'"),
}
SOURCES = ["bf16-transformers-qwen3moe", "bf16-transformers-gptoss"]


def expert_formats(model: Any) -> set[str]:
    return {layer.bank.layout.format.name for m in model.modules() if (layer := layer_of(m)) is not None}


def test_the_tables_name_every_folder(shared_dir: Path) -> None:
    folders = {f.parent.name for f in (shared_dir / "checkpoints").glob("*/config.json")}
    assert folders == LOADS.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", LOADS)
def test_logits_of_what_real_tools_wrote(shared_dir: Path, tmp_path: Path, name: str) -> None:
    folder = shared_dir / "checkpoints" / name
    model, _ = freetoken.load(folder, dtype=torch.float32)
    assert expert_formats(model) == {LOADS[name]}
    check_logits(model, stock_model(folder, dequantize_folder(folder), tmp_path))


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_load_says_why(shared_dir: Path, name: str) -> None:
    error, words = REFUSED[name]
    with pytest.raises(error, match=words) as caught:
        freetoken.load(shared_dir / "checkpoints" / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_of_checkpoints_made_here(tmp_path: Path, dialect: str) -> None:
    folder = write_qwen3(tmp_path / "m", dialect)
    model, _ = freetoken.load(folder, dtype=torch.float32)
    assert expert_formats(model) == {DIALECTS[dialect][1]}
    check_logits(model, stock_model(folder, dequantize_folder(folder), tmp_path / "stock"))


# --- experts quantized while loading ---------------------------------------------------------------------------------


def through_gguf(kind: gguf.GGMLQuantizationType) -> Callable[[torch.Tensor], torch.Tensor]:
    """A type of ggml's and back by llama.cpp's Python package."""

    def change(weights: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weights.numpy(), kind), kind))

    return change


def through_transformers(weights: torch.Tensor) -> torch.Tensor:
    """fp8_block and back in transformers' operations; the grid is padded, which its quantization does not do itself."""
    n, k = weights.shape
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    padded = torch.nn.functional.pad(weights.float(), (0, -k % 128, 0, -n % 128))
    parts = finegrained_fp8.Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("weight", padded)
    whole = finegrained_fp8.Fp8Dequantize(None)._dequantize_one(*parts.values(), output_dtype=torch.float32)
    return whole[:n, :k].contiguous()


def through_oracle(name: str, role_names: dict[str, str]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Quantized by our format, dequantized by the oracle."""

    def change(weights: torch.Tensor) -> torch.Tensor:
        matrix = formats.get(name).quantize(weights.numpy())
        assert matrix.scales is not None
        parts = {"codes": torch.from_numpy(matrix.codes), "scales": torch.from_numpy(matrix.scales)}
        if "global" in role_names:
            parts["scales"] = parts["scales"].view(torch.float8_e4m3fn)
            parts["global"] = torch.tensor(np.float32(matrix.global_scale))
        return dequantize_matrix({role_names[role]: tensor for role, tensor in parts.items()})

    return change


QUANTIZERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bf16": lambda weights: weights,
    "fp8_block": through_transformers,
    "q4_0": through_gguf(gguf.GGMLQuantizationType.Q4_0),
    "q8_0": through_gguf(gguf.GGMLQuantizationType.Q8_0),
    "nvfp4": through_oracle("nvfp4", {"codes": "weight", "scales": "weight_scale", "global": "weight_scale_2"}),
    "ds_fp4": through_oracle("ds_fp4", {"codes": "weight_packed", "scales": "weight_scale"}),
    "mxfp4": through_oracle("mxfp4", {"codes": "weight_packed", "scales": "weight_scale"}),
}


def test_every_format_has_a_quantizer_here() -> None:
    assert set(QUANTIZERS) == set(formats.names())


@pytest.mark.parametrize("fmt", QUANTIZERS)
@pytest.mark.parametrize("name", SOURCES)
def test_logits_of_experts_quantized_while_loading(shared_dir: Path, tmp_path: Path, name: str, fmt: str) -> None:
    folder = shared_dir / "checkpoints" / name
    model, _ = freetoken.load(folder, dtype=torch.float32, expert_format=fmt)
    assert expert_formats(model) == {fmt}
    weights = dequantize_folder(folder)
    changed = map_experts(weights, QUANTIZERS[fmt])
    moved = [n for n in weights if not torch.equal(weights[n].float(), changed[n].float())]
    assert bool(moved) is (fmt != "bf16")
    assert all(".experts." in n for n in moved)
    check_logits(model, stock_model(folder, changed, tmp_path))


@pytest.mark.parametrize("fmt", QUANTIZERS)
def test_quantized_experts_quantized_again(tmp_path: Path, fmt: str) -> None:
    folder = write_qwen3(tmp_path / "m", "modelopt")
    model, _ = freetoken.load(folder, dtype=torch.float32, expert_format=fmt)
    again = {"bf16": lambda w: w.bfloat16().float(), "nvfp4": lambda w: w}.get(fmt, QUANTIZERS[fmt])
    check_logits(model, stock_model(folder, map_experts(dequantize_folder(folder), again), tmp_path / "stock"))


def test_each_dtype_of_the_dense_part(tmp_path: Path) -> None:
    """bf16 and fp16: logits within a few roundings of 2**-9 and 2**-12 of the exact ones."""
    folder = write_qwen3(tmp_path / "m", "ct-nvfp4")
    exact = collect_logits(stock_model(folder, dequantize_folder(folder), tmp_path / "stock"), 96)
    for dtype, bound in ((torch.bfloat16, 0.03), (torch.float16, 0.004)):
        model, _ = freetoken.load(folder, dtype=dtype)
        assert {p.dtype for p in model.parameters()} == {dtype}
        found = collect_logits(model, 96)
        assert found.dtype == dtype
        error = (found.float() - exact).norm(dim=1) / exact.norm(dim=1)
        assert error.median() < bound  # a rounded router may choose another expert for a token or two
    assert next(freetoken.load(folder)[0].parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name", ["bf16-transformers-mixtral", "bf16-transformers-deepseekv3", "nvfp4-modelopt-mixtral"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_dtypes_are_the_stock_models(shared_dir: Path, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Renamed tensors and those a family keeps in fp32 come out as in stock transformers."""
    from transformers import AutoModelForCausalLM

    folder = shared_dir / "checkpoints" / name
    stock_model(folder, dequantize_folder(folder), tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    ours = freetoken.load(folder, dtype=dtype)[0].state_dict()
    assert ours.keys() == {n for n in stock if ".experts." not in n}
    assert {n: t.dtype for n, t in ours.items()} == {n: stock[n].dtype for n in ours}
    for n, tensor in ours.items():
        assert torch.equal(tensor, stock[n]), n
