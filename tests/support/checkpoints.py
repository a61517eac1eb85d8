"""Checkpoints written by hand: a safetensors writer that can be made to lie, and a tiny Qwen3-MoE in every dialect.

A tensor here is (safetensors dtype, array of its raw bits). Nothing of the package is used to write them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Tensor = tuple[str, NDArray[Any]]
Tensors = dict[str, Tensor]
Edit = Callable[[dict[str, Any]], object]

VOCABULARY = 96
HIDDEN, WIDTH, EXPERTS, LAYERS = 64, 32, 4, 2


def write_file(path: Path, tensors: Mapping[str, Tensor], edit: Edit | None = None) -> None:
    """One safetensors file; `edit` may change the header before it is written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    if edit is not None:
        edit(header)
    write_raw(path, json.dumps(header).encode(), bytes(data))


def write_raw(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    """A safetensors file of any header; length: what its first 8 bytes claim."""
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], sidecar: Mapping[str, Any] | None = None
) -> Path:
    """A folder with config.json and one file of tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if sidecar is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(sidecar))
    write_file(folder / "model.safetensors", tensors)
    return folder


def write_sharded(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 2) -> Path:
    """The same with an index and several files, tensors dealt out in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    files = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    where = {name: files[n % shards] for n, name in enumerate(tensors)}
    for file in files:
        write_file(folder / file, {name: t for name, t in tensors.items() if where[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def bf16(array: NDArray[np.floating[Any]]) -> Tensor:
    """Values as bf16, cut off (good enough for random weights)."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return "BF16", (bits >> 16).astype(np.uint16)


def fp32(*values: float, shape: tuple[int, ...] = ()) -> Tensor:
    """One or several fp32 numbers."""
    return "F32", np.array(values, np.float32).reshape(shape)


def qwen3_config(**changes: Any) -> dict[str, Any]:
    """A Qwen3-MoE config of a model that is built in milliseconds."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "max_position_embeddings": 256,
        "mlp_only_layers": [],
        "moe_intermediate_size": WIDTH,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return config | changes


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*mlp.gate"]}
MODELOPT_SIDECAR = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*mlp.gate"]}}
NATIVE_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def compressed_tensors(written: str) -> dict[str, Any]:
    """The quantization_config that compressed-tensors writes; written: its name of the format."""
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "config_groups": {"group_0": {"format": written, "targets": ["Linear"], "weights": {"num_bits": 4}}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def fp8(block: list[int] | None, **changes: Any) -> dict[str, Any]:
    """The quantization_config of transformers' fp8; block: rows and columns that share a scale."""
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block} | changes


def compressed_fp8(strategy: str, **weights: Any) -> dict[str, Any]:
    """The quantization_config that compressed-tensors writes for fp8."""
    section = compressed_tensors("float-quantized")
    section["config_groups"]["group_0"]["weights"] = {"num_bits": 8, "type": "float", "strategy": strategy} | weights
    return section


DIALECTS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "bf16": (None, "bf16"),
    "modelopt": (MODELOPT, "nvfp4"),
    "ct-nvfp4": (compressed_tensors("nvfp4-pack-quantized"), "nvfp4"),
    "ct-mxfp4": (compressed_tensors("mxfp4-pack-quantized"), "mxfp4"),
    "fp8": (fp8([24, 128]), "fp8_block"),
    "fp8-e8m0": (fp8([24, 128], scale_fmt="ue8m0"), "fp8_block"),
    "fp8-tensor": (fp8(None), "fp8_block"),
    "ct-fp8-block": (compressed_fp8("block", block_structure=[24, 128]), "fp8_block"),
    "ct-fp8-row": (compressed_fp8("channel"), "fp8_block"),
    "modelopt-fp8": (MODELOPT | {"quant_algo": "FP8"}, "fp8_block"),
}
"""Dialect -> (quantization_config, the format its experts have)."""


def matrix(rng: np.random.Generator, dialect: str, n: int, k: int) -> Tensors:
    """Suffix -> tensor of one random matrix of n rows and k columns, with values of about 1 / sqrt(k)."""
    if dialect == "bf16":
        return {"weight": bf16(rng.standard_normal((n, k)) / np.sqrt(k))}
    if "fp8" in dialect:
        return _fp8_matrix(rng, dialect, n, k)
    codes: Tensor = ("U8", rng.integers(0, 256, (n, k // 2), np.uint8))
    size = 1 / (3 * np.sqrt(k))
    if dialect == "ct-mxfp4":
        exponents = rng.integers(-1, 2, (n, k // 32)) + 127 + int(np.log2(size))
        return {"weight_packed": codes, "weight_scale": ("U8", exponents.astype(np.uint8))}
    scales: Tensor = ("F8_E4M3", rng.integers(0x30, 0x50, (n, k // 16), np.uint8))  # 0.5 to 8
    factor = size / 4 * rng.uniform(0.5, 2)
    if dialect == "modelopt":
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": fp32(factor)}
    return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": fp32(1 / factor, shape=(1,))}


def _fp8_matrix(rng: np.random.Generator, dialect: str, n: int, k: int) -> Tensors:
    """Rows of 24 share a scale, so that the last block is shorter than the others, or a row has one, or all have."""
    magnitudes = rng.integers(0x30, 0x40, (n, k), np.uint8)  # 0.5 to 1.9
    codes: Tensor = ("F8_E4M3", magnitudes | rng.integers(0, 2, (n, k), np.uint8) << np.uint8(7))
    grid = (n,) if dialect == "ct-fp8-row" else (-(-n // 24), -(-k // 128))
    scales = rng.uniform(0.5, 1.5, grid) / np.sqrt(k)
    if dialect == "fp8-e8m0":
        return {"weight": codes, "weight_scale_inv": ("F8_E8M0", rng.integers(122, 126, grid, np.uint8))}
    if dialect == "ct-fp8-block":
        return {"weight": codes, "weight_scale": bf16(scales)}
    if dialect == "ct-fp8-row":
        return {"weight": codes, "weight_scale": ("F32", scales.astype(np.float32)[:, None])}
    if dialect == "modelopt-fp8":
        return {"weight": codes, "weight_scale": fp32(scales[0, 0]), "input_scale": fp32(1.0)}
    if dialect == "fp8-tensor":
        return {"weight": codes, "weight_scale_inv": fp32(scales[0, 0])}
    return {"weight": codes, "weight_scale_inv": ("F32", scales.astype(np.float32))}


def experts(rng: np.random.Generator, dialect: str, prefix: str, count: int = EXPERTS) -> Tensors:
    """All tensors of `count` separate experts below `prefix`."""
    shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    return {
        f"{prefix}.{e}.{projection}.{suffix}": tensor
        for e in range(count)
        for projection, (n, k) in shapes.items()
        for suffix, tensor in matrix(rng, dialect, n, k).items()
    }


def qwen3_tensors(dialect: str = "bf16", seed: int = 0) -> Tensors:
    """Every tensor of the model of `qwen3_config`: the dense part in bf16, experts in the dialect."""
    rng = np.random.default_rng(seed)

    def dense(n: int, k: int) -> Tensor:
        return bf16(rng.standard_normal((n, k)) / np.sqrt(k))

    def norm(n: int) -> Tensor:
        return bf16(rng.uniform(0.5, 1.5, n))

    tensors = {"model.embed_tokens.weight": bf16(rng.standard_normal((VOCABULARY, HIDDEN)))}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm(HIDDEN),
            f"{at}.post_attention_layernorm.weight": norm(HIDDEN),
            f"{at}.self_attn.q_norm.weight": norm(16),
            f"{at}.self_attn.k_norm.weight": norm(16),
            f"{at}.self_attn.q_proj.weight": dense(64, HIDDEN),
            f"{at}.self_attn.k_proj.weight": dense(32, HIDDEN),
            f"{at}.self_attn.v_proj.weight": dense(32, HIDDEN),
            f"{at}.self_attn.o_proj.weight": dense(HIDDEN, 64),
            f"{at}.mlp.gate.weight": dense(EXPERTS, HIDDEN),
            **experts(rng, dialect, f"{at}.mlp.experts"),
        }
    tensors["model.norm.weight"] = norm(HIDDEN)
    tensors["lm_head.weight"] = dense(VOCABULARY, HIDDEN)
    return tensors


def write_qwen3(folder: Path, dialect: str = "bf16", seed: int = 0, **changes: Any) -> Path:
    """The whole model as a folder; changes: of its config."""
    section = DIALECTS[dialect][0]
    config = qwen3_config(**({} if section is None else {"quantization_config": section}), **changes)
    return write_folder(folder, config, qwen3_tensors(dialect, seed))


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of one word per token: w3, w4, ... up to the vocabulary."""
    words = ["<pad>", "<s>", "</s>", *(f"w{n}" for n in range(3, VOCABULARY))]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": n, "content": w, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
            for n, w in enumerate(words[:3])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {w: n for n, w in enumerate(words)}, "unk_token": "</s>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def forbid_banks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, asking for memory of a bank fails the test."""

    def fail(nbytes: int, place: object = None) -> None:
        pytest.fail(f"{nbytes} bytes were asked for a bank")

    monkeypatch.setattr("freetoken.memory.mapping.map_bytes", fail)
    monkeypatch.setattr("freetoken.banks.map_bytes", fail)
