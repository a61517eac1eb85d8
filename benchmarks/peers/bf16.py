"""What peers that run on torch have in common: bf16 experts as (E, 2I, H) and (E, H, I), a check, and steps."""

import time
from collections.abc import Callable

import torch
from experts import Expert, Problem, map_huge, rotate
from protocol import Ready, Task
from torch import Tensor

BATCH = 16
"""Tokens that go through all layers between two looks at the clock."""

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x (1, H) bf16, ids (1, K) int64 and weights (1, K) bf16 -> (1, H) bf16."""


def rounded(expert: Expert) -> Expert:
    """The values in bf16."""
    return Expert(*(torch.from_numpy(m).bfloat16().float().numpy() for m in (expert.gate, expert.up, expert.down)))


def make_bank(task: Task, expert: Expert, layer: int) -> tuple[Tensor, Tensor]:
    """All experts of a layer: gate and up (E, 2I, H), down (E, H, I)."""
    parts = [(expert.gate, expert.up), (expert.down,)]
    banks = []
    for matrices in parts:
        rows, columns = sum(len(m) for m in matrices), matrices[0].shape[1]
        bank = torch.from_numpy(map_huge(task.experts * rows * columns * 2)).view(torch.bfloat16)
        banks.append(bank.view(task.experts, rows, columns))
        codes = [torch.from_numpy(m).bfloat16().view(torch.int16).numpy() for m in matrices]
        for number, target in enumerate(banks[-1].view(torch.int16), start=layer * task.experts):
            torch.cat([torch.from_numpy(rotate(m, number)) for m in codes], out=target)
    return banks[0], banks[1]


def ready(task: Task, note: str, make_layer: Callable[[int, Problem], Layer], device: str = "cpu") -> Ready:
    """The side of which `make_layer` makes layers, once each is right; device: of inputs, "cpu" or "cuda"."""
    torch.set_num_threads(task.threads)
    problem = Problem(task)
    problem.x = torch.from_numpy(problem.x).bfloat16().float().numpy()
    layers = [make_layer(number, problem) for number in range(task.layers)]
    x, weights = (torch.from_numpy(values).bfloat16()[None].to(device) for values in (problem.x, problem.weights))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def draw() -> Tensor:
        return torch.from_numpy(problem.routes(1)).long().to(device)

    @torch.inference_mode()
    def run() -> tuple[int, float]:
        steps = [(layer, draw()) for _ in range(BATCH) for layer in layers]
        wait()
        start = time.perf_counter()
        for layer, ids in steps:
            layer(x, ids, weights)
        wait()
        return len(steps), time.perf_counter() - start

    with torch.inference_mode():
        for number, layer in enumerate(layers):
            ids = draw()
            found = layer(x, ids, weights)[0].float().cpu().numpy()
            problem.check(number, ids[0].int().cpu().numpy(), found, rounded(problem.expert))
    return Ready(task.top_k * 3 * task.hidden * task.width * 2, note, run)
