"""Converting: the bytes that banks would hold, all or nothing under the name asked for, and resumable in between."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freetoken.checkpoint.convert as convert_module
from freetoken import formats
from freetoken.banks import Bank
from freetoken.checkpoint import write
from freetoken.checkpoint.beside import DenseTensor
from freetoken.checkpoint.convert import Conversion
from freetoken.checkpoint.load import fill_banks
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.checkpoint.records import HEADER_BYTES, JOURNAL, MANIFEST
from freetoken.checkpoint.safetensors import open_checkpoint
from freetoken.errors import CapacityError, CheckpointError, ConfigError, FormatError, UnsupportedError
from tests.support.checkpoints import (
    DIALECTS,
    EXPERTS,
    LAYERS,
    qwen3_config,
    qwen3_tensors,
    write_folder,
    write_qwen3,
    write_sharded,
    write_tokenizer,
)
from tests.support.converted import contents, convert_folder, export_folder, flip_bit, write_experts

Usage = namedtuple("Usage", "total used free")


def banks_of(folder: Path, fmt: str | None = None) -> list[Bank]:
    target = None if fmt is None else formats.get(fmt)
    groups = scan_any(open_any(folder), target).groups
    banks = [Bank(group.layout(target), group.n_experts) for group in groups]
    fill_banks(zip(banks, groups, strict=True), 2)
    return banks


def prepare(source: Path, destination: Path) -> Conversion:
    return Conversion(scan_any(open_any(source)), destination)


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fmt", [None, *formats.names()])
def test_records_are_those_of_banks(tmp_path: Path, dialect: str, fmt: str | None) -> None:
    source = write_qwen3(tmp_path / "source", dialect)
    done = convert_folder(source, tmp_path / "m", fmt)
    expected = banks_of(source, fmt)
    assert done.formats == (fmt or DIALECTS[dialect][1],)
    assert done.bank_bytes == sum(bank.nbytes for bank in expected)
    for number, bank in enumerate(expected):
        data = (tmp_path / "m" / f"experts-{number:05}.bank").read_bytes()
        assert data[HEADER_BYTES:] == bank.records.tobytes()
        header = json.loads(data[:HEADER_BYTES].rstrip(b"\0"))
        assert header["prefix"] == f"model.layers.{number}.mlp.experts"


def test_everything_else_goes_along(tmp_path: Path) -> None:
    """Dense tensors byte for byte under their names, config and tokenizer as files; weights of others do not."""
    config = qwen3_config(auto_map={"AutoModelForCausalLM": "modeling_x.Model"})
    source = write_sharded(tmp_path / "source", config, qwen3_tensors(), 3)
    write_tokenizer(source)
    for name in ("generation_config.json", "chat_template.jinja", "LICENSE", "modeling_x.py", "merges.txt"):
        (source / name).write_text(name)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors", ".gitattributes"):
        (source / name).write_text(name)
    (source / "original").mkdir()
    convert_folder(source, tmp_path / "m")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "m")
    dense = {name for name in before.tensors if ".experts." not in name}
    assert after.tensors.keys() == dense
    for name in dense:
        one, other = before.tensors[name], after.tensors[name]
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(before.read_bytes(name), after.read_bytes(name))
    files = contents(tmp_path / "m")
    assert files.keys() == {
        "config.json", "generation_config.json", "chat_template.jinja", "LICENSE", "modeling_x.py", "merges.txt",
        "tokenizer.json", "tokenizer_config.json", "model.safetensors", "experts-00000.bank", "experts-00001.bank",
        MANIFEST,
    }  # fmt: skip
    assert all(files[name] == (source / name).read_bytes() for name in ("config.json", "LICENSE", "tokenizer.json"))


def test_a_large_dense_part_is_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by safetensors itself; pieces smaller than a tensor."""
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.setattr(write, "_FILE_BYTES", 20_000)
    monkeypatch.setattr(write, "_PIECE", 1000)
    tensors = qwen3_tensors() | {
        "model.odd": ("U8", np.arange(3, dtype=np.uint8)),
        "model.wide": ("F32", np.ones(2, np.float32)),
    }
    source = write_folder(tmp_path / "source", qwen3_config(), tensors)
    convert_folder(source, tmp_path / "m")
    files = sorted(file.name for file in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 2
    assert files[-1] == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "m")
    for name, info in after.tensors.items():
        np.testing.assert_array_equal(before.read_bytes(name), after.read_bytes(name))
        assert info.offset % {"BF16": 2, "U8": 1, "F32": 4}[info.dtype] == 0
    for file in files:
        if "model.wide" in (whole := safetensors.load((tmp_path / "m" / file).read_bytes())):
            assert whole["model.wide"].tolist() == [1, 1]


