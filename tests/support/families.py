"""Tiny random models of every family: configs shrunk field by field, weights that bf16 holds exactly."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name

SIZES: dict[str, Any] = {
    "vocab_size": 96, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "prefix_dense_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_dense_layers": 0,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "o_lora_rank": 16, "o_groups": 2, "rotary_dim": 8, "sliding_window": 64,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    # of towers for images
    "depth": 1, "num_heads": 2, "out_hidden_size": 64, "text_hidden_size": 64, "image_token_id": 90,
}  # fmt: skip
"""Values that any config which has the field takes, unless its family says otherwise."""


@functools.cache
def find_decorated() -> frozenset[str]:
    """Families with an experts class that transformers dispatches and a model that `load` could ask for."""
    found = set()
    models = Path(transformers.__file__).parent / "models"
    for family in CONFIG_MAPPING_NAMES:
        module = model_type_to_module_name(family)
        source = models / module / f"modeling_{module}.py"
        if source.exists() and "@use_experts_implementation" in source.read_text():
            kind = CONFIG_MAPPING[family]
            if kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
                found.add(family)
    return frozenset(found)


def make_config(family: str, changes: dict[str, Any]) -> Any:
    """The family's config in small; changes: fields that `SIZES` has no good value for, nested for parts."""
    return _shrink(CONFIG_MAPPING[family], changes)


def _shrink(kind: Any, changes: dict[str, Any]) -> Any:
    default = kind()
    fields = default.to_dict()
    sizes = {n: v for n, v in SIZES.items() if n in fields or n in kind.attribute_map}
    if "kv_lora_rank" in fields:  # latent attention: rotary parts alone have heads
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    names = [n for n in fields if n.endswith("_config") and n not in ("attn_config", "ffn_config")]  # dbrx's
    parts = {n: c for n in names if isinstance(c := getattr(default, n, None), PreTrainedConfig)}
    if "text_config" in parts:
        sizes = {n: v for n, v in sizes.items() if n.endswith("_token_id")}
    nested = {n: _shrink(type(c), changes.get(n, {})).to_dict() for n, c in parts.items()}
    return kind(**sizes | changes | nested)


def make_model(config: Any) -> Any:
    """Stock transformers in fp32 with its own eager experts; values of about 1 / sqrt(width), none but bf16's."""
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    model = auto.from_config(config, experts_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                random = torch.randn(parameter.shape, generator=generator) * min(0.5, parameter.shape[-1] ** -0.5)
            else:
                random = 0.5 + torch.rand(parameter.shape, generator=generator) / 2
            parameter.copy_(random.bfloat16())
    return model
