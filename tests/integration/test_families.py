"""Every family that transformers dispatches experts for: right to 1e-4, or refused by the name of its class.

Random small models are saved by transformers and loaded by us, so the names of tensors are each family's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import freetoken
from freetoken.errors import CheckpointError, FreeTokenError, UnsupportedError
from tests.support.families import find_decorated, make_config, make_model
from tests.support.logits import check_logits

pytestmark = pytest.mark.usefixtures("one_thread")

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
QWEN4 = HYBRID | {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}  # fmt: skip
GEMMA4 = {"enable_moe_block": True, "vocab_size_per_layer_input": 96}
INKLING2 = {"unpadded_vocab_size": 96}
LOOP = INKLING2 | {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2,
                   "num_hidden_layers": 3}  # fmt: skip
LOADS: dict[str, dict[str, Any]] = {  # family -> what its config needs besides small sizes
    "afmoe": {},
    "aria": {},
    "aria_text": {},
    "axk1": {},
    "axk2": {},
    "bailing_hybrid": HYBRID,
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere2_moe": {"logit_scale": 1.0},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v4": {},
    "dots1": {},
    "dots3_note": {"text_config": {"head_dim": 16}, "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
                   "vision_config": {"num_hidden_layers": 42, "adapter_in_dim": 64, "adapter_out_dim": 64}},
    "dots3_note_text": {"head_dim": 16},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {"mlp_only_layers": []},
    "gemma4_text": GEMMA4 | {"hidden_activation": "silu"},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "glm4v_moe": {"text_config": {"head_dim": 64, "partial_rotary_factor": 1.0}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"],
                                  "layer_types": ["linear_attention", "deepseek_sparse_attention"]}},
    "glm_moe_dsa": {},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "hy_v4_vl": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                     "mrope_section": [2, 1, 1]}}},
    "inkling_mm_model": {"text_config": {"logits_mup_width_multiplier": 1.0},
                         "vision_config": {"num_hidden_layers": 16, "patch_size": 4}},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0,
              "use_mamba_kernels": False, "mamba_dt_rank": 4},
    "kimi_linear": HYBRID,
    "kolibri1": {},
    "laguna": {},
    "lara_mini": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "minimax_m3_vl": {},
    "minimax_m3_vl_text": {},
    "mistral4": {"head_dim": 16},
    "mistral_large4": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe": {"text_config": HYBRID},
    "qwen3_5_moe_text": HYBRID,
    "qwen3_moe": {},
    "qwen3_next": HYBRID,
    "qwen3_vl_moe": {},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "solar_open": {},
    "unlimited_ocr": {},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], type[FreeTokenError], str]] = {  # besides: what the error says
    "dbrx": ({"attn_config": {"rope_theta": 1e4}}, CheckpointError, "DbrxForCausalLM names its experts"),
    "ernie4_5_vl_moe": (
        {
            "text_config": {
                "moe_intermediate_size": [32, 32],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},
            }
        },
        UnsupportedError,
        "Ernie4_5_VLMoeMoeExperts: .* share the experts",
    ),
    "gemma4": ({"text_config": GEMMA4}, UnsupportedError, "Gemma4TextExperts applies an activation"),
    "inkling2": ({"text_config": INKLING2}, UnsupportedError, "Inkling2Experts applies an activation"),
    "inkling2_text": (INKLING2, UnsupportedError, "Inkling2Experts applies an activation"),
    "inkling2_loop": ({"text_config": LOOP}, UnsupportedError, "Inkling2LoopExperts applies an activation"),
    "inkling2_loop_text": (LOOP, UnsupportedError, "Inkling2LoopExperts applies an activation"),
    "jetmoe": ({}, CheckpointError, "JetMoeForCausalLM"),
    "llama4": ({}, UnsupportedError, "Llama4ForCausalLM has no experts module"),
    "longcat_flash": ({"zero_expert_num": 0}, UnsupportedError, "LongcatFlashForCausalLM has no experts module"),
    "muse_spark": (
        {"audio_config": {"num_hidden_layers": 4}},
        UnsupportedError,
        "MuseSparkExperts: a norm after each expert",
    ),
    "nemotron_h": ({}, UnsupportedError, "NemotronHForCausalLM: .* has no gate"),
    "step3p7": (
        {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
        CheckpointError,
        "no tensors of experts.*Step3p7ForConditionalGeneration",
    ),
}
NOT_ALONE = {"diffusion_gemma", "qwen3_omni_moe_thinker"}
"""No model that gives the next token by itself: a block diffusion, and a part of what is only saved as a whole."""


def test_the_tables_name_every_family() -> None:
    assert not find_decorated() - LOADS.keys() - REFUSED.keys() - NOT_ALONE


def load(folder: Path) -> Any:
    return freetoken.load(folder, dtype=torch.float32, threads=1)[0]


def save_small(folder: Path, family: str, changes: dict[str, Any]) -> Any:
    """The family's model, saved to a folder."""
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = make_model(make_config(family, changes))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", LOADS)
def test_logits_of_a_family(tmp_path: Path, family: str) -> None:
    if family not in find_decorated():
        pytest.skip(f"transformers {transformers.__version__} dispatches no experts of {family}")
    stock = save_small(tmp_path, family, LOADS[family])
    check_logits(load(tmp_path), stock)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_does_not_load(tmp_path: Path, family: str) -> None:
    changes, error, words = REFUSED[family]
    save_small(tmp_path, family, changes)
    with pytest.raises(error, match=words) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


AHEAD = {  # family -> (changes, a layer that is there, the same as a layer that predicts a further token)
    "deepseek_v3": ({}, "model.layers.1.", "model.layers.61."),
    "glm4_moe": ({"num_nextn_predict_layers": 1}, "model.layers.1.", "model.layers.2."),
    "minimax_m3_vl": ({}, "language_model.model.layers.1.", "language_model.mtp.layers.1."),
    "qwen3_next": (HYBRID, "model.layers.1.", "mtp.layers.0."),
}


@pytest.mark.parametrize("family", AHEAD)
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, family: str) -> None:
    changes, layer, ahead = AHEAD[family]
    stock = save_small(tmp_path, family, changes)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {name.replace(layer, ahead): tensor + 1 for name, tensor in tensors.items() if name.startswith(layer)}
    assert any(".experts." in name for name in more)
    save_file(tensors | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_logits(load(tmp_path), stock)


def test_they_never_stand_in_for_a_missing_layer(tmp_path: Path) -> None:
    save_small(tmp_path, "qwen3_next", HYBRID)
    tensors = load_file(tmp_path / "model.safetensors")
    moved = {n.replace("model.layers.0.", "mtp.layers.0.") if ".experts." in n else n: t for n, t in tensors.items()}
    save_file(moved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts .* 0 fit"):
        load(tmp_path)