def test_a_converted_folder_converts_again(tmp_path: Path) -> None:
    source = write_qwen3(tmp_path / "source", "ct-nvfp4")
    convert_folder(source, tmp_path / "a")
    convert_folder(tmp_path / "a", tmp_path / "b", "q8_0")
    convert_folder(source, tmp_path / "c", "q8_0")
    one, other = contents(tmp_path / "b"), contents(tmp_path / "c")
    assert json.loads(one.pop(MANIFEST))["layers"] == json.loads(other.pop(MANIFEST))["layers"]
    assert one == other
    convert_folder(tmp_path / "b", tmp_path / "d")
    assert contents(tmp_path / "d") | {MANIFEST: b""} == other | {MANIFEST: b""}


@pytest.mark.parametrize("threads", [0, 1, 5])
def test_any_number_of_threads_writes_the_same(tmp_path: Path, threads: int) -> None:
    source = write_qwen3(tmp_path / "source")
    convert_folder(source, tmp_path / "one", "mxfp4", 1)
    convert_folder(source, tmp_path / "m", "mxfp4", threads)
    assert contents(tmp_path / "m") == contents(tmp_path / "one")


def test_every_byte_is_reported(tmp_path: Path) -> None:
    conversion = prepare(write_qwen3(tmp_path / "source"), tmp_path / "m")
    seen: list[int] = []
    conversion.run(3, seen.append)
    assert sum(seen) == conversion.nbytes
    assert not [t for t in threading.enumerate() if t.name.startswith("freetoken-load")]


