"""torch in bf16: a loop over the chosen experts with functional linear and silu."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from protocol import MissingError, Ready, Task, play, require


def start(task: Task) -> Ready:
    require("torch")
    if task.format != "bf16":
        raise MissingError("torch has no product with such blocks")
    import torch
    from bf16 import Layer, Problem, make_bank, ready
    from torch import Tensor
    from torch.nn.functional import linear, silu

    def make_layer(number: int, problem: Problem) -> Layer:
        gate_up, down = make_bank(task, problem.expert, number)

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for expert, weight in zip(ids[0].tolist(), weights[0], strict=True):
                gate, up = linear(x, gate_up[expert]).chunk(2, -1)
                out += weight * linear(silu(gate) * up, down[expert])
            return out

        return run

    return ready(task, f"torch {torch.__version__}", make_layer)


if __name__ == "__main__":
    play(start)
