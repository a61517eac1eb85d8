"""A tiny Qwen3-MoE with a tokenizer and a tiny gpt-oss, made on the spot, so that life inside transformers is tested
without test data; and the trained models where those are at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

import freetoken
from tests.support.checkpoints import write_qwen3, write_tokenizer
from tests.support.oracle import dequantize_folder, stock_model
from tests.support.trained import Trained, read_trained


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models this small every further thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, in bf16."""
    folder = write_qwen3(tmp_path_factory.mktemp("tiny") / "m")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    """It, loaded in fp32. Tests that change it load their own."""
    return freetoken.load(tiny, dtype=torch.float32)[0]


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return freetoken.load(tiny, dtype=torch.float32)[1]


@pytest.fixture(scope="module")
def stock(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model by transformers alone."""
    return stock_model(tiny, dequantize_folder(tiny), tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small gpt-oss with YaRN, a window shorter than the text, and biases and sinks that matter; bf16 experts.

    Its vocabulary is as large as the demo's.
    """
    folder = tmp_path_factory.mktemp("gpt-oss") / "m"
    torch.manual_seed(0)
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    }
    config = GptOssConfig(
        num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, hidden_size=64, intermediate_size=32,
        vocab_size=4096, head_dim=16, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        sliding_window=8, rope_parameters=rope, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = GptOssForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["demo", "fidelity"])
def trained(request: pytest.FixtureRequest, shared_dir: Path) -> Trained:
    return read_trained(shared_dir / "models", request.param)
