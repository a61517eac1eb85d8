"""How much text a model loses to a format: perplexity of held-out tokens.

The measure: tokens are cut into windows of the context that do not overlap; each token of a window predicts the
next one of the text; perplexity is exp of the mean loss in nats. It is what a model's eval.json records here.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freetoken.errors import ConfigError

_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Perplexity:
    """Perplexity per token over `tokens` predictions; loss is its logarithm, in nats."""

    perplexity: float
    loss: float
    tokens: int


def read_tokens(path: str | os.PathLike[str], tokenizer: Any, vocabulary: int | None = None) -> NDArray[np.int64]:
    """(N,) token ids: the array `tokens` of a .npz, else the text of the file through the tokenizer.

    vocabulary: ids must be below it. Raises `ConfigError` naming the file and what is wrong with it.
    """
    file = Path(path)

    def bad(what: str) -> ConfigError:
        return ConfigError(
            f"{file}: {what}", name="text", value=str(file), expected="a text file, or .npz with `tokens`"
        )

    if not file.is_file():
        raise bad("there is no such file")
    if file.suffix == ".npz":
        try:
            with file.open("rb") as stream, np.load(stream) as arrays:
                tokens = np.asarray(arrays["tokens"]).reshape(-1)
        except KeyError:
            raise bad("it has no array named tokens") from None
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise bad(f"it is not a readable .npz ({error})") from error
        if tokens.dtype.kind not in "iu":
            raise bad(f"its tokens are {tokens.dtype}, integers are expected")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < (vocabulary or np.inf):
            raise bad(f"its tokens run from {tokens.min()} to {tokens.max()}, the model has {vocabulary}")
        return tokens.astype(np.int64)
    if tokenizer is None:
        raise bad("the model has no tokenizer to read text with; give token ids in a .npz")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise bad("it is not UTF-8 text") from error
    return np.asarray(tokenizer(text, verbose=False)["input_ids"], np.int64)


def perplexity(
    model: Any, tokens: NDArray[np.int64], window: int = 512, on_tokens: Callable[[int], object] = lambda n: None
) -> Perplexity:
    """Teacher-forced perplexity of `tokens` (N,) in windows of `window`; a rest shorter than a window is left out.

    model: it gets tokens on its `device`, if it says one. on_tokens is called with the number of tokens just scored.
    Raises `ConfigError` when there is not one window.
    """
    if window < 1:
        raise ConfigError(
            f"the window is {window}, expected 1 or more", name="window", value=window, expected="1 or more"
        )
    windows = (len(tokens) - 1) // window
    if windows < 1:
        raise ConfigError(
            f"{len(tokens)} tokens do not fill one window of {window} and its last target; give more text",
            name="text",
            value=len(tokens),
            expected=f"at least {window + 1} tokens",
        )
    data = torch.from_numpy(tokens).to(getattr(model, "device", "cpu"))
    inputs = data[: windows * window].view(windows, window)
    targets = data[1 : windows * window + 1].view(windows, window)
    step, total = max(1, _BATCH_TOKENS // window), 0.0
    with torch.inference_mode():
        for start in range(0, windows, step):
            part = slice(start, start + step)
            logits = model(inputs[part]).logits.float()
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets[part].flatten(), reduction="sum"
            ).item()
            on_tokens(targets[part].numel())
    loss = total / (windows * window)
    return Perplexity(math.exp(loss), loss, windows * window)


@dataclass(frozen=True)
class GreedyDifference:
    """Where greedy texts of two models part.

    tokens: compared. position: the first new token that differs, counted from 0, None where all are equal. margin: by
    how much the first model liked its own token there better than the second one's, in logits; 0 where all are equal.
    """

    tokens: int
    position: int | None = None
    margin: float = 0.0


def compare_greedy(one: Any, other: Any, prompt: torch.Tensor, max_new_tokens: int) -> GreedyDifference:
    """Continue a prompt (1, N) of token ids greedily with both models; the second one as its `generate` does it.

    Models that differ in rounding alone part only where two tokens are nearly as likely: a large margin is a fault.
    """

    def run(model: Any, **how: Any) -> Any:
        ids = prompt.to(model.device)
        how |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, "do_sample": False}
        with torch.inference_mode():
            return model.generate(ids, **how)

    first, second = run(one, return_dict_in_generate=True, output_logits=True), run(other)
    texts = [ids[0, prompt.shape[1] :].tolist() for ids in (first.sequences, second)]
    shared = min(map(len, texts))
    for position, (mine, yours) in enumerate(zip(*texts, strict=False)):
        if mine != yours:
            logits = first.logits[position][0].float()
            return GreedyDifference(shared, position, float(logits[mine] - logits[yours]))
    return GreedyDifference(shared)