def test_experts_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are threads."""
    source = write_experts(tmp_path / "source", 4)
    active, most, lock, real = 0, 0, threading.Lock(), convert_module.write_records

    def write(*args: Any) -> None:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        real(*args)
        time.sleep(0.005)
        with lock:
            active -= 1

    monkeypatch.setattr(convert_module, "write_records", write)
    convert_folder(source, tmp_path / "m", threads=3)
    assert most == 3


def test_files_to_be_mapped_are_read_only(tmp_path: Path) -> None:
    convert_folder(write_qwen3(tmp_path / "source"), tmp_path / "m")
    assert {file.stat().st_mode & 0o222 for file in (tmp_path / "m").glob("*.bank")} == {0}


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    convert_folder(write_qwen3(tmp_path / "source"), tmp_path / "m")
    convert_folder(tmp_path / "source", tmp_path / "a" / "b")
    assert contents(tmp_path / "m") == contents(tmp_path / "a" / "b")


# --- what is refused before the first byte ---------------------------------------------------------------------------


def test_a_destination_that_exists(tmp_path: Path) -> None:
    source = write_qwen3(tmp_path / "source")
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "full", "dangling", "source", "full/..", ""):
        with pytest.raises(ConfigError, match="exists already"):
            prepare(source, tmp_path / name)
    with pytest.raises(ConfigError, match="exists already"):
        prepare(source, Path("/"))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = prepare(write_qwen3(tmp_path / "source"), tmp_path / "m")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 5000))
    with pytest.raises(
        CapacityError, match=r"1\d\d\.\d KiB are to be written to .*, and the disk has 5000 bytes left"
    ) as caught:
        conversion.run(2)
    assert caught.value.needed == conversion.nbytes + LAYERS * HEADER_BYTES  # type: ignore[attr-defined]
    assert caught.value.available == 5000  # type: ignore[attr-defined]
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_width_that_does_not_fit(tmp_path: Path) -> None:
    tensors = qwen3_tensors()
    for name in [n for n in tensors if ".experts." in n]:
        n, k = tensors[name][1].shape
        n, k = (48 if d == 32 else d for d in (n, k))
        tensors[name] = ("BF16", np.zeros((n, k), np.uint16))
    source = write_folder(tmp_path / "source", qwen3_config(moe_intermediate_size=48), tensors)
    with pytest.raises(FormatError, match="q8_0: the expert width is 48"):
        convert_folder(source, tmp_path / "m", "q8_0")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_config_that_contradicts(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", qwen3_config(num_experts=5), qwen3_tensors())
    with pytest.raises(CheckpointError, match="num_experts 5"):
        prepare(source, tmp_path / "m")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    source = write_qwen3(tmp_path / "source")
    (tmp_path / "file").write_text("")
    for name in ("file/m", "x" * 300):
        with pytest.raises(ConfigError, match="cannot be written") as caught:
            prepare(source, tmp_path / name).run(1)
        assert "nothing of it stays" in str(caught.value)


# --- what goes wrong on the way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_a_source_that_is_damaged_leaves_nothing(tmp_path: Path, threads: int) -> None:
    tensors = qwen3_tensors()
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name] = ("BF16", np.full_like(tensors[name][1], 0x7FC0))  # NaN
    source = write_folder(tmp_path / "source", qwen3_config(), tensors)
    with pytest.raises(CheckpointError, match=f"'{name}': row 0 holds a NaN"):
        convert_folder(source, tmp_path / "m", "q8_0", threads)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_source_that_changes_meanwhile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real = write_qwen3(tmp_path / "source"), convert_module.write_records

    def write(*args: Any) -> None:
        os.utime(source / "model.safetensors", ns=(1, 1))
        real(*args)

    monkeypatch.setattr(convert_module, "write_records", write)
    with pytest.raises(CheckpointError, match="was changed while it was converted"):
        convert_folder(source, tmp_path / "m")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def fail_writes(monkeypatch: pytest.MonkeyPatch, after: int, number: int = errno.ENOSPC) -> None:
    """Let `after` writes through, the last of them short, then none."""
    real, calls = os.pwrite, iter(range(1 << 30))

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        call = next(calls)
        if call >= after:
            raise OSError(number, os.strerror(number))
        return real(fd, data[: len(data) // 2] if call == after - 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_disk_that_fills_up_at_once_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    source = write_qwen3(tmp_path / "source")
    fail_writes(monkeypatch, after)
    with pytest.raises(CapacityError, match="No space left on device; nothing of it stays"):
        convert_folder(source, tmp_path / "m")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("threads", [1, 3])
def test_a_disk_that_fills_up_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Whole files stay, half ones do not, and the rest is written when there is room again."""
    source = write_experts(tmp_path / "source", 6)
    with monkeypatch.context() as patch:
        fail_writes(patch, 2 + 3 * (EXPERTS + 1))
        with pytest.raises(CapacityError, match=r"what is finished stays in .*m\.partial\. Make room") as caught:
            convert_folder(source, tmp_path / "m", threads=threads)
    assert caught.value.where == str(tmp_path)  # type: ignore[attr-defined]
    assert not (tmp_path / "m").exists()
    left = {path.name for path in (tmp_path / "m.partial").glob("*.bank")}
    journal = (tmp_path / "m.partial" / JOURNAL).read_text().splitlines()
    noted = {line["file"] for line in map(json.loads, journal) if "file" in line}
    assert left == noted - {"model.safetensors"}
    done = convert_folder(source, tmp_path / "m", threads=threads)
    convert_folder(source, tmp_path / "other")
    assert done.kept_bytes >= len(left) * (done.bank_bytes // 6) > 0
    assert contents(tmp_path / "m") == contents(tmp_path / "other")
    assert not (tmp_path / "m.partial").exists()


def test_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real = write_qwen3(tmp_path / "source"), os.pwrite
    convert_folder(source, tmp_path / "whole")
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:777], offset))
    convert_folder(source, tmp_path / "m")
    assert contents(tmp_path / "m") == contents(tmp_path / "whole")


