"""Does decoding stay as it is for a long time? Memory, threads, flags and speed over many steps, then idleness.

    python benchmarks/long_run.py --model FOLDER --text TOKENS.npz --steps 20000 --strategy hybrid --cache 0.5

Texts are generated one after the other, with statistics on, until so many steps are done. Before, a tenth of the way
and at the end: the process's memory and threads, the device's memory, tokens/s; then the share of a core that the idle
process takes. Ends with status 1 when memory or threads grew after the first tenth, a step was late, or it is not idle.
"""

import argparse
import logging
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import psutil
import torch
from gpu_decode import experts_of

import freetoken
from freetoken.device.base import Device
from freetoken.fidelity import read_tokens
from freetoken.units import format_bytes

PROMPT = 16
GROWN = 16 << 20
"""Bytes that a process may have more than after the first tenth: Python's own heap moves by some."""
IDLE_S = 3.0
MOST_IDLE = 0.01
"""Of a core."""


@dataclass(frozen=True)
class State:
    """Of a process at a step. memory, on_device: bytes."""

    step: int
    seconds: float
    memory: int
    threads: int
    on_device: int

    @classmethod
    def now(cls, step: int, start: float) -> "State":
        """What it is."""
        process = psutil.Process()
        there = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        return cls(step, time.perf_counter() - start, process.memory_info().rss, process.num_threads(), there)

    def __str__(self) -> str:
        memory = f"{format_bytes(self.memory)} here, {format_bytes(self.on_device)} there"
        return f"step {self.step}: {self.seconds:.1f} s, {self.threads} threads, {memory}"

    def faults(self, before: "State") -> list[str]:
        """What has grown since."""
        found = []
        if self.memory > before.memory + GROWN:
            found.append(f"memory grew from {format_bytes(before.memory)} to {format_bytes(self.memory)}")
        if self.on_device > before.on_device:
            found.append(f"the device's memory grew from {before.on_device} to {self.on_device} bytes")
        if self.threads > before.threads:
            found.append(f"threads grew from {before.threads} to {self.threads}")
        return found


class Warnings(logging.Handler):
    """Keeps what was warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.lines.append(record.getMessage())


def idle_share(seconds: float) -> float:
    """CPU time of this process while it does nothing, of a core."""
    start = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - start) / seconds


def main(arguments: Sequence[str] | None = None, device: Device | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help=".npz of token ids in an array `tokens`, for prompts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--strategy", default="hybrid")
    parser.add_argument("--cache", default="0.5", help="for offload and hybrid")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--each", type=int, default=400, help="new tokens of a text")
    o = parser.parse_args(arguments)
    warned = Warnings()
    logging.getLogger("freetoken").addHandler(warned)
    how: dict[str, Any] = {"device": o.device if device is None else device, "strategy": o.strategy}
    if o.strategy in ("offload", "hybrid"):
        how["cache"] = o.cache
    model, _ = freetoken.load(o.model, **how)
    tokens = read_tokens(o.text, None)
    random, start = np.random.default_rng(0), time.perf_counter()
    states, done, calls = [State.now(0, start)], 0, 0
    print(states[0], flush=True)
    while done < o.steps:
        at = int(random.integers(0, len(tokens) - PROMPT))
        prompt = torch.from_numpy(tokens[at : at + PROMPT])[None].to(model.device)
        each = min(o.each, o.steps - done)
        out = model.generate(
            prompt, min_new_tokens=each, max_new_tokens=each, do_sample=bool(calls % 2), temperature=0.8, top_p=0.95
        )
        done += out.shape[1] - PROMPT
        calls += 1
        if calls == 1:
            experts_of(model).reset_statistics()
        if len(states) == 1 and done >= o.steps / 10:
            states.append(State.now(done, start))
            print(states[1], flush=True)
    states.append(State.now(done, start))
    print(states[-1])
    first, last = states[-2:]
    speed = (last.step - first.step) / max(last.seconds - first.seconds, 1e-9)
    print(f"{speed:.1f} tokens/s after the first tenth, {calls} texts")
    print(freetoken.report(model))
    time.sleep(0.5)
    share = idle_share(IDLE_S)
    names = sorted(thread.name for thread in threading.enumerate())
    print(f"idle: {share:.4f} of a core; Python's threads: {', '.join(names)}")
    faults = last.faults(first) + [f"a warning: {line}" for line in warned.lines]
    if share > MOST_IDLE:
        faults.append(f"{share:.3f} of a core are taken by a process that does nothing")
    for fault in faults:
        print(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
