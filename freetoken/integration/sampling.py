"""The next tokens of logits as transformers chooses them, on tensors that stay where they are and without a wait.

transformers' own logits processors compute, but for those that read all tokens so far, whose arithmetic is done here
on a mask of what was seen. The random numbers are those of `torch.multinomial`, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

Apply = Callable[[torch.Tensor], torch.Tensor]
"""Scores (B, vocabulary) in, scores out."""

_ALONE = (
    EpsilonLogitsWarper, LogitNormalization, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper,
    TopPLogitsWarper, TypicalLogitsWarper,
)  # fmt: skip
"""Processors that need the scores alone and wait for nothing: they bring no number from the host, as torch.where
does."""
_LENGTHS = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)
_KNOWN = (
    *_ALONE, *_LENGTHS, InfNanRemoveLogitsProcessor, RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor,
)  # fmt: skip


def unknown(processors: Sequence[Any]) -> list[str]:
    """Names of the classes of processors that a `Sampler` cannot take; theirs may do anything."""
    return [type(processor).__name__ for processor in processors if type(processor) not in _KNOWN]


class Sampler:
    """Chooses the next token of each of a few sequences.

    processors: transformers', in their order, none of them `unknown`. ends: token ids after which a sequence gets
    `pad`; none: sequences go on. sampled: by chance, else the likeliest. valid: (B,) bool, which sequences go on; those
    that end are cleared in it.
    """

    def __init__(
        self,
        processors: Sequence[Any],
        vocabulary: int,
        valid: torch.Tensor,
        *,
        sampled: bool,
        ends: Sequence[int],
        pad: int,
    ) -> None:
        self.sampled, self._valid, self._pad = sampled, valid, pad
        self._vocabulary = vocabulary
        on = valid.device
        self._ends = torch.tensor(ends, dtype=torch.int64, device=on)
        self._length = torch.zeros(1, dtype=torch.int64, device=on)
        self._seen: list[torch.Tensor] = []
        self._least: list[torch.Tensor] = []
        self._apply = [self._adapt(processor, vocabulary) for processor in processors]

    @property
    def rows(self) -> int:
        """Sequences."""
        return len(self._valid)

    @property
    def moved(self) -> tuple[torch.Tensor, ...]:
        """What choosing changes."""
        return self._length, *self._seen

    def begin(self, ids: torch.Tensor, processors: Sequence[Any]) -> None:
        """Start with prompts (B, T). processors: of the same `sampler_key` as those before."""
        self._length.fill_(ids.shape[1])
        least, seen = iter(self._least), iter(self._seen)
        for processor in processors:
            if type(processor) in _LENGTHS:
                next(least).fill_(_least_length(processor))
            elif type(processor) is RepetitionPenaltyLogitsProcessor:
                _mark_seen(next(seen), ids, processor.prompt_ignore_length)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The next tokens (B,), of logits (B, vocabulary) in fp32; -1 where none can be sampled."""
        scores = logits
        for apply in self._apply:
            scores = apply(scores)
        if self.sampled:
            chances = torch.nn.functional.softmax(scores, dim=-1)
            tokens = (chances / self.draw()).argmax(-1)
            tokens = tokens.masked_fill(~(chances.sum(-1) > 0), -1)
        else:
            tokens = scores.argmax(-1)
        if len(self._ends):
            tokens = tokens.masked_fill(~self._valid, self._pad)
            self._valid.logical_and_((tokens[:, None] != self._ends).all(-1))
        self._length.add_(1)
        for seen in self._seen:
            seen.scatter_(1, tokens[:, None].clamp(0, seen.shape[1] - 1), True)
        return tokens

    def draw(self) -> torch.Tensor:
        """The random numbers (B, vocabulary) of one choice: those that `torch.multinomial` would take."""
        noise = torch.empty(self.rows, self._vocabulary, dtype=torch.float32, device=self._valid.device)
        return noise.exponential_(1)

    def _adapt(self, processor: Any, vocabulary: int) -> Apply:
        on = self._valid.device
        if type(processor) is RepetitionPenaltyLogitsProcessor:
            seen = torch.zeros(len(self._valid), vocabulary + 1, dtype=torch.bool, device=on)
            self._seen.append(seen)
            return _Penalty(processor.penalty, seen[:, :vocabulary])
        if type(processor) in _LENGTHS:
            least = torch.zeros(1, dtype=torch.int64, device=on)
            self._least.append(least)
            return _Until(_marked(processor.eos_token_id, vocabulary, on), self._length, least)
        if type(processor) is SuppressTokensLogitsProcessor:
            never = _marked(processor.suppress_tokens, vocabulary, on)
            return lambda scores: scores.masked_fill(never, -torch.inf)
        if type(processor) is InfNanRemoveLogitsProcessor:
            return _finite
        return lambda scores: processor(None, scores)


def _finite(scores: torch.Tensor) -> torch.Tensor:
    """Numbers for what is none."""
    ends = torch.finfo(scores.dtype)
    return scores.nan_to_num(0.0, ends.max, ends.min)


class _Penalty:
    """What was seen is less likely by a factor."""

    def __init__(self, penalty: float, seen: torch.Tensor) -> None:
        self._penalty, self._seen = penalty, seen

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        less = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return torch.where(self._seen, less, scores)


class _Until:
    """Some tokens never come before a text is so long."""

    def __init__(self, tokens: torch.Tensor, length: torch.Tensor, least: torch.Tensor) -> None:
        self._tokens, self._length, self._least = tokens, length, least

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(self._tokens & (self._length < self._least), -torch.inf)


def sampler_key(processors: Sequence[Any]) -> Hashable:
    """What processors of the same key have in common is all that a `Sampler` keeps of them."""
    return tuple((type(processor), _parameters(processor)) for processor in processors)


def _parameters(processor: Any) -> Hashable:
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return float(processor.penalty)
    if type(processor) in _LENGTHS:
        return tuple(processor.eos_token_id.tolist())
    if type(processor) is SuppressTokensLogitsProcessor:
        return tuple(processor.suppress_tokens.tolist())
    return tuple(sorted(vars(processor).items()))


def _least_length(processor: Any) -> int:
    if type(processor) is MinLengthLogitsProcessor:
        return int(processor.min_length)
    return int(processor.prompt_length_to_skip + processor.min_new_tokens)


def _marked(tokens: torch.Tensor, vocabulary: int, on: torch.device) -> torch.Tensor:
    """(vocabulary,) bool: these tokens."""
    return torch.isin(torch.arange(vocabulary, device=on), tokens.to(on))


def _mark_seen(seen: torch.Tensor, ids: torch.Tensor, ignored: int | torch.Tensor | None) -> None:
    """What of prompts counts, in (B, vocabulary + 1), whose last column takes what does not. ignored: first tokens."""
    last = seen.shape[1] - 1
    if ignored is not None:
        skip = torch.as_tensor(ignored, device=ids.device).reshape(-1, 1)
        ids = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) < skip, last)
    seen.fill_(False)
    seen.scatter_(1, ids.clamp(max=last).to(seen.device), True)
