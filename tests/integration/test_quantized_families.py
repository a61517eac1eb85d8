"""Families whose experts a tool has quantized: one by one under their own prefixes, mixed by layer and by module.

A family's small model is saved by transformers, its experts are taken apart and quantized here as tools write them, and
the stock model gets what tests/support/oracle.py makes of those tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import freetoken
from freetoken import formats
from freetoken.errors import CheckpointError
from tests.integration.test_families import LOADS, load, save_small
from tests.support.checkpoints import MODELOPT, compressed_fp8, compressed_tensors, fp8
from tests.support.logits import check_logits
from tests.support.oracle import Weights, dequantize_matrix

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = (24, 128)
SECTIONS: dict[str, dict[str, Any]] = {
    "modelopt": MODELOPT,
    "ct-mxfp4": compressed_tensors("mxfp4-pack-quantized"),
    "ct-nvfp4": compressed_tensors("nvfp4-pack-quantized"),
    "fp8": fp8(list(BLOCK)),
    "ct-fp8": compressed_fp8("channel"),
}
EXPERT = re.compile(r"(?:^|\.)experts\.\d+\.\w+\.weight$")


def quantize(dialect: str, weight: torch.Tensor) -> Weights:
    """Suffix -> tensor of one matrix, as the tool of a dialect writes it."""
    if dialect == "fp8":
        n, k = weight.shape
        rows = torch.arange(n) // BLOCK[0]
        assert k <= BLOCK[1]
        scale = torch.stack([weight[rows == r].abs().amax() for r in range(int(rows[-1]) + 1)]) / 448
        return {
            "weight": (weight / scale[rows, None]).to(torch.float8_e4m3fn), "weight_scale_inv": scale[:, None]
        }  # fmt: skip
    if dialect == "ct-fp8":
        scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
        return {"weight": (weight / scale.float()).to(torch.float8_e4m3fn), "weight_scale": scale}
    fmt = formats.get("mxfp4" if dialect == "ct-mxfp4" else "nvfp4")
    matrix = fmt.quantize(weight.float().contiguous().numpy())
    assert matrix.scales is not None
    codes, scales = torch.from_numpy(matrix.codes), torch.from_numpy(matrix.scales)
    if dialect == "ct-mxfp4":
        return {"weight_packed": codes, "weight_scale": scales}
    scales = scales.view(torch.float8_e4m3fn)
    factor = torch.tensor(matrix.global_scale, dtype=torch.float32)
    if dialect == "modelopt":
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}
    return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": 1 / factor.reshape(1)}


def take_apart(tensors: Weights) -> Weights:
    """Fused experts (E, 2I, H) and (E, H, I) as one matrix each, as tools write them; others as they are."""
    out: Weights = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or not prefix.endswith(".experts"):
            out[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            if last == "down_proj":
                out[f"{prefix}.{e}.down_proj.weight"] = matrix
            else:
                out[f"{prefix}.{e}.gate_proj.weight"], out[f"{prefix}.{e}.up_proj.weight"] = matrix.chunk(2)
    return out


def put_together(tensors: Weights, like: Weights) -> Weights:
    """The inverse of `take_apart`, for the names in `like`."""
    out: Weights = {}
    for name, tensor in like.items():
        prefix, _, last = name.rpartition(".")
        if name in tensors:
            out[name] = tensors[name]
        elif last == "down_proj":
            out[name] = torch.stack([tensors[f"{prefix}.{e}.down_proj.weight"] for e in range(len(tensor))])
        else:
            parts = [[tensors[f"{prefix}.{e}.{p}_proj.weight"] for p in ("gate", "up")] for e in range(len(tensor))]
            out[name] = torch.stack([torch.cat(pair) for pair in parts])
    return out


def rewrite(folder: Path, section: dict[str, Any], dialect_of: Callable[[str], str | None]) -> Weights:
    """Quantize a saved model in place; returns the weights that it now stands for, named as before.

    dialect_of: a matrix's name without `.weight` -> the dialect it is to be written in, or None.
    """
    before = load_file(folder / "model.safetensors")
    written, plain = {}, {}
    for name, tensor in take_apart(before).items():
        module = name.removesuffix(".weight")
        dialect = dialect_of(module) if name.endswith(".weight") and tensor.dim() == 2 else None
        if dialect is None:
            written[name] = plain[name] = tensor
        else:
            parts = quantize(dialect, tensor)
            written |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
            plain[name] = dequantize_matrix(parts, BLOCK)
    assert len(written) > len(plain), "something was quantized"
    save_file({n: t.clone() for n, t in written.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return put_together(plain, before)


def reload_stock(folder: Path, stock: Any, weights: Weights) -> Any:
    """The stock model with other weights, through transformers' own names and loader."""
    folder.mkdir()
    stock.config.save_pretrained(folder)
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    kind = type(stock)
    return kind.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


