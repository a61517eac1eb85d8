"""The trained models of the test data, with the text that they have not seen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.fidelity import read_tokens
from tests.support.oracle import Weights, dequantize_folder


@dataclass(frozen=True)
class Trained:
    """A model in bf16: its folder, its config, its weights in stock names; held-out text as (N,) token ids."""

    folder: Path
    config: dict[str, Any]
    weights: Weights
    heldout: NDArray[np.int64]

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"


def read_trained(models: Path, name: str) -> Trained:
    """A model of the folder `models` of the test data."""
    folder = models / name
    config = json.loads((folder / "config.json").read_text())
    heldout = read_tokens(models / "heldout_test_tokens.npz", None, config["vocab_size"])
    return Trained(folder, config, dequantize_folder(folder), heldout)
