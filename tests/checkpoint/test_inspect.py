"""What a load takes, from headers alone: the figures of the budget against what is really allocated."""

from __future__ import annotations

import json
import logging
import os
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import GptOssConfig, GptOssForCausalLM

import freetoken
from freetoken import formats
from freetoken.banks import Bank
from freetoken.checkpoint import load
from freetoken.checkpoint.experts import ExpertScan
from freetoken.checkpoint.inspect import inspect, needed_bytes, require_memory, transient_bytes
from freetoken.checkpoint.load import fill_banks
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.checkpoint.strips import working_bytes
from freetoken.errors import CapacityError
from freetoken.memory.budget import Budget
from tests.support import checkpoints
from tests.support.checkpoints import LAYERS, experts, qwen3_config, write_folder, write_qwen3, write_raw
from tests.support.gguf import gguf_tensors, write_gguf
from tests.support.oracle import dequantize_folder

WIDE = 1024, 512


def write_wide(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two experts, large enough that what is measured is arrays: a dialect, "fused", or a GGUF type."""
    if kind == "fused":
        torch.manual_seed(0)
        config = GptOssConfig(
            num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1, hidden_size=WIDE[0],
            intermediate_size=WIDE[1], vocab_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        return folder
    for name, value in {"HIDDEN": WIDE[0], "WIDTH": WIDE[1], "EXPERTS": 2, "LAYERS": 1}.items():
        monkeypatch.setattr(checkpoints, name, value)
    if not kind.startswith("gguf"):
        return write_qwen3(folder, kind)
    source = write_qwen3(folder / "source")
    tensors = gguf_tensors(qwen3_config(), dequantize_folder(source), Type[kind.removeprefix("gguf ")])
    return write_gguf(folder / "m.gguf", qwen3_config(), tensors)


def measure(found: ExpertScan, fmt: formats.Format | None) -> int:
    """Bytes that NumPy had at once beside the bank, as one thread filled it."""
    group = found.groups[0]
    bank = Bank(group.layout(fmt), group.n_experts)
    fill_banks([(bank, group)], 1)  # what is computed once
    tracemalloc.start()
    try:
        fill_banks([(bank, group)], 1)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["bf16", "modelopt", "ct-mxfp4", "fp8", "fused", "gguf F16", "gguf Q8_0", "gguf Q4_0"])
def test_a_thread_takes_no_more_than_said(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_wide(tmp_path / "m", kind, monkeypatch)
    for name in [None, *formats.names()]:
        fmt = None if name is None else formats.get(name)
        found = scan_any(open_any(path), fmt)
        said = transient_bytes(found, fmt)
        assert measure(found, fmt) <= said, name
        with monkeypatch.context() as patch:  # what looks damaged, or is not to be permuted
            patch.setattr(load, "find_stored", lambda *_: None)
            peak = measure(found, fmt)
        group = found.groups[0]
        if group.layout(fmt).format is group.format:
            said -= working_bytes(group.layout(fmt))
        assert peak <= said, name
        assert said <= 7 * peak, name  # a bound that nothing comes near would cost threads for nothing


def test_k_quants_take_no_more_than_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types that are re-quantized while they are read."""
    rows = {"gate": (WIDE[1], WIDE[0]), "up": (WIDE[1], WIDE[0]), "down": WIDE}
    path = write_wide(tmp_path / "m", "gguf F16", monkeypatch)
    tensors = gguf_tensors(qwen3_config(), dequantize_folder(path.parent / "source"), Type.F16)
    block, nbytes = gguf.GGML_QUANT_SIZES[Type.Q6_K]
    for name, (n, k) in rows.items():
        blocks = np.zeros((2, n, k // block * nbytes), np.uint8)
        tensors[f"blk.0.ffn_{name}_exps.weight"] = (Type.Q6_K, blocks)
    path = write_gguf(tmp_path / "k.gguf", qwen3_config(), tensors)
    for name in ("bf16", "q8_0", "nvfp4"):
        found = scan_any(open_any(path), formats.get(name))
        assert measure(found, formats.get(name)) <= transient_bytes(found, formats.get(name)), name


@pytest.mark.parametrize("dialect", ["bf16", "fp8", "gguf"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dense_part_is_counted_as_wide_as_it_will_be(tmp_path: Path, dialect: str, dtype: torch.dtype) -> None:
    folder = write_qwen3(tmp_path / "m", "bf16" if dialect == "gguf" else dialect)
    if dialect == "gguf":
        tensors = gguf_tensors(qwen3_config(), dequantize_folder(folder), Type.BF16)
        folder = write_gguf(tmp_path / "m.gguf", qwen3_config(), tensors)
    found = scan_any(open_any(folder))
    model, _ = freetoken.load(folder, dtype=dtype)
    assert needed_bytes(found, width=dtype.itemsize)[1] == sum(p.nbytes for p in model.parameters())


def test_packed_dense_weights_are_counted_unpacked(shared_dir: Path) -> None:
    folder = shared_dir / "checkpoints" / "nvfp4-modelopt-qwen3moe"
    found = scan_any(open_any(folder))
    if not found.dense:
        pytest.skip("its dense part is not packed")
    packed = sum(info.nbytes for matrix in found.dense for info in matrix.parts.values())
    for dtype in (torch.bfloat16, torch.float32):
        model, _ = freetoken.load(folder, dtype=dtype)
        unpacked = sum(p.nbytes for p in model.parameters())
        assert unpacked <= found.dense_bytes(dtype.itemsize) <= unpacked + packed


def test_inspect_counts_the_dense_part_in_the_config_s_dtype(tmp_path: Path) -> None:
    narrow, wide = (inspect(write_qwen3(tmp_path / d, dtype=d)).dense_bytes for d in ("bfloat16", "float32"))
    assert wide == 2 * narrow


def test_fewer_threads_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = scan_any(open_any(write_qwen3(tmp_path / "m")))
    banks, dense = needed_bytes(found)
    each = transient_bytes(found)
    monkeypatch.setenv("FREETOKEN_LOAD_MIN_AVAILABLE", "1")

    def allow(nbytes: int) -> None:
        have = Budget((1 << 20) + banks + dense + nbytes, "memory.max")
        monkeypatch.setattr("freetoken.memory.budget.available", lambda *args, **kwargs: have)
        caplog.clear()

    with caplog.at_level(logging.WARNING):
        allow(8 * each)
        assert require_memory(found, threads=8) == 8
        assert not caplog.records
        for left, readers in ((8 * each - 1, 7), (3 * each, 3), (each, 1)):
            allow(left)
            assert require_memory(found, threads=8) == readers
            assert [r.getMessage().split(",")[0] for r in caplog.records] == [
                f"memory is short: experts are read with {readers} of 8 threads"
            ]
        allow(each - 1)
        with pytest.raises(CapacityError, match=r"memory\.max, of which 1\.00 MiB must stay free") as caught:
            require_memory(found, threads=8)
        assert caught.value.needed == banks + dense + each  # type: ignore[attr-defined]
    allow(0)
    assert "memory.max" in inspect(tmp_path / "m").why


def test_locked_banks_are_checked_against_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scan_any(open_any(write_qwen3(tmp_path / "m")))
    banks, _ = needed_bytes(found)
    limits = [Budget(banks - 1, "RLIMIT_MEMLOCK", "locked")]
    monkeypatch.setattr("freetoken.memory.budget._own_limits", lambda base: tuple(limits))
    require_memory(found)
    monkeypatch.setenv("FREETOKEN_MLOCK", "on")
    with pytest.raises(CapacityError, match="RLIMIT_MEMLOCK"):
        require_memory(found)
    limits[0] = Budget(banks, "RLIMIT_MEMLOCK", "locked")
    require_memory(found)


def write_hollow(folder: Path, width: int, n_experts: int) -> Path:
    """A checkpoint of square bf16 experts whose header is true and whose data are a hole in the file."""
    config = qwen3_config(hidden_size=width, moe_intermediate_size=width, num_experts=n_experts)
    tensors = {name: t for name, t in checkpoints.qwen3_tensors().items() if ".experts." not in name}
    shapes = {name: list(array.shape) for name, (_, array) in tensors.items()}
    for layer in range(LAYERS):
        for name in experts(np.random.default_rng(0), "bf16", f"model.layers.{layer}.mlp.experts", n_experts):
            shapes[name] = [width, width]
    header, offset = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    write_folder(folder, config, {})
    file = folder / "model.safetensors"
    write_raw(file, json.dumps(header).encode(), b"")
    os.truncate(file, file.stat().st_size + offset)
    return folder


def test_6_gib_of_experts_are_refused_before_any_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_hollow(tmp_path / "m", 2048, 128)
    have = Budget(5632 << 20, "job/memory.max")
    monkeypatch.setattr("freetoken.memory.budget.available", lambda *args, **kwargs: have)
    for read in ("read", "read_bytes"):
        monkeypatch.setattr(f"freetoken.checkpoint.safetensors.Checkpoint.{read}", lambda *args: pytest.fail("read"))
    checkpoints.forbid_banks(monkeypatch)
    with pytest.raises(CapacityError, match=r"needs 6\.07 GiB .* 5\.50 GiB .* job/memory\.max"):
        freetoken.load(folder)
