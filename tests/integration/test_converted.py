"""Models from converted folders: bit for bit what loading their source gives, also from one mapping of several."""

from __future__ import annotations

import gc
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

import freetoken
from freetoken import formats
from freetoken.checkpoint.inspect import inspect
from freetoken.cli import main
from freetoken.errors import CapacityError, CheckpointError, ConfigError, UnsupportedError
from freetoken.integration.operator import layer_of
from freetoken.memory.budget import Budget
from tests.support.checkpoints import DIALECTS, forbid_banks, qwen3_config, write_qwen3, write_tokenizer
from tests.support.converted import convert_folder, flip_bit
from tests.support.gguf import gguf_tensors, write_gguf
from tests.support.logits import collect_logits
from tests.support.oracle import dequantize_folder


def check_same(one: Any, other: Any) -> None:
    """Same formats, same logits to the last bit."""
    assert freetoken.report(one).formats == freetoken.report(other).formats
    vocabulary = one.config.get_text_config().vocab_size
    found, expected = collect_logits(one, vocabulary), collect_logits(other, vocabulary)
    assert expected.std() > 0.01
    assert torch.equal(found, expected)


def check_conversion(source: Path, destination: Path, fmt: str | None, **arguments: Any) -> None:
    """Read and mapped, against the source re-quantized while loading."""
    convert_folder(source, destination, fmt)
    expected, _ = freetoken.load(source, expert_format=fmt, **arguments)
    for shared in (False, True):
        model, _ = freetoken.load(destination, shared=shared, **arguments)
        check_same(model, expected)
        assert freetoken.report(model).shared is shared
        assert model.config.to_dict() == expected.config.to_dict() | {"_name_or_path": model.config._name_or_path}
    assert inspect(destination).quantization == inspect(source).quantization


@pytest.mark.parametrize("fmt", formats.names())
def test_every_format(tmp_path: Path, tiny: Path, fmt: str) -> None:
    check_conversion(tiny, tmp_path / "m", fmt, dtype=torch.float32)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect(tmp_path: Path, dialect: str) -> None:
    check_conversion(write_qwen3(tmp_path / "source", dialect), tmp_path / "m", None)


REAL = {
    "bf16-transformers-gptoss": "mxfp4",
    "mxfp4-native-gptoss-repacked": None,
    "mxfp4a16-llmcompressor-gptoss": None,
    "nvfp4-modelopt-gptoss": "q4_0",
    "nvfp4-modelopt-qwen3moe": None,
    "nvfp4-modelopt-mixtral": "ds_fp4",
    "nvfp4a16-llmcompressor-deepseekv3": None,
    "bf16-transformers-deepseekv3": "nvfp4",
    "bf16-transformers-deepseekv4": "q8_0",
    "fp4-deepseekv4-constructed": None,
    "fp8block-transformers-qwen3moe256": None,
}
"""Checkpoints of real tools, with biases, packed dense weights and routers' fp32 biases -> the format to convert to."""


@pytest.mark.parametrize("name", REAL)
def test_checkpoints_of_real_tools(shared_dir: Path, tmp_path: Path, name: str) -> None:
    """In fp32: DeepSeek-V4 in bf16 does not run in transformers 5.17."""
    check_conversion(shared_dir / "checkpoints" / name, tmp_path / "m", REAL[name], dtype=torch.float32)


def test_another_format_while_loading(tmp_path: Path) -> None:
    """A converted folder re-quantizes as its source does, from the values that it holds."""
    source = write_qwen3(tmp_path / "source", "ct-mxfp4")
    convert_folder(source, tmp_path / "m")
    check_same(freetoken.load(tmp_path / "m", expert_format="q8_0")[0], freetoken.load(source, expert_format="q8_0")[0])


def test_the_tokenizer_goes_along(tmp_path: Path, tiny: Path) -> None:
    convert_folder(tiny, tmp_path / "m")
    text = "w5 w9 w80"
    assert freetoken.load(tmp_path / "m")[1](text)["input_ids"] == freetoken.load(tiny)[1](text)["input_ids"]


# --- sharing ---------------------------------------------------------------------------------------------------------

