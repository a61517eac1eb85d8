"""A tiny Qwen3-MoE with a tokenizer, made on the spot, so that life inside transformers is tested without test data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import freetoken
from tests.support.checkpoints import write_qwen3, write_tokenizer
from tests.support.oracle import dequantize_folder, stock_model


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
