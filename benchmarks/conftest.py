"""What benchmarks share: the machine in their records, as `ft info` tells it; a model that is large enough to load."""

from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.info import collect


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Put the topology and settings into the JSON of a run."""
    machine_info["freetoken"] = collect().to_dict()


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with 0.9 GiB of bf16 experts and a small dense part."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=1024,
        moe_intermediate_size=576,
        num_experts=64,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path
