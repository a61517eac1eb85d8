"""What quantized checkpoints mean, said a second time in plain torch, and the stock model of those weights.

Nothing of the package is used: tensors are read by `safetensors`, scale types are torch's own, experts come out in
the names and the layout of stock transformers, and the stock model runs its own eager experts.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

Weights = dict[str, torch.Tensor]

_HALVES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_FUSED = re.compile(r"(?:^|\.)experts\.(?:gate_up_proj|down_proj)(?:_\w+)?$")
_LINEARISED = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")


def read_tensors(folder: Path) -> Weights:
    """Every tensor of every file of a folder."""
    tensors: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def e2m1(packed: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """float64 values of 4-bit codes, two in a byte along `dim`, the low nibble first."""
    packed = packed.movedim(dim, -1)
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(-2).long()
    sign = torch.where(codes >= 8, -1.0, 1.0).double()
    return (sign * _HALVES[codes % 8]).movedim(-1, dim)


def e8m0(scales: torch.Tensor) -> torch.Tensor:
    """float64 powers of two."""
    return torch.exp2(scales.view(torch.uint8).double() - 127)


def blockwise(values: torch.Tensor, scales: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Values times the scale of their block; blocks are as long as the sizes along `dim` say."""
    block = values.shape[dim] // scales.shape[dim]
    return values * scales.repeat_interleave(block, dim)


