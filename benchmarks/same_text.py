"""Do all strategies write the same text? Perplexities and greedy texts of a model on a device, against the CPU alone.

    python benchmarks/same_text.py --model FOLDER --text TOKENS.npz --device cuda

For each strategy: the perplexity of the text in windows, which is computed by the kernels for many tokens; the
perplexity of its beginning fed token by token, by those for few, layer by layer and in replayed graphs; and greedy
continuations of pieces of the text, in graphs, of which the first difference and its margin are named: by how much, in
logits, the model on the CPU liked its own token better there. Replays are of two sizes with rows that are padding, and
statistics are switched on and off all the time. "hybrid:0.5" fetches that share of what is missing, whatever is
fastest. Ends with status 1 when a perplexity is off by more than 0.1 % or a margin is above the bound.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_decode import WITH_CACHE, experts_of
from numpy.typing import NDArray

import freetoken
from freetoken.decode.graph import SIZES, DecodeGraph, length_of, size_of
from freetoken.device.base import Device
from freetoken.errors import FreeTokenError
from freetoken.fidelity import compare_greedy, perplexity, read_tokens
from freetoken.integration.device import open_device
from freetoken.integration.fixed_cache import FixedForward, cache_argument
from freetoken.offload.experts import DeviceExperts

STRATEGIES = ("cpu", "offload", "hybrid", "hybrid:0.0", "hybrid:0.5", "hybrid:1.0", "resident")
MOST_CHANGE = 1e-3
"""Of a perplexity."""
MARGIN = {"bfloat16": 0.5, "float16": 0.25, "float32": 1e-3}
"""Bounds in logits: a bf16 number near 16, where the largest logits are, has neighbours 0.125 away, so four of them."""


@dataclass(frozen=True)
class Row:
    """What one strategy gave. differences: of greedy texts, the first new token that differs and the margin there.

    by_steps: perplexity token by token; by_replays: the same in graphs, None without a device.
    """

    strategy: str
    perplexity: float
    by_steps: float
    by_replays: float | None
    texts: int
    differences: tuple[tuple[int, float], ...] = ()

    @property
    def margin(self) -> float:
        """The largest."""
        return max((margin for _, margin in self.differences), default=0.0)

    def faults(self, reference: "Row", bound: float) -> list[str]:
        """What is not as it is on the CPU."""
        found = [
            f"{what} {mine:.4f} instead of {theirs:.4f}"
            for what, mine, theirs in (
                ("perplexity", self.perplexity, reference.perplexity),
                ("perplexity by steps", self.by_steps, reference.by_steps),
                ("perplexity by replays", self.by_replays, reference.by_steps),
            )
            if mine is not None and not abs(mine / theirs - 1) <= MOST_CHANGE
        ]
        return found + ([f"a margin of {self.margin:.3f}, above {bound}"] if self.margin > bound else [])


def by_steps(model: Any, tokens: NDArray[np.int64], batch: int, length: int) -> float:
    """Perplexity of `batch` pieces of `length` tokens, fed one token of each at a time."""
    pieces = torch.from_numpy(tokens[: batch * (length + 1)]).view(batch, length + 1).to(model.device)
    name, cache, loss = cache_argument(model), None, 0.0
    with torch.inference_mode():
        for at in range(length):
            out = model(pieces[:, at : at + 1], use_cache=True, **{name: cache})
            cache = out[name]
            logits = out.logits[:, -1].float()
            loss += torch.nn.functional.cross_entropy(logits, pieces[:, at + 1], reduction="sum").item()
    return math.exp(loss / (batch * length))


def by_replays(model: Any, tokens: NDArray[np.int64], batch: int, length: int) -> float:
    """The same by graphs: most pieces in one of up to 8 rows, the rest in a smaller one."""
    most = min(SIZES[-1], batch) - min(3, batch - 1)
    pieces = torch.from_numpy(tokens[: batch * (length + 1)]).view(batch, length + 1).to(model.device)
    experts, loss = experts_of(model), 0.0
    with torch.no_grad(), experts.stepping():
        for part in pieces.split(most):
            loss += _replay(model, experts, part)
    return math.exp(loss / (batch * length))


def _replay(model: Any, experts: DeviceExperts, pieces: torch.Tensor) -> float:
    """The loss of pieces (n, tokens + 1), added up."""
    n, length = len(pieces), pieces.shape[1] - 1
    rows = size_of(n)
    assert rows is not None, "most pieces of a replay are as many as the largest graph has rows"
    forward = FixedForward(model, rows, length_of(length))
    graph = DecodeGraph(experts, forward)
    loss = torch.zeros((), device=model.device)
    forward.restart(n)
    step = graph.step(rows, forward.length)
    forward.restart(n)
    tail = graph.tail("nothing", lambda: None, lambda stream: None, ())
    for at in range(length):
        with graph.between():
            if at:
                forward.feed(pieces[:, at])
            else:
                forward.tokens[:n, 0].copy_(pieces[:, 0])
            experts.count(at % 3 > 0)
        experts.wait(experts.launch(step, tail))
        with graph.between():
            loss += torch.nn.functional.cross_entropy(forward.logits[:n], pieces[:, at + 1], reduction="sum")
    experts.count(True)
    return float(loss)


def measure(
    folder: Path, tokens: NDArray[np.int64], strategy: str | None, device: Device | None, o: argparse.Namespace
) -> tuple[Row, Any]:
    """A row without texts, and its model; strategy None: the CPU alone."""
    how: dict[str, Any] = {"dtype": o.dtype, "expert_format": o.format}
    if strategy is not None:
        name, _, share = strategy.partition(":")
        how |= {"device": device, "strategy": name, "cache": o.cache if name in WITH_CACHE else "auto"}
        how |= {"max_fetch": share} if share else {}
    model, _ = freetoken.load(folder, **how)
    if strategy is not None:
        experts_of(model).wait_until_pinned()
    found = perplexity(model, tokens[: o.tokens + 1], o.window).perplexity
    stepped = by_steps(model, tokens, o.batch, o.steps)
    replayed = None if strategy is None else by_replays(model, tokens, o.batch, o.steps)
    return Row(strategy or "no device", found, stepped, replayed, o.texts), model


def main(arguments: Sequence[str] | None = None, device: Device | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help=".npz of token ids in an array `tokens`")
    parser.add_argument("--format", help="of experts (default: the checkpoint's)")
    parser.add_argument("--dtype", choices=MARGIN, default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--cache", default="0.25", help="for offload and hybrid")
    parser.add_argument("--tokens", type=int, default=1 << 15, help="of the text, for the perplexity")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="pieces that are fed token by token")
    parser.add_argument("--steps", type=int, default=512, help="tokens of each")
    parser.add_argument("--texts", type=int, default=16, help="continued greedily")
    parser.add_argument("--new-tokens", type=int, default=64)
    o = parser.parse_args(arguments)
    try:
        device = open_device(o.device) if device is None else device
    except FreeTokenError as error:
        parser.error(str(error))
    if device is None:
        parser.error("--device is the CPU: there is nothing to compare")
    tokens = read_tokens(o.text, None)
    reference, on_cpu = measure(o.model, tokens, None, None, o)
    bound, faults = MARGIN[o.dtype], []
    print(f"{o.model.name}, {o.dtype}, on {device.name}; a margin may be {bound} logits")
    print(f"{'strategy':<12}{'perplexity':>12}{'by steps':>12}{'by replays':>12}  greedy texts")
    print(f"{reference.strategy:<12}{reference.perplexity:>12.4f}{reference.by_steps:>12.4f}{'-':>12}")
    starts = [torch.from_numpy(tokens[i * 1000 :][:32])[None] for i in range(o.texts)]
    for strategy in o.strategy:
        row, model = measure(o.model, tokens, strategy, device, o)
        compared = [compare_greedy(on_cpu, model, start, o.new_tokens) for start in starts]
        parted = tuple((found.position, found.margin) for found in compared if found.position is not None)
        row = replace(row, differences=parted)
        faults += [f"{strategy}: {fault}" for fault in row.faults(reference, bound)]
        differ = ", ".join(f"token {position} by {margin:.3f}" for position, margin in parted)
        print(
            f"{row.strategy:<12}{row.perplexity:>12.4f}{row.by_steps:>12.4f}{row.by_replays:>12.4f}  "
            f"{o.texts - len(parted)} of {o.texts} equal" + (f", others part at {differ}" if differ else ""),
            flush=True,
        )
        del model
    for fault in faults:
        print(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