def experts_in(dialect: str) -> Callable[[str], str | None]:
    return lambda module: dialect if EXPERT.search(f"{module}.weight") else None


FAMILIES = {  # as saved: one by one, fused; under model., model.language_model., language_model.model.
    "deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4v_moe", "lfm2_moe", "minimax_m2", "minimax_m3_vl", "mixtral",
    "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe", "qwen3_next", "qwen3_vl_moe",
}  # fmt: skip


@pytest.mark.parametrize("dialect", SECTIONS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_experts_quantized_one_by_one(tmp_path: Path, family: str, dialect: str) -> None:
    stock = save_small(tmp_path / "m", family, LOADS[family])
    weights = rewrite(tmp_path / "m", SECTIONS[dialect], experts_in(dialect))
    check_logits(load(tmp_path / "m"), reload_stock(tmp_path / "stock", stock, weights))


def by_layer(module: str) -> str | None:
    """Experts of layer 0 in nvfp4, of layer 1 in mxfp4, attention in fp8."""
    if EXPERT.search(f"{module}.weight"):
        return "ct-nvfp4" if ".layers.0." in module else "ct-mxfp4"
    return "ct-fp8" if re.search(r"self_attn\.[qkvo]_proj$", module) else None


def group(section: dict[str, Any], *targets: str) -> dict[str, Any]:
    return section["config_groups"]["group_0"] | {"targets": list(targets)}


BY_LAYER = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": group(SECTIONS["ct-nvfp4"], r"re:.*layers\.0\.mlp\.experts\.\d+\..*"),
        "group_1": group(SECTIONS["ct-mxfp4"], r"re:model\.layers\.1\.mlp\.experts\.\d+\..*"),
        "group_2": group(SECTIONS["ct-fp8"], r"re:.*self_attn\.(q|k|v|o)_proj$"),
    },
}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_formats_by_layer_and_by_module(tmp_path: Path, family: str) -> None:
    stock = save_small(tmp_path / "m", family, LOADS[family])
    weights = rewrite(tmp_path / "m", BY_LAYER, by_layer)
    model = load(tmp_path / "m")
    assert freetoken.report(model).formats == ("nvfp4", "mxfp4")
    check_logits(model, reload_stock(tmp_path / "stock", stock, weights))


def test_formats_by_module_in_a_sidecar(tmp_path: Path) -> None:
    """ModelOpt's mixed precision: experts of layer 0 in nvfp4, everything else as it was."""
    stock = save_small(tmp_path / "m", "qwen3_moe", {})
    names = [n.removesuffix(".weight") for n in load_file(tmp_path / "m" / "model.safetensors") if EXPERT.search(n)]
    listed = {n: {"quant_algo": "NVFP4", "group_size": 16} for n in names if ".layers.0." in n}
    sidecar = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed}}
    weights = rewrite(tmp_path / "m", {}, lambda module: "modelopt" if module in listed else None)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps(sidecar))
    model = load(tmp_path / "m")
    assert freetoken.report(model).formats == ("nvfp4", "bf16")
    check_logits(model, reload_stock(tmp_path / "stock", stock, weights))
    for name in (n for n in names if ".layers.0.mlp.experts.0." in n):
        del listed[name]
    (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps(sidecar))
    with pytest.raises(CheckpointError, match=r"is U8, expected BF16 .*hf_quant_config\.json declares modelopt"):
        load(tmp_path / "m")


def test_a_layer_in_another_format_than_its_group(tmp_path: Path) -> None:
    save_small(tmp_path / "m", "qwen3_moe", {})
    rewrite(tmp_path / "m", BY_LAYER, lambda module: "ct-nvfp4" if EXPERT.search(f"{module}.weight") else None)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.0\..* is F8_E4M3, expected U8"):
        load(tmp_path / "m")


def test_a_layer_that_no_group_is_for(tmp_path: Path) -> None:
    section = BY_LAYER | {"config_groups": {"group_0": BY_LAYER["config_groups"]["group_0"]}}
    save_small(tmp_path / "m", "qwen3_moe", {})
    rewrite(tmp_path / "m", section, by_layer)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.0\..*expected bf16"):
        load(tmp_path / "m")


@pytest.mark.parametrize("name", ["model.visual.proj.weight", "model.layers.2.eh_proj.weight", "mtp.fc.weight"])
def test_tensors_of_modules_that_are_not_there_are_left_out(tmp_path: Path, name: str) -> None:
    stock = save_small(tmp_path, "qwen3_moe", {})
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.ones(64, 64)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_logits(load(tmp_path), stock)
