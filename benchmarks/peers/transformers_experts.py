"""transformers' Qwen3-MoE experts in bf16; its one option is the experts implementation, as "eager" or "grouped_mm"."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from protocol import MissingError, Ready, Task, play, require


def start(task: Task) -> Ready:
    require("transformers")
    require("torch")
    if task.format != "bf16":
        raise MissingError("transformers computes no experts of such blocks on a CPU")
    import torch
    import transformers
    from bf16 import Layer, Problem, make_bank, ready
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    (implementation,) = task.options
    config = transformers.Qwen3MoeConfig(
        hidden_size=task.hidden,
        moe_intermediate_size=task.width,
        num_experts=task.experts,
        num_experts_per_tok=task.top_k,
        experts_implementation=implementation,
    )

    def make_layer(number: int, problem: Problem) -> Layer:
        with torch.device("meta"):
            module = Qwen3MoeExperts(config)
        for name, bank in zip(("gate_up_proj", "down_proj"), make_bank(task, problem.expert, number), strict=True):
            setattr(module, name, torch.nn.Parameter(bank, requires_grad=False))
        return module

    return ready(task, f"transformers {transformers.__version__} on torch {torch.__version__}", make_layer)


if __name__ == "__main__":
    play(start)
