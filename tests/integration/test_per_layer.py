"""A model with an embedding of its last tokens says the same whether the table lies in memory or on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from freetoken.errors import ConfigError
from freetoken.integration.per_layer import PerLayerEmbedding, as_table
from freetoken.rows import DiskRowTable, MemoryRowTable, NgramHash, RowTable, SafetensorsRows
from tests.support.checkpoints import qwen3_config

WIDTH, SHARDS, END = 20, 4, 0
NGRAMS = NgramHash.published(1, END, above=200)
N = -(-NGRAMS.rows // SHARDS) * SHARDS
NAME = "ngram_embedding.shard_{i}.weight"


@pytest.fixture(params=["one scale", "scale for each row"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RowTable, RowTable]]:
    """The same e4m3 rows in memory and, in four tensors, on disk."""
    torch.manual_seed(0)
    rows = (torch.randn(N, WIDTH) * 3).to(torch.float8_e4m3fn)
    scale: Any = torch.tensor(0.05) if request.param == "one scale" else torch.rand(N) * 0.1 + 0.01
    tensors = {NAME.format(i=number): part.clone() for number, part in enumerate(rows.split(N // SHARDS))}
    save_file({**tensors, "weight_scale": scale}, tmp_path / "f.safetensors")
    source = SafetensorsRows.of(tmp_path / "f.safetensors", NAME)
    with DiskRowTable.open(source, N, WIDTH, "F8_E4M3", "weight_scale") as disk:
        yield as_table(rows, float(scale) if scale.ndim == 0 else scale), disk


def test_values(tables: tuple[RowTable, RowTable]) -> None:
    """Each head's row times its scale, side by side, projected and added."""
    hidden, tokens = torch.randn(2, 5, 8), torch.randint(0, 50, (2, 5))
    results = []
    for table in tables:
        torch.manual_seed(1)
        layer = PerLayerEmbedding(table, NGRAMS, 8)
        found, previous = layer(hidden, tokens, layer.start(2))
        ids = NGRAMS.look_up(tokens.numpy(), NGRAMS.start(2))
        codes = torch.from_numpy(tables[0].gather(ids)).view(torch.float8_e4m3fn).float()
        scales = torch.from_numpy(tables[0].gather_scales(ids))
        expected = hidden + (codes * scales[..., None]).reshape(2, 5, -1) @ layer.project.weight.T
        torch.testing.assert_close(found, expected)
        assert torch.equal(previous, tokens[:, -2:])
        results.append(found)
    assert torch.equal(*results)


def test_token_by_token(tables: tuple[RowTable, RowTable]) -> None:
    layer = PerLayerEmbedding(tables[1], NGRAMS, 8)
    tokens = torch.randint(0, 5, (3, 9))
    whole = layer.look_up(layer.find_rows(tokens, layer.start(3)))
    previous = layer.start(3)
    for at in range(9):
        one = tokens[:, at : at + 1]
        assert torch.equal(layer.look_up(layer.find_rows(one, previous)), whole[:, at : at + 1])
        previous = layer(torch.zeros(3, 1, 8), one, previous)[1]


def generate(table: RowTable, *, cached: bool) -> list[list[int]]:
    """What a small random Qwen3-MoE goes on with, whose second layer gets the embedding added."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.Qwen3MoeConfig(**qwen3_config())
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    hidden = model.config.hidden_size
    layer = PerLayerEmbedding(table, NGRAMS, hidden)
    torch.nn.init.normal_(layer.project.weight, std=1.0)
    prompt = torch.randint(1, model.config.vocab_size, (2, 7))
    tokens, previous, started = prompt, layer.start(2), False

    def see(module: torch.nn.Module, arguments: Any, named: Any) -> None:
        nonlocal tokens, previous, started
        tokens = named["input_ids"]
        assert not started or tokens.shape[1] == 1 or not cached
        if not cached:
            previous = layer.start(2)
        started = True

    def add(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        nonlocal previous
        states, previous = layer(output, tokens, previous)
        return states

    model.register_forward_pre_hook(see, with_kwargs=True)
    model.model.layers[1].register_forward_hook(add)
    found = model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=cached)
    texts: list[list[int]] = found.tolist()
    return texts


def test_generation(tables: tuple[RowTable, RowTable]) -> None:
    """In memory and on disk; the text so far at once, then token by token, or all of it each time."""
    in_memory = generate(tables[0], cached=True)
    assert generate(tables[1], cached=True) == in_memory
    assert generate(tables[1], cached=False) == in_memory
    nothing = MemoryRowTable(np.zeros((N, WIDTH), np.uint8), "F8_E4M3")
    assert generate(nothing, cached=True) != in_memory, "the embedding changes what is said"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_rows_of_other_dtypes(dtype: torch.dtype) -> None:
    rows = torch.randn(N, 4).to(dtype)
    layer = PerLayerEmbedding(as_table(rows, 2.0), NGRAMS, 8)
    ids = torch.tensor([[3, 1]])
    assert torch.equal(layer.look_up(ids), rows[ids].float().flatten(-2) * 2)


def test_what_does_not_fit() -> None:
    few = MemoryRowTable(np.zeros((5, 4), np.uint8), "F8_E4M3")
    with pytest.raises(ConfigError, match=f"asks for {NGRAMS.rows} rows, a table in memory has 5"):
        PerLayerEmbedding(few, NGRAMS, 8)
    words = MemoryRowTable(np.zeros((N, 4), np.uint8), "I32")
    with pytest.raises(ConfigError, match="has rows of I32, expected one of F8_E4M3"):
        PerLayerEmbedding(words, NGRAMS, 8)
    with pytest.raises(ConfigError, match=r"rows are torch\.int8"):
        as_table(torch.zeros(2, 2, dtype=torch.int8))


def test_tokens_of_32_bits(tables: tuple[RowTable, RowTable]) -> None:
    layer = PerLayerEmbedding(tables[0], NGRAMS, 8)
    tokens, previous = torch.randint(0, 50_000, (2, 5)), torch.randint(0, 50_000, (2, 2))
    assert torch.equal(layer.find_rows(tokens.int(), previous.int()), layer.find_rows(tokens, previous))
