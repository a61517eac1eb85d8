"""What a generation has given so far, kept and judged on the host as transformers' loop does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Generated:
    """What is generated, as transformers' loop has it, but on the host.

    prompts: (B, T). pad: what comes after a text that has ended.
    """

    def __init__(self, prompts: torch.Tensor, criteria: Sequence[Any], pad: int | None) -> None:
        self._prompts, self._criteria = prompts, criteria
        self._pad = pad if any(hasattr(criterion, "eos_token_id") for criterion in criteria) else None
        self._going = torch.ones(len(prompts), dtype=torch.int64, device="cpu")
        self._ids = prompts.to("cpu", torch.int64, copy=True)
        self._n = prompts.shape[1]

    def add(self, tokens: torch.Tensor) -> torch.Tensor:
        """The next token of each text (B,), padding where one has ended; raises `RuntimeError` for -1."""
        if bool((tokens < 0).any()):
            raise RuntimeError("no token can be sampled: its scores are nan, or none is above -inf")
        if self._pad is not None:
            tokens = tokens * self._going + self._pad * (1 - self._going)
        if self._n == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.empty_like(self._ids)], dim=1)
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
