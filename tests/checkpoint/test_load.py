"""Banks filled by several threads, in every format; the first error stops the rest."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from freetoken import formats
from freetoken.banks import Bank, ShardedBank
from freetoken.checkpoint import load
from freetoken.checkpoint.experts import ExpertGroup, LayerExperts
from freetoken.checkpoint.load import fill_banks, requantize_expert
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.checkpoint.safetensors import open_checkpoint
from freetoken.checkpoint.scan import scan
from freetoken.errors import CheckpointError
from freetoken.formats import Format
from freetoken.formats.record import RecordLayout, shard_bounds
from freetoken.memory.placement import Placement
from tests.checkpoint.test_experts import GPTOSS, fused_fp8, native_gptoss
from tests.support.checkpoints import (
    DIALECTS,
    EXPERTS,
    HIDDEN,
    VOCABULARY,
    WIDTH,
    experts,
    fp8,
    qwen3_config,
    qwen3_tensors,
    write_folder,
    write_qwen3,
)
from tests.support.gguf import EXACT, encode, write_gguf
from tests.support.oracle import dequantize_folder, take_expert


def groups_of(folder: Path) -> tuple[ExpertGroup, ...]:
    return scan(open_checkpoint(folder)).groups


def fill(groups: tuple[ExpertGroup, ...], threads: int, fmt: Format | None = None) -> list[Bank]:
    banks = [Bank(group.layout(fmt), group.n_experts) for group in groups]
    fill_banks(zip(banks, groups, strict=True), threads)
    return banks


@pytest.mark.parametrize("dialect", DIALECTS)
def test_banks_hold_what_the_checkpoint_holds(tmp_path: Path, dialect: str) -> None:
    folder = write_qwen3(tmp_path / "m", dialect)
    groups = groups_of(folder)
    plain = dequantize_folder(folder)
    for bank, group in zip(fill(groups, 3), groups, strict=True):
        assert bank.missing == []
        assert bank.layout.format is group.format
        for e in range(EXPERTS):
            expert, expected = bank.get(e), take_expert(plain, group.prefix, e)
            for name in ("gate", "up", "down"):
                wanted = expected[name]
                assert wanted is not None
                np.testing.assert_array_equal(getattr(expert, name).dequantize(), wanted.float().numpy())


def write_plain(path: Path, dtype: str) -> Path:
    """Experts of wider numbers, which the bf16 format rounds."""
    tensors = qwen3_tensors()
    for name, (_, bits) in tensors.items():
        if ".experts." in name:
            values = (bits.astype(np.uint32) << 16).view(np.float32) * 1.003
            tensors[name] = dtype, values.astype({"F32": np.float32, "F16": np.float16}[dtype])
    return write_folder(path, qwen3_config(), tensors)


def write_fused_fp8(path: Path, transposed: bool) -> Path:
    """Under a grid that crosses from gate to up."""
    config = {"model_type": "qwen3_moe", "hidden_size": 200, "quantization_config": fp8([128, 128])}
    return write_folder(path, config, fused_fp8(88, 200, (128, 128), transposed))


def write_blocks(path: Path, kind: Type, merged: bool = False) -> Path:
    """GGUF, with biases."""
    config = qwen3_config(num_hidden_layers=1)
    values = np.random.default_rng(0).standard_normal
    names = {"gate_up": (2 * WIDTH, HIDDEN)} if merged else dict.fromkeys(("gate", "up"), (WIDTH, HIDDEN))
    rows = {"token_embd": VOCABULARY, "blk.0.attn_q": 64, "blk.0.attn_k": 32}  # of what the metadata are compared with
    tensors = {f"{name}.weight": encode(np.zeros((n, HIDDEN), np.float32), Type.F32) for name, n in rows.items()}
    for name, shape in {**names, "down": (HIDDEN, WIDTH)}.items():
        tensors[f"blk.0.ffn_{name}_exps.weight"] = encode(values((EXPERTS, *shape), np.float32), kind)
        tensors[f"blk.0.ffn_{name}_exps.bias"] = encode(values((EXPERTS, shape[0]), np.float32), Type.F32)
    return write_gguf(path, config, tensors)


WAYS: dict[str, tuple[Callable[[Path], Path], bool]] = {
    "fp32": (lambda path: write_plain(path, "F32"), False),
    "fp16": (lambda path: write_plain(path, "F16"), False),
    "gpt-oss": (lambda path: write_folder(path, GPTOSS, native_gptoss()), True),
    "fused fp8": (lambda path: write_fused_fp8(path, False), True),
    "fused fp8, transposed": (lambda path: write_fused_fp8(path, True), False),
    "GGUF F32": (lambda path: write_blocks(path, Type.F32), False),
    "GGUF F16, merged": (lambda path: write_blocks(path, Type.F16, True), False),
}
WAYS |= {f"GGUF {k.name}": (lambda path, k=k: write_blocks(path, k), True) for k in EXACT.values()}
WAYS |= {f"{k} merged": (lambda path, k=k: write_blocks(path, k, True), True) for k in EXACT.values()}


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("cut", [False, True])
def test_both_ways_give_the_same_bytes(tmp_path: Path, kind: str, cut: bool) -> None:
    """Permuted while they are read, or read and packed."""
    write, permuted = WAYS[kind]
    group = scan_any(open_any(write(tmp_path / "m.gguf"))).groups[0]
    assert (group.stored(1) is not None) == permuted
    two = group.intermediate >= 2 * group.format.granule
    bank = sharded(group, (None,) * (1 + two)) if cut else Bank(group.layout(), group.n_experts)
    fill_banks([(bank, group)], 2)
    assert bank.missing == []
    for e in range(group.n_experts):
        for shard, part in zip(bank.shards, bank.cut(group.read(e)), strict=True):
            record = np.empty(shard.layout.nbytes, np.uint8)
            shard.layout.pack(part, record)
            np.testing.assert_array_equal(shard.records[e], record)


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
def test_any_number_of_threads_gives_the_same_bytes(tmp_path: Path, threads: int) -> None:
    groups = groups_of(write_qwen3(tmp_path / "m", "modelopt"))
    for one, other in zip(fill(groups, 1), fill(groups, threads), strict=True):
        np.testing.assert_array_equal(one.records, other.records)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fmt", formats.names())
def test_conversion_quantizes_the_exact_values(tmp_path: Path, dialect: str, fmt: str) -> None:
    folder, target = write_qwen3(tmp_path / "m", dialect), formats.get(fmt)
    groups, plain = groups_of(folder), dequantize_folder(folder)
    for bank, group in zip(fill(groups, 2, target), groups, strict=True):
        assert bank.layout.format is target
        for e in range(EXPERTS):
            expert, expected = bank.get(e), take_expert(plain, group.prefix, e)
            for name in ("gate", "up", "down"):
                values = expected[name]
                assert values is not None
                wanted = values.float().numpy()
                if target is not group.format:
                    wanted = target.quantize(wanted).dequantize()
                np.testing.assert_array_equal(getattr(expert, name).dequantize(), wanted)


def test_an_expert_already_in_the_format_is_not_touched(tmp_path: Path) -> None:
    expert = groups_of(write_qwen3(tmp_path / "m", "modelopt"))[0].read(0)
    assert requantize_expert(expert, formats.get("nvfp4")) is expert


def test_biases_survive_a_conversion(shared_dir: Path) -> None:
    (group, _) = groups_of(shared_dir / "checkpoints" / "bf16-transformers-gptoss")
    before, after = group.read(1), requantize_expert(group.read(1), formats.get("q8_0"))
    assert after.gate.format.name == "q8_0"
    for name in ("gate_bias", "up_bias", "down_bias"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


def test_every_byte_is_reported(tmp_path: Path) -> None:
    groups = groups_of(write_qwen3(tmp_path / "m"))
    banks = [Bank(group.layout(), group.n_experts) for group in groups]
    seen: list[int] = []
    names: set[str] = set()

    def on_bytes(n: int) -> None:
        seen.append(n)
        names.add(threading.current_thread().name.rpartition("_")[0])

    fill_banks(zip(banks, groups, strict=True), 2, on_bytes)
    assert sum(seen) == sum(bank.nbytes for bank in banks)
    assert names == {"freetoken-load"}


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_one_expert_surfaces(tmp_path: Path, threads: int) -> None:
    tensors = qwen3_tensors()
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    bits = tensors[name][1].copy()
    bits[0, 0] = 0x7FC0  # NaN
    tensors[name] = ("BF16", bits)
    groups = groups_of(write_folder(tmp_path / "m", qwen3_config(), tensors))
    banks = [Bank(group.layout(), group.n_experts) for group in groups]
    with pytest.raises(CheckpointError, match=f"'{name}': row 0 holds a NaN"):
        fill_banks(zip(banks, groups, strict=True), threads)
    assert 1 in banks[0].missing
    assert not [t for t in threading.enumerate() if t.name.startswith("freetoken-load")]


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d != "bf16"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_scale_that_is_no_number_surfaces(tmp_path: Path, dialect: str, cut: bool) -> None:
    """Also where nobody looked at scales before, as when a folder is converted."""
    tensors = qwen3_tensors(dialect)
    (name,) = (n for n in tensors if re.search(r"layers\.0\..*\.1\.down_proj\.weight_scale(_inv)?$", n))
    dtype, scales = tensors[name]
    scales.reshape(-1)[-1] = {"F8_E4M3": 0xFF, "BF16": 0x7FC0, "F32": np.nan}.get(dtype, 255)
    group, *_ = groups_of(write_folder(tmp_path / "m", qwen3_config(quantization_config=DIALECTS[dialect][0]), tensors))
    bank = sharded(group, (0,)) if cut else Bank(group.layout(), EXPERTS)
    with pytest.raises(CheckpointError, match=f"'{name}': row"):
        fill_banks([(bank, group)], 2)
    assert 1 in bank.missing


def test_a_scale_that_only_looks_like_no_number(tmp_path: Path) -> None:
    """Of minus zero, in one expert of those that are written at once."""
    rng = np.random.default_rng(0)
    tensors = experts(rng, "modelopt", "model.layers.0.mlp.experts", 16)
    tensors["model.layers.0.mlp.experts.5.up_proj.weight_scale"][1][-1, -1] = 0x80
    config = qwen3_config(quantization_config=DIALECTS["modelopt"][0], num_experts=16)
    (group,) = groups_of(write_folder(tmp_path / "m", config, tensors))
    group.check_scales()
    (bank,) = fill((group,), 1)
    record = np.empty(bank.layout.nbytes, np.uint8)
    for e in range(16):
        bank.layout.pack(group.read(e), record)
        np.testing.assert_array_equal(bank.records[e], record)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_stops_the_rest(tmp_path: Path, error: type[BaseException]) -> None:
    """Ctrl-C, and a progress bar whose terminal is gone, come this way. Later experts are slow: some must remain."""
    group = groups_of(
        write_folder(tmp_path / "m", qwen3_config(), experts(np.random.default_rng(0), "bf16", "experts", 64))
    )[0]
    bank, calls = Bank(group.layout(), 64), iter(range(64))

    def on_bytes(n: int) -> None:
        if next(calls) == 0:
            raise error
        time.sleep(0.02)

    with pytest.raises(error):
        fill_banks([(bank, group)], 2, on_bytes)
    assert len(bank.missing) > 32


def sharded(group: LayerExperts, nodes: tuple[int | None, ...]) -> ShardedBank:
    layout = group.layout()
    bounds = shard_bounds(layout.format, layout.intermediate, len(nodes))
    return ShardedBank(layout, group.n_experts, bounds, nodes)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
@pytest.mark.parametrize("permuted", [True, False])
def test_records_are_written_by_threads_near_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, permuted: bool
) -> None:
    """Node 0 has all CPUs, node 1 one of them, node 2 none, so that its records are written by who reads them."""
    groups = groups_of(write_qwen3(tmp_path / "m", "modelopt"))
    every = tuple(sorted(os.sched_getaffinity(0)))
    placement = Placement("shard", (0, 1, 2), "", (), cpus={0: every, 1: every[-1:], 2: ()})
    nodes, seen = [(0, 1), (2, 1)], set()
    banks = [sharded(*pair) for pair in zip(groups, nodes, strict=True)]
    real = load.write_stored

    def noting(stored: Any, whole: RecordLayout, layout: RecordLayout, start: int, out: NDArray[np.uint8]) -> bool:
        name = threading.current_thread().name.rpartition("_")[0]
        (node,) = (s.node for bank in banks for s in bank.shards if np.may_share_memory(s.records, out))
        seen.add((node, name, tuple(sorted(os.sched_getaffinity(0)))))
        done = real(stored, whole, layout, start, out)
        return done and permuted  # else they are read and packed: by the same threads

    monkeypatch.setattr(load, "write_stored", noting)
    fill_banks(zip(banks, groups, strict=True), 2, placement=placement)
    monkeypatch.undo()
    assert seen == {
        (0, "freetoken-node0", every),
        (1, "freetoken-node1", every[-1:]),
        (2, "freetoken-load", every),
    }
    assert tuple(sorted(os.sched_getaffinity(0))) == every
    assert not [t for t in threading.enumerate() if t.name.startswith("freetoken-")]
    for bank, whole in zip(banks, fill(groups, 1), strict=True):
        for e in range(EXPERTS):
            parts = [shard.get(e) for shard in bank.shards]
            for name, axis in (("gate", 0), ("up", 0), ("down", 1)):
                joined = np.concatenate([getattr(part, name).dequantize() for part in parts], axis)
                np.testing.assert_array_equal(joined, getattr(whole.get(e), name).dequantize())


def test_an_error_while_a_record_is_written_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (group, *_) = groups_of(write_qwen3(tmp_path / "m", "modelopt"))
    bank = sharded(group, (0, 1))

    real = load.write_stored

    def fail(stored: Any, whole: RecordLayout, layout: RecordLayout, start: int, out: NDArray[np.uint8]) -> bool:
        if start:
            raise OSError("no page")
        return real(stored, whole, layout, start, out)

    monkeypatch.setattr(load, "write_stored", fail)
    every = tuple(os.sched_getaffinity(0))
    with pytest.raises(OSError, match="no page"):
        fill_banks([(bank, group)], 2, placement=Placement("shard", (0, 1), "", (), cpus={0: every, 1: every}))
    assert bank.missing == list(range(EXPERTS))
    assert not [t for t in threading.enumerate() if t.name.startswith("freetoken-")]