def test_a_limit_of_the_system(tmp_path: Path) -> None:
    """The real thing: a file that may not grow. One line, nothing left."""
    source = write_qwen3(tmp_path / "source")
    code = (
        "import resource, sys; from freetoken.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "convert", source, tmp_path / "m"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("ft: error: ")
    assert "File too large; nothing of it stays" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


# --- interrupted and resumed -----------------------------------------------------------------------------------------

SLOW = """
import sys, time
import freetoken.checkpoint.convert as convert
import freetoken.checkpoint.export as export
from freetoken.cli import main
def slow(real):
    def write(*args):
        result = real(*args)
        time.sleep(0.03)
        return result
    return write
convert.write_records = slow(convert.write_records)
for kind in (export._Packed, export._Plain):
    kind.requantize_expert = slow(kind.requantize_expert)
sys.exit(main(["convert", *sys.argv[1:], "--threads", "1"]))
"""


def start_slowly(source: Path, destination: Path, *options: str) -> subprocess.Popen[str]:
    """`ft convert` in a process of its own, a few hundredths of a second for each expert."""
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, source, destination, *options],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for_banks(partial: Path, count: int, process: subprocess.Popen[str]) -> None:
    while not (partial / JOURNAL).exists() or (partial / JOURNAL).read_text().count('.bank", "bytes"') < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def count_records(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prefix of each record written from here on."""
    seen: list[str] = []
    real = convert_module.write_records

    def write(group: Any, expert: int, *rest: Any) -> None:
        seen.append(group.prefix)
        real(group, expert, *rest)

    monkeypatch.setattr(convert_module, "write_records", write)
    return seen


@pytest.mark.parametrize("torn", [False, True])
def test_killed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool) -> None:
    """SIGKILL in the middle; what was finished is not written again. Torn: the last note was being written."""
    source = write_experts(tmp_path / "source", 8)
    partial = tmp_path / "m.partial"
    process = start_slowly(source, tmp_path / "m", "--expert-format", "q8_0")
    wait_for_banks(partial, 3, process)
    process.kill()
    process.communicate()
    assert not (tmp_path / "m").exists()
    if torn:
        text = (partial / JOURNAL).read_text()
        (partial / JOURNAL).write_text(text[:-7])
    notes = [line for line in (partial / JOURNAL).read_text().splitlines(keepends=True)[1:] if line.endswith("\n")]
    finished = {name: (partial / name).stat().st_ino for note in notes for name in [json.loads(note)["file"]]}
    whole = sum(name.endswith(".bank") for name in finished)
    assert 2 <= whole < 8
    written = count_records(monkeypatch)
    done = convert_folder(source, tmp_path / "m", "q8_0")
    assert len(written) == (8 - whole) * EXPERTS
    assert {(tmp_path / "m" / name).stat().st_ino for name in finished} == set(finished.values())
    assert done.kept_bytes == whole * done.bank_bytes // 8 + ("model.safetensors" in finished) * done.dense_bytes
    monkeypatch.undo()
    convert_folder(source, tmp_path / "other", "q8_0")
    assert contents(tmp_path / "m") == contents(tmp_path / "other")
    assert not partial.exists()


def test_interrupted_by_hand(tmp_path: Path) -> None:
    source = write_experts(tmp_path / "source", 8)
    process = start_slowly(source, tmp_path / "m")
    wait_for_banks(tmp_path / "m.partial", 2, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "what is finished stays in" in stderr
    assert "the same command goes on from there" in stderr
    assert "Traceback" not in stderr
    assert convert_folder(source, tmp_path / "m").kept_bytes > 0


def leave_partial(source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What an interrupted run leaves."""
    with monkeypatch.context() as patch:
        fail_writes(patch, 2 + 2 * (EXPERTS + 1) + 2)
        with pytest.raises(CapacityError):
            convert_folder(source, destination, threads=1)
    return destination.with_name(f"{destination.name}.partial")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("format", r"expert format was None, now is q8_0"),
        ("time", r"source files was \{'model.safetensors': \[\d+, \d+\]\}, now is \{'model.safetensors': \[\d+, 1\]\}"),
        ("config", r"source files was \{'config.json'"),
        ("source", r"source was .*/source, now is .*/elsewhere"),
        ("layout", r"record layout version was 1, now is 2"),
    ],
)
def test_the_beginning_of_another_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, words: str
) -> None:
    """Is refused by what differs, and stays."""
    source = write_experts(tmp_path / "source", 4)
    partial = leave_partial(source, tmp_path / "m", monkeypatch)
    before = contents(partial)
    if change == "time":
        os.utime(source / "model.safetensors", ns=(1, 1))
    if change == "config":
        (source / "config.json").write_text((source / "config.json").read_text() + " ")
    if change == "source":
        source = Path(shutil.copytree(source, tmp_path / "elsewhere"))
    if change == "layout":
        monkeypatch.setattr(convert_module, "LAYOUT_VERSION", 2)
    with pytest.raises(ConfigError, match=words + r".*remove it to start anew"):
        convert_folder(source, tmp_path / "m", "q8_0" if change == "format" else None)
    assert contents(partial) == before


