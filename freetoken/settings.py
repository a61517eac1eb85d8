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
        """Return `text` if it is accepted; raises `ConfigError` as `read` does, under this name, if not."""
        if not self.takes(text):
            expected = self.expected
            raise ConfigError(
                f"{name}={text!r} is not one of {expected} ({self.meaning}): unset it or choose one of these",
                name=name,
                value=text,
                expected=expected,
            )
        return text

    def takes(self, text: str) -> bool:
        """Whether this is an accepted value."""
        return text in self.choices

    @property
    def expected(self) -> str:
        """The accepted values, for people."""
        return ", ".join(self.choices)


@dataclass(frozen=True)
class ChoiceOrNumber(Choice):
    """A variable that takes one of a few words, or a number from 0."""

    number: str
    """What the number is."""

    def takes(self, text: str) -> bool:
        return super().takes(text) or (text.isascii() and text.isdigit())

    @property
    def expected(self) -> str:
        return f"{super().expected}, {self.number}"


@dataclass(frozen=True)
class Number:
    """A variable that takes a whole number from 0 to `largest`."""

    name: str
    default: int
    largest: int
    meaning: str

    def read(self, environ: Mapping[str, str] | None = None) -> int:
        """The value in force; raises `ConfigError` saying what is accepted when it is something else."""
        text = (os.environ if environ is None else environ).get(self.name, "").strip() or str(self.default)
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= self.largest):
            expected = f"a whole number from 0 to {self.largest}"
            raise ConfigError(
                f"{self.name}={text!r} is not {expected} ({self.meaning}): unset it or choose one",
                name=self.name,
                value=text,
                expected=expected,
            )
        return int(text)


CPU_ACT = Choice(
    "FREETOKEN_CPU_ACT",
    "auto",
    ("auto", "fp32", "bf16", "int8", "int15", "fp8"),
    "precision of activations in CPU expert kernels; auto follows the model's dtype and the CPU, fp8 rounds them as "
    "DeepSeek's own code does",
)
CPU_ISA = Choice(
    "FREETOKEN_CPU_ISA",
    "auto",
    ("auto", "scalar", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx"),
    "highest instruction set that CPU expert kernels may use; auto takes the best this CPU has",
)
CPU_CORES = Choice(
    "FREETOKEN_CPU_CORES",
    "auto",
    ("auto", "performance", "all"),
    "cores of a hybrid processor that get workers; auto takes the performance cores",
)
MLOCK = Choice(
    "FREETOKEN_MLOCK",
    "off",
    ("off", "on"),
    "whether expert banks are locked in memory, so that they are never swapped out",
)
LOAD_MIN_AVAILABLE = Number(
    "FREETOKEN_LOAD_MIN_AVAILABLE",
    64,
    1 << 30,
    "MiB of memory that a load leaves free: it does not start, or stops, where less would be left; 0 is no limit",
)
LOAD_MAX_PRESSURE = Number(
    "FREETOKEN_LOAD_MAX_PRESSURE",
    60,
    100,
    "per cent of 5 s in which everything may wait for memory before a load stops; 0 is no limit",
)
CPU_MOE_NUMA = ChoiceOrNumber(
    "FREETOKEN_CPU_MOE_NUMA",
    "auto",
    ("auto", "off", "interleave", "shard"),
    "where expert banks lie on a machine of several NUMA nodes; auto takes shard, or interleave where experts cannot "
    "be cut",
    number="the number of a node",
)
STEP_DEADLINE = Number(
    "FREETOKEN_STEP_DEADLINE",
    30,
    1 << 20,
    "seconds that a step may be without any progress before it is given up with an error; 0 is no limit",
)
PLE_SYNC = Choice(
    "FREETOKEN_PLE_SYNC",
    "auto",
    ("auto", "wait", "gate"),
    "when rows of a table on disk are read for a step: gate reads them before it is launched, wait while it runs; auto "
    "takes wait where the device can wait for flags",
)
PIN_LIMIT = Number(
    "FREETOKEN_PIN_LIMIT",
    1 << 30,
    1 << 30,
    "MiB of expert banks that are pinned for a GPU at most; what is not pinned is computed on the CPU",
)
GPU_RESERVE = Number(
    "FREETOKEN_GPU_RESERVE",
    2048,
    1 << 30,
    "MiB of a GPU's free memory that experts never take: they are for activations and the attention's cache",
)
GRAPH = Choice(
    "FREETOKEN_GRAPH",
    "auto",
    ("auto", "off"),
    "whether generate replays decode steps of a model on a device as captured graphs, and layers called one by one "
    "with few tokens are graphs of their own; auto does where it can",
)
COMPILE = Choice(
    "FREETOKEN_COMPILE",
    "off",
    ("off", "on"),
    "whether layers of steps that are captured are compiled by torch first; off because that takes a minute or more "
    "before the first step of each number of texts and length of cache, and rounds otherwise than transformers",
)
ATTENTION = Choice(
    "FREETOKEN_ATTENTION",
    "auto",
    ("auto", "transformers"),
    "how captured steps of a model on a device attend: auto by a kernel of this library, transformers by its own",
)
