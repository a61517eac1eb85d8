"""What GGUF metadata say about a model, in the terms of config.json: one function per architecture.

transformers makes configs from GGUF too, but (5.17 to 5.24) passes over the width of qwen3moe's experts and takes
gpt-oss' rope scaling from the wrong bytes of the file; and a config is needed here before transformers is. Numbers
that size something are checked against tensors, and what would change the model unseen is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import numpy as np

from freetoken.checkpoint.safetensors import TensorInfo
from freetoken.errors import CheckpointError


class _Facts:
    """Metadata of one architecture, typed, and the shapes of tensors."""

    def __init__(self, file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
        self.file, self.metadata, self.tensors = file, metadata, tensors
        self.architecture = str(metadata.get("general.architecture"))

    def bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {what}", file=str(self.file))

    def count(self, key: str, default: int | None = None) -> int:
        """A positive number below `architecture.`."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self.bad(f"metadata {self.architecture}.{key} is {shown(value)}, expected a positive number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive finite number below `architecture.`; files have 32 bits of it, here it is the decimal meant."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        with np.errstate(over="ignore"):
            number = float(str(np.float32(value))) if type(value) in (int, float) else 0.0
        if not math.isfinite(number) or number <= 0:
            raise self.bad(f"metadata {self.architecture}.{key} is {shown(value)}, expected a positive number")
        return number

    def token(self, key: str, vocabulary: int) -> int | None:
        """An id of the vocabulary below `tokenizer.ggml.`, or None."""
        value = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        return value if type(value) is int and 0 <= value < vocabulary else None

    def shape(self, name: str) -> tuple[int, int]:
        """The shape of a matrix that must be there."""
        info = self.tensors.get(name)
        if info is None or len(info.shape) != 2:
            raise self.bad(f"tensor {name!r} is missing" if info is None else f"tensor {name!r} is no matrix")
        return info.shape[0], info.shape[1]


def config_of(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The config of a model; of an unsupported architecture only its name, as model_type.

    Raises `CheckpointError` when a number is missing, is none, or contradicts the tensors.
    """
    facts = _Facts(file, metadata, tensors)
    build = ARCHITECTURES.get(facts.architecture)
    return {"model_type": facts.architecture} if build is None else build(facts)


def _common(facts: _Facts) -> dict[str, Any]:
    layers, hidden = facts.count("block_count"), facts.count("embedding_length")
    heads = facts.count("attention.head_count")
    kv_heads = facts.count("attention.head_count_kv", heads)
    head_dim = facts.count("attention.key_length", hidden // heads)
    vocabulary, width = facts.shape("token_embd.weight")
    found = {int(m.group(1)) for name in facts.tensors if (m := re.match(r"blk\.(\d{1,9})\.", name))}
    if len(found) != layers or max(found) != layers - 1:
        raise facts.bad(f"metadata say {layers} blocks, tensors are there for {len(found)}")
    for what, said, there in (
        ("the hidden size", hidden, width),
        ("the width of all heads", heads * head_dim, facts.shape("blk.0.attn_q.weight")[0]),
        ("the rotated width of a head", facts.count("rope.dimension_count", head_dim), head_dim),
        ("the width of key heads", kv_heads * head_dim, facts.shape("blk.0.attn_k.weight")[0]),
    ):
        if said != there:
            raise facts.bad(f"metadata say that {what} is {said}, the tensors that it is {there}")
    return {
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "max_position_embeddings": facts.count("context_length"),
        "num_attention_heads": heads,
        "num_experts_per_tok": facts.count("expert_used_count"),
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": facts.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(facts),
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        "vocab_size": vocabulary,
        **{f"{name}_token_id": facts.token(key, vocabulary) for name, key in _TOKENS.items()},
    }


_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def _rope(facts: _Facts) -> dict[str, Any]:
    kind = facts.metadata.get(f"{facts.architecture}.rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.real("rope.freq_base", 10_000.0)}
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise facts.bad(
            f"metadata {facts.architecture}.rope.scaling.type is {shown(kind)}; linear and yarn are supported"
        )
    rope |= {"rope_type": kind, "factor": facts.real("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = facts.count("rope.scaling.original_context_length")
        rope["beta_fast"] = facts.real("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = facts.real("rope.scaling.yarn_beta_slow", 1.0)
    start = f"{facts.architecture}.rope.scaling."
    for key in facts.metadata:
        if key.startswith(start) and key.removeprefix(start) not in _ROPE_SCALING:
            raise facts.bad(f"metadata {key!r} is not supported")
    return rope


_ROPE_SCALING = ("type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")


def _qwen3moe(facts: _Facts) -> dict[str, Any]:
    config = _common(facts)
    return config | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "intermediate_size": facts.count("feed_forward_length", config["hidden_size"]),
        "mlp_only_layers": [],
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # no key says it: llama.cpp builds this architecture so
        "num_experts": facts.count("expert_count"),
    }


def _gpt_oss(facts: _Facts) -> dict[str, Any]:
    """Layers alternate between the window and full attention, as llama.cpp builds them whatever a file says."""
    config = _common(facts)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False
    return config | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": facts.count("expert_feed_forward_length"),
        "layer_types": [("full" if n % 2 else "sliding") + "_attention" for n in range(config["num_hidden_layers"])],
        "num_local_experts": facts.count("expert_count"),
        "sliding_window": facts.count("attention.sliding_window"),
    }


ARCHITECTURES: dict[str, Callable[[_Facts], dict[str, Any]]] = {"gpt-oss": _gpt_oss, "qwen3moe": _qwen3moe}
"""GGUF's general.architecture -> what makes its config."""
