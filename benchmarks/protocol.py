"""How a side of a comparison is asked and how it answers. A side is a program:

    python SIDE [OPTION ...] FORMAT H I E K LAYERS THREADS

It prints `READY <bytes of experts that a token reads in a layer> <note>`, or, where it cannot take part, `NO <reason>`,
and ends. Then, for each line `run SECONDS` on standard input, it prints `<layers run> <seconds>`. A token goes through
a layer at a time; its K experts of the E are drawn at random, distinct, for every step, and the layers take turns, so
that all banks are touched. The input ends it.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """What is asked of a side: expert format, hidden size, width, experts, of those a token's, layers and threads."""

    options: tuple[str, ...]
    format: str
    hidden: int
    width: int
    experts: int
    top_k: int
    layers: int
    threads: int

    @classmethod
    def parse(cls, arguments: list[str]) -> "Task":
        """The command line of a side without its own name."""
        *options, name, hidden, width, experts, top_k, layers, threads = arguments
        numbers = (hidden, width, experts, top_k, layers, threads)
        return cls(tuple(options), name, *map(int, numbers))


@dataclass(frozen=True)
class Ready:
    """A side that can run; run: some steps, drawn beforehand, and returns how many layers and the seconds it took."""

    token_bytes: int
    note: str
    run: Callable[[], tuple[int, float]]


class MissingError(Exception):
    """A side cannot take part, and why."""


def require(package: str, name: str | None = None) -> None:
    """Raise MissingError if a package cannot be imported; name: as it is installed, where that differs."""
    if importlib.util.find_spec(package) is None:
        raise MissingError(f"{name or package} is not installed")


def play(start: Callable[[Task], Ready]) -> None:
    """Be a side. What libraries print goes to standard error, so that it is not taken for an answer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        side = start(Task.parse(sys.argv[1:]))
    except MissingError as missing:
        print("NO", missing, file=answers)
        return
    print("READY", side.token_bytes, side.note, file=answers)
    for line in sys.stdin:
        command, seconds = line.split()
        if command != "run":
            sys.exit(f"unknown command {command!r}, expected run SECONDS")
        done, spent = 0, 0.0
        while spent < float(seconds):
            layers, taken = side.run()
            done += layers
            spent += taken
        print(done, f"{spent:.6f}", file=answers)
