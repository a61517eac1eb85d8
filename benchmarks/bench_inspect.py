"""Time of `ft inspect` on checkpoints of hundreds of shards: headers and index of published sizes, data sparse.

Each round is a process of its own, as a person starts it: its wall time, and its CPU time beside it, which other work
on the machine does not change as much.
"""

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROUNDS = 7
BYTES = {"BF16": 2, "U8": 1, "F8_E4M3": 1, "F32": 4}


@dataclass(frozen=True)
class Model:
    """A published model's expert tensors; shards: more than it has where it has fewer than hundreds."""

    layers: int
    first: int
    experts: int
    top_k: int
    hidden: int
    width: int
    shards: int
    nvfp4: bool

    @property
    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of every tensor."""
        for layer in range(self.first, self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.mlp.gate.weight", "BF16", (self.experts, self.hidden)
            yield f"{at}.input_layernorm.weight", "BF16", (self.hidden,)
            yield f"{at}.self_attn.o_proj.weight", "BF16", (self.hidden, self.hidden)
            for e in range(self.experts):
                for projection in ("gate_proj", "up_proj", "down_proj"):
                    n, k = (self.hidden, self.width) if projection == "down_proj" else (self.width, self.hidden)
                    name = f"{at}.mlp.experts.{e}.{projection}.weight"
                    if not self.nvfp4:
                        yield name, "BF16", (n, k)
                        continue
                    yield name, "U8", (n, k // 2)
                    yield f"{name}_scale", "F8_E4M3", (n, k // 16)
                    yield f"{name}_scale_2", "F32", ()

    def write(self, folder: Path) -> int:
        """The folder, its shards as long as real ones and without data; returns the number of tensors."""
        config: dict[str, Any] = {
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.width,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
        }
        if self.nvfp4:
            config["quantization_config"] = {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", *(f"model.layers.{n}.self_attn*" for n in range(self.layers))],
            }
        (folder / "config.json").write_text(json.dumps(config))
        tensors = list(self.tensors)
        per_shard = -(-len(tensors) // self.shards)
        where = {}
        for number in range(self.shards):
            file = folder / f"model-{number + 1:05}-of-{self.shards:05}.safetensors"
            header, end = {}, 0
            for name, dtype, shape in tensors[number * per_shard : (number + 1) * per_shard]:
                start, end = end, end + math.prod(shape) * BYTES[dtype]
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
                where[name] = file.name
            raw = json.dumps(header, separators=(",", ":")).encode()
            with file.open("wb") as stream:
                stream.write(len(raw).to_bytes(8, "little") + raw)
                stream.truncate(8 + len(raw) + end)
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": where}, indent=2)
        )
        return len(tensors)


MODELS = {
    "Qwen3-30B-A3B": Model(48, 0, 128, 8, 2048, 768, 300, nvfp4=False),
    "DeepSeek-V3 nvfp4": Model(61, 3, 256, 8, 7168, 2048, 400, nvfp4=True),
}


@pytest.mark.parametrize("name", MODELS)
def bench_inspect(benchmark: Any, tmp_path: Path, name: str) -> None:
    """Seconds from the command to its answer."""
    model = MODELS[name]
    n_tensors = model.write(tmp_path)
    command = [sys.executable, "-m", "freetoken.cli", "inspect", "--json", str(tmp_path)]
    cpu = []

    def run() -> None:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        found = json.loads(out)
        assert (found["tensors"], found["layers"]) == (n_tensors, model.layers - model.first), found
        assert (found["experts"], found["intermediate"]) == (model.experts, model.width), found

    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=1)
    seconds = sorted(cpu[1:])[ROUNDS // 2]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import freetoken.cli, freetoken.checkpoint.inspect"], check=True)
    importing = time.perf_counter() - start
    benchmark.extra_info.update(tensors=n_tensors, shards=model.shards, cpu_s=seconds, import_s=importing)
    print(
        f"\n{name}: {n_tensors} tensors in {model.shards} shards: median {benchmark.stats['median']:.2f} s, "
        f"{seconds:.2f} s of CPU; of which starting Python and importing {importing:.2f} s"
    )
