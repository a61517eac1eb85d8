"""GGUF files of models in safetensors, written with the gguf package as llama.cpp's converter names and types things.

Matrices of experts get the type asked for, by the gguf package's quantizers or by ours; norms, biases and routers are
F32, everything else is BF16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from freetoken import formats
from freetoken.formats import Matrix
from freetoken.formats.codes import unpack_nibbles
from tests.support.oracle import Weights, take_expert

Tensors = dict[str, tuple[Type, NDArray[Any]]]
"""GGUF name -> type and rows: bytes of blocks, or floats of a type that NumPy has."""
Encode = Callable[[NDArray[np.float32], Type], tuple[Type, NDArray[Any]]]
"""Values and the type wanted -> that type and rows of it."""

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
EXACT = {"bf16": Type.BF16, "mxfp4": Type.MXFP4, "q4_0": Type.Q4_0, "q8_0": Type.Q8_0}
"""Format -> the ggml type of the same values."""


def encode(values: NDArray[np.float32], kind: Type) -> tuple[Type, NDArray[Any]]:
    """Values as rows of a type."""
    return kind, gguf.quantize(np.ascontiguousarray(values, np.float32), kind)


def encode_ours(values: NDArray[np.float32], kind: Type) -> tuple[Type, NDArray[np.uint8]]:
    """Matrices of experts (E, N, K) as rows of a type in `EXACT`, with the codes and scales of our own quantizer."""
    fmt = formats.get(next(name for name, exact in EXACT.items() if exact == kind))
    return kind, np.stack([ggml_blocks(fmt.quantize(np.ascontiguousarray(matrix))) for matrix in values])


def ggml_blocks(matrix: Matrix) -> NDArray[np.uint8]:
    """A matrix as ggml's rows (N, bytes) of blocks: the scale, then 32 codes as they are or two in a byte.

    Two in a byte: byte j of 16 holds elements j (low nibble) and j + 16.
    """
    if matrix.scales is None:
        return matrix.codes
    n, k = matrix.shape
    packed = matrix.format.bits == 4
    codes: NDArray[Any] = (unpack_nibbles(matrix.codes) if packed else matrix.codes).reshape(n, k // 32, 32)
    if packed:
        codes = codes[:, :, :16] | codes[:, :, 16:] << 4
    scales = np.ascontiguousarray(matrix.scales).view(np.uint8).reshape(n, k // 32, -1)
    return np.concatenate([scales, codes], axis=2).reshape(n, -1)


def gguf_tensors(
    config: Mapping[str, Any],
    weights: Weights,
    kind: Type | Mapping[str, Type] = Type.BF16,
    merged: bool = False,
    encode_experts: Encode = encode,
) -> Tensors:
    """All tensors of a model from its weights in stock names; kind: type of experts, or gate, up and down -> type."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[config["model_type"]])
    table = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    kinds = dict.fromkeys(("gate", "up", "gate_up", "down"), kind) if isinstance(kind, Type) else kind
    tensors: Tensors = {}
    for name, tensor in weights.items():
        if ".experts." in name:
            continue
        module, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            module, suffix = name, "weight"
        known = f"{table.get_name(module)}.{suffix}"
        plain = tensor.ndim == 1 or "ffn_gate_inp" in known
        tensors[known] = encode(tensor.float().numpy(), Type.F32 if plain else Type.BF16)
    for layer in range(config["num_hidden_layers"]):
        for name, values in experts_of(config, weights, layer, merged).items():
            known = f"blk.{layer}.ffn_{name.removesuffix('_bias')}_exps"
            bias = name.endswith("_bias")
            if bias:
                tensors[f"{known}.bias"] = encode(values, Type.F32)
            else:
                tensors[f"{known}.weight"] = encode_experts(values, kinds[name])
    return tensors


def experts_of(config: Mapping[str, Any], weights: Weights, layer: int, merged: bool) -> dict[str, NDArray[np.float32]]:
    """Name -> fp32 values of all experts of a layer, (E, N, K) or biases (E, N)."""
    count = config.get("num_experts") or config["num_local_experts"]
    parts = [take_expert(weights, f"model.layers.{layer}.mlp.experts", e) for e in range(count)]
    stacked = {
        name: torch.stack([part[name].float() for part in parts]).numpy()  # type: ignore[union-attr]
        for name, tensor in parts[0].items()
        if tensor is not None
    }
    for end in ("", "_bias"):
        if merged and f"gate{end}" in stacked:
            stacked[f"gate_up{end}"] = np.concatenate([stacked.pop(f"gate{end}"), stacked.pop(f"up{end}")], axis=1)
    return stacked


def write_gguf(
    file: Path,
    config: Mapping[str, Any],
    tensors: Tensors,
    tokenizer: Path | None = None,
    parts: int = 0,
    more: Mapping[str, int] | None = None,
) -> Path:
    """One file, or as many as asked for; returns the (first) file. tokenizer: a byte-level tokenizer.json."""
    writer = gguf.GGUFWriter(
        file,
        ARCHITECTURES[config["model_type"]],
        split_max_tensors=-(-len(tensors) // parts) if parts else 0,
    )
    add_metadata(writer, config)
    for key, number in (more or {}).items():
        writer.add_uint32(key, number)
    if tokenizer is not None:
        add_tokenizer(writer, config, json.loads(tokenizer.read_text()))
    for name, (kind, rows) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.with_name(f"{file.stem}-00001-of-{parts:05}.gguf") if parts else file


def add_metadata(writer: Any, config: Mapping[str, Any]) -> None:
    """What the converter writes of a config."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0))
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def add_tokenizer(writer: Any, config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> None:
    """A byte-level BPE as llama.cpp's "gpt2" vocabulary."""
    model = tokenizer["model"]
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    ids = sorted(model["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if n in special else gguf.TokenType.NORMAL for _, n in ids])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    for name, add in (
        ("eos", writer.add_eos_token_id),
        ("bos", writer.add_bos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        if config.get(f"{name}_token_id") is not None:
            add(config[f"{name}_token_id"])
