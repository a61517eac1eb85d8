"""Perplexity against a direct computation, and the published figures of two models where they are at hand."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import freetoken
from freetoken.errors import ConfigError
from freetoken.fidelity import perplexity, read_tokens


def biased_model(vocabulary: int, favourite: int, strength: float) -> object:
    """A "model" that likes one token everywhere."""

    def run(ids: torch.Tensor) -> SimpleNamespace:
        logits = torch.zeros(*ids.shape, vocabulary)
        logits[..., favourite] = strength
        return SimpleNamespace(logits=logits)

    return run


def test_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    result = perplexity(biased_model(50, 0, 0.0), np.arange(33) % 50, window=8)
    assert result.perplexity == pytest.approx(50, rel=1e-5)
    assert result.tokens == 32


def test_targets_are_the_next_tokens() -> None:
    tokens = np.array([0, 1, 1, 1, 1, 0, 0, 0, 0])  # targets of windows of 4: 1 1 1 1, then 0 0 0 0
    result = perplexity(biased_model(2, 1, 3.0), tokens, window=4)
    right, wrong = -math.log(1 / (1 + math.exp(-3))), -math.log(1 / (1 + math.exp(3)))
    assert result.loss == pytest.approx((right + wrong) / 2, rel=1e-5)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not fill one window"):
        perplexity(biased_model(2, 0, 0.0), np.zeros(8, np.int64), window=8)


def test_read_tokens_refuses_what_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_tokens(tmp_path / "absent.txt", None)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_tokens(tmp_path / "binary.txt", lambda *a, **k: {})
    (tmp_path / "some.txt").write_text("text")
    with pytest.raises(ConfigError, match="no tokenizer"):
        read_tokens(tmp_path / "some.txt", None)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"ids": np.zeros(3, np.int64)}, "no array named tokens"),
        ({"tokens": np.linspace(0, 1, 9)}, "integers are expected"),
        ({"tokens": np.array([1, -1])}, "from -1 to 1"),
        ({"tokens": np.array([1, 50])}, "the model has 50"),
        ({"tokens": np.array(["a"])}, "integers are expected"),
    ],
)
def test_read_tokens_refuses_what_are_no_tokens(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(ConfigError, match=words):
        read_tokens(tmp_path / "t.npz", None, vocabulary=50)


def test_read_tokens_refuses_a_file_that_is_no_archive(tmp_path: Path) -> None:
    for content in (b"", b"PK\x03\x04 cut short", b"text"):
        (tmp_path / "t.npz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"not a readable \.npz|no array"):
            read_tokens(tmp_path / "t.npz", None)


@pytest.mark.parametrize("name", ["demo", "fidelity"])
def test_bf16_experts_keep_the_published_perplexity(shared_dir: Path, name: str) -> None:
    """The whole held-out text within 0.1 % of what stock transformers gave in bf16."""
    folder = shared_dir / "models" / name
    expected = json.loads((folder / "eval.json").read_text())["test"]["bf16"]
    model, tokenizer = freetoken.load(folder)
    tokens = read_tokens(shared_dir / "models" / "heldout_test_tokens.npz", tokenizer)
    result = perplexity(model, tokens, 512)
    assert result.tokens == expected["tokens"]
    assert result.perplexity == pytest.approx(expected["perplexity"], rel=1e-3)