def test_files_that_lost_bytes_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_experts(tmp_path / "source", 4)
    partial = leave_partial(source, tmp_path / "m", monkeypatch)
    (partial / "experts-00000.bank").unlink()
    other = partial / "experts-00001.bank"
    other.chmod(0o644)
    other.write_bytes(other.read_bytes()[:-1])
    (partial / "stray").write_text("")
    written = count_records(monkeypatch)
    convert_folder(source, tmp_path / "m")
    assert len(written) == 4 * EXPERTS
    monkeypatch.undo()
    convert_folder(source, tmp_path / "other")
    assert contents(tmp_path / "m") == contents(tmp_path / "other")


def test_a_folder_that_only_has_the_name(tmp_path: Path) -> None:
    source = write_qwen3(tmp_path / "source")
    partial = tmp_path / "m.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="was not left by an unfinished conversion"):
        convert_folder(source, tmp_path / "m")
    assert contents(partial) == {"thesis.txt": b"years of work"}
    (partial / JOURNAL).write_text("[]\n")
    with pytest.raises(ConfigError, match="another conversion"):
        convert_folder(source, tmp_path / "m")
    (partial / JOURNAL).write_text("{\n")
    with pytest.raises(ConfigError, match="is damaged"):
        convert_folder(source, tmp_path / "m")
    assert (partial / "thesis.txt").exists()


@pytest.mark.parametrize("journal", [None, "", '{"source": "/a'])
def test_killed_before_anything_was_noted(tmp_path: Path, journal: str | None) -> None:
    (tmp_path / "m.partial").mkdir()
    if journal is not None:
        (tmp_path / "m.partial" / JOURNAL).write_text(journal)
    convert_folder(write_qwen3(tmp_path / "source"), tmp_path / "m")
    assert (tmp_path / "m" / MANIFEST).exists()


def test_killed_just_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_qwen3(tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert_folder(source, tmp_path / "m")
    written = count_records(monkeypatch)
    convert_folder(source, tmp_path / "m")
    assert written == []
    assert len(banks_of(tmp_path / "m")) == LAYERS


@pytest.mark.parametrize("line", ["[1]", '{"file": 3}', '{"file": [1]}', "3", "null", '{"bytes": 3}', "[" * 5000])
def test_a_journal_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    source = write_experts(tmp_path / "source", 4)
    partial = leave_partial(source, tmp_path / "m", monkeypatch)
    with (partial / JOURNAL).open("a") as stream:
        stream.write(f"{line}\n")
    before = contents(partial)
    with pytest.raises(ConfigError, match=r"m\.partial: its conversion\.jsonl is damaged: remove the folder"):
        convert_folder(source, tmp_path / "m")
    assert contents(partial) == before


@pytest.mark.parametrize("what", ["record", "header", "dense part", "note"])
def test_kept_files_that_changed_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Of the same size, with other bytes, or with checksums that are not there."""
    source = write_experts(tmp_path / "source", 4)
    partial = leave_partial(source, tmp_path / "m", monkeypatch)
    if what == "note":
        text = (partial / JOURNAL).read_text()
        (partial / JOURNAL).write_text(text.replace('"checksums"', '"checks"'))
    else:
        file = "model.safetensors" if what == "dense part" else "experts-00000.bank"
        flip_bit(partial / file, {"record": HEADER_BYTES + 99, "header": 5, "dense part": -1}[what])
    written = count_records(monkeypatch)
    done = convert_folder(source, tmp_path / "m")
    assert len(written) == EXPERTS * {"record": 3, "header": 3, "dense part": 2, "note": 4}[what]
    assert (done.kept_bytes % done.bank_bytes > 0) or what == "note"
    monkeypatch.undo()
    convert_folder(source, tmp_path / "other")
    assert contents(tmp_path / "m") == contents(tmp_path / "other")


def test_killed_before_the_journal_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has its name and is complete: it loads and converts."""
    source = write_qwen3(tmp_path / "source")
    unlink = Path.unlink

    def unlink_or_not(path: Path, missing_ok: bool = False) -> None:
        if path == tmp_path / "m" / JOURNAL:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_or_not)
        with pytest.raises(KeyboardInterrupt):
            convert_folder(source, tmp_path / "m")
    assert (tmp_path / "m" / JOURNAL).exists()
    assert len(banks_of(tmp_path / "m")) == LAYERS
    convert_folder(tmp_path / "m", tmp_path / "again")
    assert contents(tmp_path / "again").keys() == contents(tmp_path / "m").keys() - {JOURNAL}


