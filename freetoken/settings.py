"""Every FREETOKEN_* environment variable: its name, type, default and meaning, read when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from freetoken.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """A variable that takes one of a few words."""

    name: str
    default: str
    choices: tuple[str, ...]
    meaning: str

    def read(self, environ: Mapping[str, str] | None = None) -> str:
        """The value in force; raises `ConfigError` listing the accepted words when it is none of them."""
        text = (os.environ if environ is None else environ).get(self.name, "").strip().lower()
        return self.check(text or self.default, self.name)

    def check(self, text: str, name: str) -> str:
        """Return `text` if it is one of the words; raises `ConfigError` as `read` does, under this name, if not."""
        if text not in self.choices:
            expected = ", ".join(self.choices)
            raise ConfigError(
                f"{name}={text!r} is not one of {expected} ({self.meaning}): unset it or choose one of these",
                name=name,
                value=text,
                expected=expected,
            )
        return text


CPU_ACT = Choice(
    "FREETOKEN_CPU_ACT",
    "auto",
    ("auto", "fp32", "bf16", "int8", "fp8"),
    "precision of activations in CPU expert kernels; auto follows the model's dtype and the CPU, fp8 rounds them as "
    "DeepSeek's own code does",
)
CPU_ISA = Choice(
    "FREETOKEN_CPU_ISA",
    "auto",
    ("auto", "scalar", "avx2", "avx512", "avx512vnni", "avx512bf16"),
    "highest instruction set that CPU expert kernels may use; auto takes the best this CPU has",
)
CPU_CORES = Choice(
    "FREETOKEN_CPU_CORES",
    "auto",
    ("auto", "performance", "all"),
    "cores of a hybrid processor that get workers; auto takes the performance cores",
)
