"""kt-kernel's experts in bf16 ("BF16", its native precision), by the Python interface that its README describes.

Its wheel computes on the CPU, but only between operations of a CUDA stream: it allocates pinned memory when it is
constructed and is called through the stream.
"""

import importlib.metadata
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from protocol import MissingError, Ready, Task, play, require


def start(task: Task) -> Ready:
    require("kt_kernel", "kt-kernel")
    require("torch")
    import torch
    from bf16 import Layer, Problem, make_bank, ready
    from torch import Tensor

    if not torch.cuda.is_available():
        raise MissingError(
            "it allocates pinned memory and is called through a CUDA stream, and there is no CUDA device"
        )
    if task.format != "bf16":
        raise MissingError("only its bf16 experts are asked for here")
    from kt_kernel import KTMoEWrapper
    from safetensors.torch import save_file

    def make_layer(number: int, problem: Problem) -> Layer:
        gate_up, down = make_bank(task, problem.expert, number)
        parts = {"gate": gate_up[:, : task.width], "up": gate_up[:, task.width :], "down": down}
        tensors = {
            f"model.layers.{number}.mlp.experts.{expert}.{name}_proj.weight": matrix.contiguous()
            for name, matrices in parts.items()
            for expert, matrix in enumerate(matrices)
        }
        with TemporaryDirectory() as folder:
            save_file(tensors, Path(folder, "model.safetensors"))
            wrapper = KTMoEWrapper(
                layer_idx=number,
                num_experts=task.experts,
                num_experts_per_tok=task.top_k,
                hidden_size=task.hidden,
                moe_intermediate_size=task.width,
                gpu_experts_mask=None,
                cpuinfer_threads=task.threads,
                threadpool_count=1,
                weight_path=folder,
                chunked_prefill_size=512,
                method="BF16",
            )
            wrapper.load_weights(torch.arange(task.experts))

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return wrapper.forward(x, ids, weights, torch.cuda.current_stream().cuda_stream)

        return run

    return ready(task, f"kt-kernel {importlib.metadata.version('kt-kernel')}", make_layer, "cuda")


if __name__ == "__main__":
    play(start)