CHILD = """
import sys, torch, freetoken
model, _ = freetoken.load(sys.argv[1], shared=True, threads=1)
with torch.no_grad():
    print(float(model(torch.arange(3, 20)[None]).logits.double().sum()), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not tell who shares a page")
def test_two_processes_share_one_copy(tmp_path: Path, tiny: Path) -> None:
    """Every page of the banks is in both, and half of it is counted for each."""
    convert_folder(tiny, tmp_path / "m")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, tmp_path / "m"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        answers = {child.stdout.readline() for child in children if child.stdout}
        seen = [[sizes for name, sizes in read_smaps(c.pid) if name.endswith(".bank")] for c in children]
    finally:
        for child in children:
            child.communicate(timeout=60)
    assert [child.returncode for child in children] == [0, 0]
    assert len(answers) == 1
    assert float(answers.pop())
    bank = freetoken.report(freetoken.load(tmp_path / "m")[0]).bank_bytes // 2
    for mappings in seen:
        assert len(mappings) == 2
        for sizes in mappings:
            assert sizes["Shared_Clean"] + sizes["Shared_Dirty"] >= bank / 1024
            assert sizes["Private_Clean"] <= 4, "the header's page alone may be in one process only"
            assert sizes["Private_Dirty"] == sizes["Anonymous"] == 0
            assert sizes["Pss"] < 0.6 * sizes["Rss"]


def read_smaps(pid: int) -> list[tuple[str, dict[str, int]]]:
    """(file, name of a size -> KiB) of each mapping of a file."""
    found: list[tuple[str, dict[str, int]]] = []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found.append((line.partition("/")[2], {}))
        elif line.endswith(" kB"):
            name, _, size = line.removesuffix(" kB").partition(":")
            found[-1][1][name] = int(size)
    return found


def test_shared_banks_take_no_memory_of_their_own(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither mapped nor asked for; what does not stay in memory is worth a warning."""
    convert_folder(tiny, tmp_path / "m", "q8_0")
    found = inspect(tmp_path / "m")
    monkeypatch.setenv("FREETOKEN_LOAD_MIN_AVAILABLE", "0")
    small = Budget(found.dense_bytes + found.bank_bytes // 2, "memory.max")
    monkeypatch.setattr("freetoken.memory.budget.available", lambda *args, **kwargs: small)
    with pytest.raises(CapacityError, match=r"memory\.max"):
        freetoken.load(tmp_path / "m")
    forbid_banks(monkeypatch)
    with caplog.at_level(logging.WARNING, "freetoken"):
        model, _ = freetoken.load(tmp_path / "m", shared=True)
    assert "do not all stay in memory" in caplog.text
    assert freetoken.report(model).bank_bytes == found.bank_bytes
    assert "in files mapped read-only, shared" in str(freetoken.report(model))
    assert freetoken.report(model).to_dict()["shared"]
    tight = Budget(found.dense_bytes - 1, "memory.max")
    monkeypatch.setattr("freetoken.memory.budget.available", lambda *args, **kwargs: tight)
    with pytest.raises(CapacityError):
        freetoken.load(tmp_path / "m", shared=True)


def test_what_cannot_be_shared_is_refused(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_folder(tiny, tmp_path / "m", "q8_0")
    forbid_banks(monkeypatch)
    with pytest.raises(ConfigError, match="ft convert"):
        freetoken.load(tiny, shared=True)
    with pytest.raises(ConfigError, match=r"holds them as q8_0: .* --expert-format nvfp4"):
        freetoken.load(tmp_path / "m", shared=True, expert_format="nvfp4")


@pytest.mark.parametrize("shared", [False, True])
def test_a_damaged_record_is_refused(tmp_path: Path, tiny: Path, shared: bool) -> None:
    convert_folder(tiny, tmp_path / "m", "nvfp4")
    flip_bit(tmp_path / "m" / "experts-00001.bank", -1)
    with pytest.raises(CheckpointError, match=r"experts-00001\.bank: the record of expert 3 has checksum"):
        freetoken.load(tmp_path / "m", shared=shared)


def test_a_shared_model_gives_its_mappings_back(tmp_path: Path, tiny: Path) -> None:
    convert_folder(tiny, tmp_path / "m")
    model, _ = freetoken.load(tmp_path / "m", shared=True)
    assert all(not layer.bank.records.flags.writeable for m in model.modules() if (layer := layer_of(m)))
    mapped = f"{tmp_path}/m/experts"
    assert mapped in Path("/proc/self/maps").read_text()
    del model
    gc.collect()
    assert mapped not in Path("/proc/self/maps").read_text()


# --- the command and GGUF --------------------------------------------------------------------------------------------


def test_the_command_line(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tiny), str(tmp_path / "m"), "--expert-format", "nvfp4", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert f"{tmp_path}/m: 8 experts in 2 layers as nvfp4" in out
    assert err == ""
    generate = ["generate", "--model", str(tmp_path / "m"), "--max-new-tokens", "3", "--prompt", "w5 w6"]
    assert main([*generate, "--shared"]) == 0
    assert main(["convert", str(tiny), str(tmp_path / "m")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["convert", str(tiny), str(tmp_path / "n"), "--expert-format", "int3"]) == 2
    assert main([*generate, "--shared", "--expert-format", "q8_0"]) == 2
    assert "ft convert" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.BF16])
def test_gguf_becomes_a_folder(tmp_path: Path, tiny: Path, kind: Type) -> None:
    """The dense part by the model's names, a config, and the experts as records."""
    write_tokenizer(tmp_path)
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(), gguf_tensors(qwen3_config(), dequantize_folder(tiny), kind))
    assert main(["convert", str(file), str(tmp_path / "m")]) == 0
    for dtype in (None, torch.float32):
        check_same(freetoken.load(tmp_path / "m", dtype=dtype)[0], freetoken.load(file, dtype=dtype)[0])
    assert freetoken.load(tmp_path / "m", shared=True)[0].dtype == torch.bfloat16


def test_gguf_of_the_demo(tmp_path: Path, shared_dir: Path) -> None:
    """With its tokenizer, through K-quants' like: experts re-quantized, an embedding in blocks."""
    demo = shared_dir / "models" / "demo"
    config = json.loads((demo / "config.json").read_text())
    tensors = gguf_tensors(config, dequantize_folder(demo), Type.Q5_1)
    file = write_gguf(tmp_path / "demo.gguf", config, tensors, demo / "tokenizer.json")
    with pytest.raises(UnsupportedError, match="GGUF"):
        convert_folder(file, tmp_path / "x", "q8_0")
    assert main(["convert", str(file), str(tmp_path / "m"), "--expert-format", "q8_0"]) == 0
    one, tokenizer = freetoken.load(tmp_path / "m")
    other, own = freetoken.load(file, expert_format="q8_0")
    check_same(one, other)
    text = "Once upon a time there was a cat."
    assert tokenizer(text)["input_ids"] == own(text)["input_ids"]
    assert (tokenizer.eos_token, tokenizer.bos_token) == (own.eos_token, own.bos_token)
    assert one.generation_config.eos_token_id == other.generation_config.eos_token_id