def gridwise(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float64 values times a grid with a scale per block (rows, columns); fewer scales stand for rows or for all."""
    grid = e8m0(scales) if scales.dtype == torch.float8_e8m0fnu else scales.double()
    if grid.numel() == 1 or grid.numel() == len(values):
        return values.double() * grid.reshape(-1, 1)
    at = [torch.arange(size) // step for size, step in zip(values.shape, block, strict=True)]
    return values.double() * grid[at[0]][:, at[1]]


def dequantize_matrix(parts: Weights, block: tuple[int, int] = (128, 128)) -> torch.Tensor:
    """fp32 (N, K) of one matrix, from the tensors that the suffixes of a tool name; block: of fp8 weights."""
    names = set(parts) - {"bias", "input_scale", "input_global_scale"}
    codes = parts.get("weight")
    if codes is not None and codes.dtype == torch.float8_e4m3fn:
        (scale,) = names - {"weight"}
        return gridwise(codes, parts[scale], block).float()
    if names == {"weight", "scale"}:  # DeepSeek-V4
        return blockwise(e2m1(parts["weight"].view(torch.uint8)), e8m0(parts["scale"])).float()
    if names == {"weight"}:
        return parts["weight"].float()
    if names == {"weight", "weight_scale", "weight_scale_2"}:  # ModelOpt: the second scale is a factor
        value = blockwise(e2m1(parts["weight"]), parts["weight_scale"].double()) * parts["weight_scale_2"].double()
    elif names == {"weight_packed", "weight_scale", "weight_global_scale"}:  # compressed-tensors: it is a divisor
        value = blockwise(e2m1(parts["weight_packed"]), parts["weight_scale"].double())
        value = value / parts["weight_global_scale"].double()
    elif names == {"weight_packed", "weight_scale"}:
        value = blockwise(e2m1(parts["weight_packed"]), e8m0(parts["weight_scale"]))
    else:
        raise AssertionError(f"the oracle does not know {sorted(names)}")
    return value.float()


def dequantize_folder(folder: Path) -> Weights:
    """All weights of a checkpoint as stock transformers names them, quantized ones in fp32."""
    modules: dict[str, Weights] = {}
    plain: Weights = {}
    tensors = read_tensors(folder)
    config = json.loads((folder / "config.json").read_text())
    block = _fp8_block(config.get("quantization_config", {}))
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if _FUSED.search(name):
            continue
        scale = suffix == "scale" and f"{module}.weight" in tensors
        if suffix.startswith("weight") or scale or suffix in ("input_scale", "input_global_scale"):
            modules.setdefault(module, {})[suffix] = tensor
        else:
            plain[name] = tensor
    plain |= {f"{module}.weight": dequantize_matrix(parts, block) for module, parts in modules.items()}
    plain |= _dequantize_fused(tensors)
    return _fuse_linearised(plain) if config["model_type"] == "gpt_oss" else plain


def _fp8_block(section: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale, where the config says so."""
    groups = section.get("config_groups", {}).values()
    said = [section.get("weight_block_size"), *(g.get("weights", {}).get("block_structure") for g in groups)]
    rows, columns = next((block for block in said if block), (128, 128))
    return rows, columns


def _dequantize_fused(tensors: Weights) -> Weights:
    """gpt-oss: (E, K, N), whether written so in bf16, packed along K by ModelOpt, or natively as rows of blocks."""
    out = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix("_blocks")
        if not _FUSED.search(name) or "_scale" in name:
            continue
        if name.endswith("_blocks"):
            rows = blockwise(e2m1(tensor), e8m0(tensors[f"{stem}_scales"])[..., None]).flatten(-2)
            out[stem] = rows.transpose(1, 2).float().contiguous()
        elif f"{name}_weight_scale" in tensors:
            value = blockwise(e2m1(tensor, 1), tensors[f"{name}_weight_scale"].double(), 1)
            out[name] = (value * tensors[f"{name}_weight_scale_2"].double()).float()
        else:
            out[name] = tensor.float()
    return out


def _fuse_linearised(plain: Weights) -> Weights:
    """llm-compressor writes gpt-oss expert by expert; stock wants all in one, gate and up alternating."""
    found: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    out: Weights = {}
    for name, tensor in plain.items():
        match = _LINEARISED.fullmatch(name)
        if match is None:
            out[name] = tensor
        else:
            prefix, expert, projection, kind = match.groups()
            found.setdefault((prefix, projection, kind), {})[int(expert)] = tensor.float()
    stacked = {key: torch.stack([by[e] for e in range(len(by))]) for key, by in found.items()}
    for (prefix, projection, kind), value in stacked.items():
        end = "" if kind == "weight" else "_bias"
        if projection == "down_proj":
            out[f"{prefix}.down_proj{end}"] = value.transpose(1, 2).contiguous() if kind == "weight" else value
        elif projection == "gate_proj":
            both = torch.stack([value, stacked[prefix, "up_proj", kind]], 2).flatten(1, 2)  # rows g0 u0 g1 u1 ...
            out[f"{prefix}.gate_up_proj{end}"] = both.transpose(1, 2).contiguous() if kind == "weight" else both
    return out


def take_expert(plain: Weights, prefix: str, expert: int) -> dict[str, torch.Tensor | None]:
    """gate, up, down (rows, width) and their biases or None, from weights named as stock names them."""
    fused = plain.get(f"{prefix}.gate_up_proj")
    if fused is not None:
        both, bias = fused[expert].T, plain[f"{prefix}.gate_up_proj_bias"][expert].float()
        return {
            "gate": both[0::2],
            "up": both[1::2],
            "down": plain[f"{prefix}.down_proj"][expert].T,
            "gate_bias": bias[0::2],
            "up_bias": bias[1::2],
            "down_bias": plain[f"{prefix}.down_proj_bias"][expert].float(),
        }
    mixtral = f"{prefix}.{expert}.w1.weight" in plain
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (plain[f"{prefix}.{expert}.{name}.weight"] for name in names)
    return {"gate": gate, "up": up, "down": down, "gate_bias": None, "up_bias": None, "down_bias": None}


def map_experts(plain: Weights, change: Any) -> Weights:
    """The weights with each expert matrix (rows, width) replaced by what `change` makes of it."""
    out = dict(plain)
    for name, tensor in plain.items():
        if re.search(r"\.experts\.\d+\.\w+\.weight$", name):
            out[name] = change(tensor.float())
        elif re.search(r"\.experts\.(gate_up_proj|down_proj)$", name):
            # interleaved rows do not matter: every row is quantized by itself, but for a scale of the whole matrix
            out[name] = torch.stack([_change_fused(name, matrix.float().T, change).T for matrix in tensor])
    return out


def _change_fused(name: str, rows: torch.Tensor, change: Any) -> torch.Tensor:
    if name.endswith("down_proj"):
        return change(rows.contiguous())
    out = torch.empty_like(rows)
    out[0::2], out[1::2] = change(rows[0::2].contiguous()), change(rows[1::2].contiguous())
    return out


def stock_model(folder: Path, weights: Weights, scratch: Path) -> Any:
    """Stock transformers in fp32 with these weights and its own eager experts; folder: whose config.json it has."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "config.json").write_text(json.dumps(config))
    plain = {n: (t.float() if t.is_floating_point() else t).contiguous() for n, t in weights.items()}
    save_file(plain, scratch / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(
        scratch,
        config=AutoConfig.from_pretrained(scratch),
        dtype=torch.float32,
        experts_implementation="eager",
        output_loading_info=True,
    )
    for what, keys in info.items():
        assert not keys, f"{what}: {keys}"
    return model.eval()


def new_cache(model: Any) -> dict[str, Any]:
    """An empty cache as the argument that this version of transformers wants."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: DynamicCache(config=model.config), "use_cache": True}
