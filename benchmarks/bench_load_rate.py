"""Filling banks against plainly reading the same files: cached, and from the disk.

Both sides use one thread for each worker and put everything into fresh memory of the kind that banks have. A plain read
is of 4 MiB; from the disk there are two, through the page cache and past it.
"""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from interleave import compare
from safetensors.torch import save_file

from freetoken import formats, topology
from freetoken.banks import Bank
from freetoken.checkpoint.experts import LayerExperts
from freetoken.checkpoint.load import fill_banks
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.formats.base import Matrix
from freetoken.memory.mapping import map_bytes
from tests.support.checkpoints import qwen3_config
from tests.support.gguf import EXACT, ggml_blocks, write_gguf

HIDDEN, WIDTH = 2048, 768
EXPERTS = {"bf16": 96, "nvfp4": 320, "q8_0": 160, "mxfp4": 320}
"""Experts of a layer; two layers are about 1.8 GB."""
LAYERS = 2
CHUNK = 4 << 20
ROUNDS = 7


def make_matrices(name: str) -> dict[str, Matrix]:
    """One expert; all of a checkpoint are alike, which no reader can tell."""
    rng = np.random.default_rng(0)
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {k: formats.get(name).quantize(rng.standard_normal(v, np.float32) * 0.02) for k, v in shapes.items()}


def config_of(name: str) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_hidden_layers": LAYERS}
    config = qwen3_config(**sizes, num_experts=EXPERTS[name])
    if name == "nvfp4":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return config


def write_safetensors(folder: Path, name: str) -> Path:
    """Every expert's tensors by themselves, a file a layer, as tools write them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    where: dict[str, str] = {}
    matrices = make_matrices(name)
    for layer in range(LAYERS):
        tensors: dict[str, torch.Tensor] = {}
        for expert in range(EXPERTS[name]):
            for projection, matrix in matrices.items():
                at = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                codes = torch.from_numpy(matrix.codes.copy())
                tensors[at] = codes.view(torch.bfloat16) if name == "bf16" else codes
                if matrix.scales is not None:
                    scales = torch.from_numpy(np.ascontiguousarray(matrix.scales, np.uint8).copy())
                    tensors[f"{at}_scale"] = scales.view(torch.float8_e4m3fn)
                    tensors[f"{at}_scale_2"] = torch.tensor(matrix.global_scale)
        file = f"model-{layer + 1:05}-of-{LAYERS:05}.safetensors"
        save_file(tensors, folder / file)
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def write_blocks(folder: Path, name: str) -> Path:
    """The same as GGUF: all experts of a projection in one tensor, scales between the codes."""
    folder.mkdir()
    blocks = {projection: ggml_blocks(matrix) for projection, matrix in make_matrices(name).items()}
    tensors = {
        f"blk.{layer}.ffn_{projection}_exps.weight": (EXACT[name], np.stack([rows] * EXPERTS[name]))
        for layer in range(LAYERS)
        for projection, rows in blocks.items()
    }
    config = config_of(name)
    rows = {  # of what the metadata are compared with
        "token_embd": config["vocab_size"],
        "blk.0.attn_q": config["num_attention_heads"] * config["head_dim"],
        "blk.0.attn_k": config["num_key_value_heads"] * config["head_dim"],
    }
    dense = {f"{name}.weight": (Type.F32, np.zeros((n, HIDDEN), np.float32)) for name, n in rows.items()}
    return write_gguf(folder / "m.gguf", config, {**dense, **tensors})


def fill(groups: tuple[LayerExperts, ...], threads: int) -> None:
    fill_banks([(Bank(group.layout(), group.n_experts), group) for group in groups], threads)


def read(files: list[Path], threads: int, flags: int = 0) -> None:
    fds = [os.open(file, os.O_RDONLY | flags) for file in files]
    memory = [map_bytes(-(-file.stat().st_size // CHUNK) * CHUNK).reshape(-1, CHUNK) for file in files]
    jobs = [
        (fd, chunk, number * CHUNK) for fd, whole in zip(fds, memory, strict=True) for number, chunk in enumerate(whole)
    ]
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(os.preadv, fd, [chunk.data], offset) for fd, chunk, offset in jobs]:
            future.result()
    for fd in fds:
        os.close(fd)


def forget(files: list[Path]) -> None:
    """Have none of the files in the page cache."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "from disk"])
@pytest.mark.parametrize("kind", ["bf16", "nvfp4", "gguf q8_0", "gguf mxfp4"])
def bench_rate(benchmark: Any, tmp_path: Path, kind: str, cached: bool) -> None:
    """GB/s of file, and share of the plain read of the same round."""
    write: Callable[[Path, str], Path] = write_blocks if kind.startswith("gguf") else write_safetensors
    groups = scan_any(open_any(write(tmp_path / "m", kind.removeprefix("gguf ")))).groups
    files = sorted({info.file for group in groups for info in group.tensors})
    threads, nbytes = len(topology.read().workers("auto")), sum(file.stat().st_size for file in files)
    sides: dict[str, Callable[[], object]] = {
        "load": partial(fill, groups, threads),
        "read": partial(read, files, threads),
    }
    if not cached:
        sides["direct read"] = partial(read, files, threads, getattr(os, "O_DIRECT", 0))
    found = benchmark.pedantic(
        lambda: compare(sides, ROUNDS if cached else 3, (lambda: None) if cached else partial(forget, files)), rounds=1
    )
    rates = {side: nbytes / 1e9 / found.median(side) for side in sides}
    ratios = {side: found.ratio("load", side) for side in sides if side != "load"}
    benchmark.extra_info.update(rates=rates, ratios=ratios, threads=threads)
    text = ", ".join(f"{side} {rate:.2f}" for side, rate in rates.items())
    shares = ", ".join(f"{ratio:.2f} of the {side}" for side, ratio in ratios.items())
    print(f"\n{kind:<10} {'cached' if cached else 'from disk':<9} GB/s: {text}; load is {shares}; {threads} threads")
