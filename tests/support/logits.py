"""The requirement, as a checker: fp32 logits within 1e-4 of a stock model's, in a padded batch and from the cache."""

from __future__ import annotations

from typing import Any

import torch

BOUND = 1e-4


def collect_logits(model: Any, vocabulary: int) -> torch.Tensor:
    """Logits of every real position of a left-padded batch of two, then of five tokens fed one by one.

    The cache is the model's own: some families have a class for it.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (2, 14), generator=generator)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[1, :4] = 0
    with torch.no_grad():
        out = model(input_ids=ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
        parts = [out.logits[0], out.logits[1, 4:]]
        name = "cache" if "cache" in out else "past_key_values"  # newer versions, and older
        cache = {name: out[name], "use_cache": True}
        for n in range(9, 14):
            out = model(input_ids=ids[:, n : n + 1], attention_mask=mask[:, : n + 1], **cache)
            parts.append(out.logits[:, 0])
    return torch.cat(parts)


def check_logits(ours: Any, stock: Any) -> None:
    """Every logit within the bound, of logits that say something."""
    vocabulary = stock.config.get_text_config().vocab_size
    found, expected = collect_logits(ours, vocabulary), collect_logits(stock, vocabulary)
    assert found.dtype == expected.dtype == torch.float32
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= BOUND
