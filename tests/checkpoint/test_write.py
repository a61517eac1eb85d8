"""Writing a checkpoint folder: aligned, in several files, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from freetoken.checkpoint.journal import Journal, new_folder
from freetoken.checkpoint.records import JOURNAL
from freetoken.checkpoint.safetensors import open_checkpoint, read_header
from freetoken.checkpoint.write import NewTensor, TensorFiles, side_files
from freetoken.errors import CapacityError, ConfigError
from tests.support.checkpoints import write_qwen3

TENSORS = [
    NewTensor("odd", "U8", (3, 5)),
    NewTensor("wide", "F32", (7,)),
    NewTensor("none", "F32", (0, 4)),
    NewTensor("half", "BF16", (3, 3)),
    NewTensor("stack", "BF16", (4, 2, 3)),
    NewTensor("one", "F32", ()),
]


def data_of(tensor: NewTensor) -> np.ndarray[Any, Any]:
    types = {"U8": np.uint8, "BF16": np.uint16, "F32": np.float32}
    rng = np.random.default_rng(len(tensor.name))
    return rng.integers(0, 200, tensor.shape).astype(types[tensor.dtype])


def fill(files: TensorFiles) -> None:
    for tensor in reversed(TENSORS):
        array = data_of(tensor)
        if tensor.name == "stack":
            for index in (2, 0, 3, 1):
                files.put(tensor.name, array[index], index)
        else:
            files.put(tensor.name, array)
    files.close()


@pytest.mark.parametrize("file_bytes", [1, 40, 1 << 30])
def test_what_is_put_comes_back(tmp_path: Path, file_bytes: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    fill(TensorFiles(tmp_path, TENSORS, file_bytes))
    found = open_checkpoint(tmp_path)
    assert found.tensors.keys() == {t.name for t in TENSORS}
    for tensor in TENSORS:
        np.testing.assert_array_equal(found.read(tensor.name), data_of(tensor))
        assert found.tensors[tensor.name].offset % tensor.item_bytes == 0, "aligned"
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (file_bytes > 100)
    assert (tmp_path / "model.safetensors.index.json").exists() == (len(files) > 1)
    for file in files:  # in the eyes of the format's own library, too
        with safe_open(file, "np") as stream:
            assert set(stream.keys()) == set(read_header(file))
            assert stream.metadata() == {"format": "pt"}
        assert sum(t.nbytes for t in read_header(file).values()) <= max(file_bytes, 48)


def test_a_tensor_is_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.checkpoint.write._PIECE", 7)
    source = open_checkpoint(write_qwen3(tmp_path / "source"))
    info = source.tensors["lm_head.weight"]
    files = TensorFiles(tmp_path, [NewTensor("copy", info.dtype, info.shape)])
    files.copy("copy", info)
    files.close()
    copied = read_header(tmp_path / "model.safetensors")["copy"]
    raw = (tmp_path / "model.safetensors").read_bytes()[copied.offset :]
    assert raw == source.read_bytes("lm_head.weight").tobytes()


def test_what_does_not_fit_or_is_missing(tmp_path: Path) -> None:
    files = TensorFiles(tmp_path, TENSORS)
    for name, array in (("odd", np.zeros((5, 3), np.uint8)), ("wide", np.zeros(7, np.uint16))):
        with pytest.raises(ValueError, match=f"{name}: .* is not"):
            files.put(name, array)
    with pytest.raises(AssertionError, match=r"never or twice put: .*'odd'"):
        files.close()


def refuse(number: int) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def write(place: Path) -> None:
    with new_folder(place, 1000, "tests") as folder:
        assert not place.exists() or not any(place.iterdir())
        fill(TensorFiles(folder, TENSORS))


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "a" / "b" / "m")
    finally:
        os.umask(before)
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == ["m"]
    assert (tmp_path / "a" / "b" / "m").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "a" / "b" / "m" / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_an_empty_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    write(Path("m"))
    assert (tmp_path / "m" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["a file", "a full folder", "a dangling link"])
def test_a_place_that_is_taken(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "m"
    if kind == "a file":
        place.write_text("x")
    elif kind == "a full folder":
        place.mkdir()
        (place / "x").write_text("x")
    else:
        place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="m exists already"):
        write(place)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_place_that_is_taken_meanwhile(tmp_path: Path) -> None:
    def write_late() -> None:
        with new_folder(tmp_path / "m", 1, "tests") as folder:
            (folder / "x").write_text("ours")
            (tmp_path / "m").mkdir()
            (tmp_path / "m" / "x").write_text("theirs")

    with pytest.raises(ConfigError, match="m exists already"):
        write_late()
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m" / "x").read_text() == "theirs"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
def test_nothing_stays_of_a_failure(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "m", 1, "tests") as folder:
            (folder / "x").write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=999))
    with pytest.raises(CapacityError, match=r"are to be written to .* the disk has") as caught:
        write(tmp_path / "m")
    assert (caught.value.needed, caught.value.available) == (1000, 999)  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, CapacityError), (errno.EROFS, ConfigError)])
def test_a_disk_that_fills_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    monkeypatch.setattr(os, "pwrite", refuse(number))
    with pytest.raises(error, match=r"cannot be written: .*; nothing of it stays"):
        write(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: real(fd, view[:3], offset))
    write(tmp_path / "m")
    monkeypatch.undo()
    (tmp_path / "m" / "config.json").write_text("{}")
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "m").read("wide"), data_of(TENSORS[1]))


def test_which_files_go_along(tmp_path: Path) -> None:
    kept = ["tokenizer.json", "chat_template.jinja", "modeling_x.py", "LICENSE", "generation_config.json"]
    left = ["model.safetensors.index.json", "pytorch_model.bin", "x.gguf", ".hidden", "recipe.yaml"]
    for name in kept + left:
        (tmp_path / name).write_text(json.dumps({}))
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "modeling_x.Tokenizer"}}')
    kept.append("tokenizer_config.json")
    assert sorted(path.name for path in side_files(tmp_path)) == sorted(kept)


def test_code_that_no_config_names_stays(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "__init__.py").write_text("")
    assert [path.name for path in side_files(tmp_path)] == ["config.json"]


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    """And nothing else: another kind's, a stranger's, and that of a run that is at work."""
    partial = tmp_path / "m.partial"
    with Journal(partial, {"writes": "tests"}):
        (partial / "half").write_text("half")
        with pytest.raises(ConfigError, match="another process is converting into it"):
            write(tmp_path / "m")
    write(tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert not {"half", JOURNAL} & {p.name for p in (tmp_path / "m").iterdir()}
    for text, words in (
        ('{"writes": "else"}\n', "another conversion .writes was else, now is tests"),
        (None, "not left"),
    ):
        partial.mkdir()
        (partial / "kept").write_text("")
        if text is not None:
            (partial / JOURNAL).write_text(text)
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        with pytest.raises(ConfigError, match=words):
            write(tmp_path / "m")
        assert (partial / "kept").exists()
        shutil.rmtree(partial)


def test_a_link_to_an_empty_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "m").symlink_to("real")
    write(tmp_path / "m")
    assert (tmp_path / "m").is_symlink()
    assert (tmp_path / "real" / "model.safetensors").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "real"]