def test_names_of_destinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_qwen3(tmp_path / "source")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="the destination is an empty name"):
        Conversion(scan_any(open_any(source)), "")
    assert convert_folder(source, Path("x/../y")).path == "x/../y"
    assert [path.name for path in Path().iterdir()] == ["y"]
    Path("real").mkdir()
    Path("link").symlink_to("real")
    convert_folder(source, Path("link"))
    assert Path("link").is_symlink()
    assert Path("real", MANIFEST).exists()
    assert sorted(path.name for path in Path().iterdir()) == ["link", "real", "y"]


@pytest.mark.parametrize("to", [[], ["--to", "compressed-tensors"]])
def test_terminated(tmp_path: Path, to: list[str]) -> None:
    """SIGTERM: what must not stay is removed."""
    source = write_experts(tmp_path / "source", 8)
    process = start_slowly(source, tmp_path / "m", *to)
    partial = tmp_path / "m.partial"
    while not partial.exists() or not any(partial.glob("*.safetensors" if to else "*.bank")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert {path.name for path in tmp_path.iterdir()} <= ({"source"} if to else {"source", "m.partial"})


def test_killed_while_it_writes_for_others(tmp_path: Path) -> None:
    source = write_experts(tmp_path / "source", 8)
    process = start_slowly(source, tmp_path / "m", "--to", "compressed-tensors")
    partial = tmp_path / "m.partial"
    while not (partial / "model.safetensors").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "m.partial"}
    with pytest.raises(ConfigError, match="writes was compressed-tensors, now is freetoken-records"):
        convert_folder(source, tmp_path / "m")
    export_folder(source, tmp_path / "m")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "m"}


def test_two_at_once(tmp_path: Path) -> None:
    source = write_experts(tmp_path / "source", 8)
    process = start_slowly(source, tmp_path / "m")
    wait_for_banks(tmp_path / "m.partial", 1, process)
    with pytest.raises(ConfigError, match="another process is converting into it"):
        convert_folder(source, tmp_path / "m")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert (tmp_path / "m" / MANIFEST).exists()


# --- around it -------------------------------------------------------------------------------------------------------


def test_the_dense_part_of_gguf_needs_names(tmp_path: Path) -> None:
    from freetoken.checkpoint.gguf import GgufCheckpoint

    found = scan_any(open_any(write_qwen3(tmp_path / "source")))
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf", found.checkpoint.config, None, found.checkpoint.tensors)
    with pytest.raises(UnsupportedError, match="GGUF"):
        Conversion(type(found)(checkpoint, found.quantization, found.groups, ()), tmp_path / "m")


def test_converting_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from freetoken.cli import main; status = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys(); sys.exit(status)"
    )
    source = write_qwen3(tmp_path / "source")
    command = [sys.executable, "-c", code, "convert", source, tmp_path / "m", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert (found["layers"], found["experts"], found["kept_bytes"]) == (LAYERS, LAYERS * EXPERTS, 0)


def test_tensors_are_dealt_out_in_order() -> None:
    tensors = [DenseTensor(str(n), "U8", (n << 30,), lambda: iter(())) for n in (1, 3, 6, 2, 2, 2)]
    dealt = write.deal_out(tensors)
    assert [[t.nbytes >> 30 for t in file] for file in dealt.values()] == [[1, 3], [6], [2, 2], [2]]
    assert all(re.fullmatch(r"model-0000\d-of-00004\.safetensors", name) for name in dealt)
    assert list(write.deal_out([])) == ["model.safetensors"]
