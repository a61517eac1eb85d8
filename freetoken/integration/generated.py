"""What a generation has given so far, kept and judged on the host as transformers' loop does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Generated:
    """What is generated, as transformers' loop has it, but on the host.

    prompts: (B, T). longest: tokens of each with the prompt; pad: what comes after one that has ended.
    """

    def __init__(self, prompts: torch.Tensor, criteria: Sequence[Any], pad: int | None, longest: int) -> None:
        self._prompts, self._criteria = prompts, criteria
        self._pad = pad if any(hasattr(criterion, "eos_token_id") for criterion in criteria) else None
        self._going = torch.ones(len(prompts), dtype=torch.int64)
        self._ids = torch.empty(len(prompts), longest, dtype=torch.int64)
        self._n = prompts.shape[1]
        self._ids[:, : self._n].copy_(prompts)

    def add(self, tokens: torch.Tensor) -> torch.Tensor:
        """The next token of each text (B,), padding where one has ended."""
        if self._pad is not None:
            tokens = tokens * self._going + self._pad * (1 - self._going)
        self._ids[:, self._n] = tokens
        self._n += 1
        here = self._ids[:, : self._n]
        there: torch.Tensor | None = None
        for criterion in self._criteria:
            if type(criterion).__module__.startswith("transformers."):
                ended = criterion(here, None)
            else:  # it may compare with tensors of its own
                there = here.to(self._prompts.device, copy=True) if there is None else there
                ended = torch.as_tensor(criterion(there, None)).cpu()
            self._going *= ~ended
        return tokens

    @property
    def has_ended(self) -> bool:
        """Whether all texts have."""
        return not bool(self._going.any())

    def result(self) -> torch.Tensor:
        """(B, tokens): prompts and what was generated."""
        new = self._ids[:, self._prompts.shape[1] : self._n]
        return torch.cat([self._prompts, new.to(self._prompts.device)], dim=1)
