"""Decoding with experts in quantized banks against stock transformers in bf16, token for token, interleaved.

FREETOKEN_BENCH_MODEL=folder_of_a_bf16_model make bench ARGS="-k decode -s"
"""

import os
from functools import partial
from typing import Any

import pytest
import torch
from interleave import compare

import freetoken
from freetoken import demo, formats
from freetoken.checkpoint.inspect import inspect

NEW_TOKENS = 64
ROUNDS = 9


def decode(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Greedy continuation of a short prompt by a fixed number of tokens."""
    with torch.inference_mode():
        output: torch.Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    return output


@pytest.fixture(scope="module")
def folder() -> str:
    """The model to decode with; the demo model, whose experts are nvfp4, when none is named."""
    return os.environ.get("FREETOKEN_BENCH_MODEL", str(demo.path()))


def bench_decode(benchmark: Any, folder: str) -> None:
    """Every format, and stock bf16 where the checkpoint is bf16; the ratio is stock's time over ours."""
    transformers = pytest.importorskip("transformers")
    found = inspect(folder)
    plain = found.quantization == "none"
    models = {
        name or found.formats[0]: freetoken.load(folder, expert_format=name)
        for name in (formats.names() if plain else [None])
    }
    tokenizer = next(iter(models.values()))[1]
    ids = tokenizer("Once upon a time there was a little girl who", return_tensors="pt")["input_ids"]
    sides = {name: partial(decode, model, ids) for name, (model, _) in models.items()}
    if plain:
        stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        sides["stock bf16"] = partial(decode, stock, ids)
    result = benchmark.pedantic(lambda: compare(sides, ROUNDS), rounds=1)
    base = "stock bf16" if plain else next(iter(sides))
    print(f"\n{folder}: {NEW_TOKENS} tokens, {ROUNDS} interleaved rounds, {torch.get_num_threads()} torch threads")
    print(f"{'side':<24}{'tokens/s':>10}{'against ' + base:>24}")
    for side in sides:
        rate, ratio = NEW_TOKENS / result.median(side), result.ratio(side, base)
        print(f"{side:<24}{rate:>10.1f}{ratio:>24.2f}")
        benchmark.extra_info[side] = {"tokens_per_s": rate, "ratio": ratio}
