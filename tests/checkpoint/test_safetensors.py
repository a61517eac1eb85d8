"""Headers that lie in every way, folders that lack something, and reads that must be exact to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from freetoken.checkpoint.safetensors import DTYPES, open_checkpoint, read_header, reuse_buffers
from freetoken.errors import CheckpointError
from tests.support.checkpoints import Edit, Tensors, write_file, write_folder, write_raw, write_sharded

A, B = "a.weight", "b.weight"


def two_tensors() -> Tensors:
    rng = np.random.default_rng(0)
    return {A: ("F32", rng.standard_normal((4, 6)).astype(np.float32)), B: ("I8", rng.integers(-9, 9, (8,), np.int8))}


def check_refused(file: Path, *words: str) -> CheckpointError:
    """The header is refused in one line that names the file and holds all the words."""
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(file), *words):
        assert word in message
    assert caught.value.file == str(file)  # type: ignore[attr-defined]
    return caught.value


def test_every_dtype_of_a_real_writer_is_read_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dtypes = {
        "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
        "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
        "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
    }  # fmt: skip
    assert set(dtypes) == set(DTYPES)
    tensors = {}
    for name, dtype in dtypes.items():
        raw = torch.randint(0, 2 if name == "BOOL" else 256, (3, 5, 2 * dtype.itemsize), dtype=torch.uint8)
        tensors[name] = raw.view(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(dtypes)
    for name, tensor in tensors.items():
        info = checkpoint.tensors[name]
        assert info.dtype == name
        assert info.shape == (3, 5, 2)
        whole = checkpoint.read(name)
        assert whole.shape == (3, 5, 2)
        assert whole.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
        for index in range(3):
            part = checkpoint.read(name, index)
            assert part.shape == (5, 2)
            assert part.tobytes() == tensor[index].contiguous().view(torch.uint8).numpy().tobytes()


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    tensors = two_tensors()
    one = open_checkpoint(write_folder(tmp_path / "one", {}, tensors))
    two = open_checkpoint(write_sharded(tmp_path / "two", {}, tensors))
    assert {info.file.name for info in two.tensors.values()} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    for name, (_, array) in tensors.items():
        np.testing.assert_array_equal(one.read(name), array)
        np.testing.assert_array_equal(two.read(name), array)


def test_a_scalar_and_an_empty_tensor(tmp_path: Path) -> None:
    tensors: Tensors = {"scalar": ("F32", np.array(2.5, np.float32)), "none": ("U8", np.zeros((0, 3), np.uint8))}
    checkpoint = open_checkpoint(write_folder(tmp_path / "f", {}, tensors))
    assert checkpoint.read("scalar") == np.float32(2.5)
    assert checkpoint.read("none").shape == (0, 3)


@pytest.mark.parametrize("keep", [0, 7, 8, 20], ids="{} bytes".format)
def test_a_file_that_ends_in_its_header(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    write_file(file, two_tensors())
    file.write_bytes(file.read_bytes()[:keep])
    check_refused(file, "truncated", "download it again")


def test_a_file_that_ends_in_its_data(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_file(file, two_tensors())
    file.write_bytes(file.read_bytes()[:-1])
    error = check_refused(file, repr(B), "truncated")
    assert error.tensor == B  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [3, 1 << 40, (1 << 64) - 1], ids=["short", "1 TB", "2**64-1"])
def test_a_wrong_header_length(tmp_path: Path, length: int) -> None:
    file = tmp_path / "model.safetensors"
    write_raw(file, b'{"a": 1}' * 10, b"", length)
    check_refused(file)


def entry(**changes: Any) -> Edit:
    def edit(header: dict[str, Any]) -> None:
        header[A] = header[A] | changes

    return edit


def replace(value: Any) -> Edit:
    def edit(header: dict[str, Any]) -> None:
        header[A] = value

    return edit


BAD_ENTRIES = {
    "dtype of no name": (entry(dtype="F7"), "'F7'"),
    "dtype is a list": (entry(dtype=["F32"]), "dtype ['F32']"),
    "dtype is absent": (entry(dtype=None), "dtype None"),
    "shape is a number": (entry(shape=24), "shape 24"),
    "shape is negative": (entry(shape=[-4, -6]), "shape [-4, -6]"),
    "shape holds true": (entry(shape=[True, 24]), "shape [True, 24]"),
    "shape holds a float": (entry(shape=[4.0, 6]), "shape [4.0, 6]"),
    "shape is another": (entry(shape=[4, 7]), "takes 112 bytes, but its data has 96"),
    "shape is astronomical": (entry(shape=[2**62, 2**62, 2**62]), "but its data has 96"),
    "dtype is wider": (entry(dtype="F64"), "takes 192 bytes, but its data has 96"),
    "offsets descend": (entry(data_offsets=[96, 0]), "data_offsets [96, 0]"),
    "three offsets": (entry(data_offsets=[0, 96, 96]), "data_offsets [0, 96, 96]"),
    "offsets are strings": (entry(data_offsets=["0", "96"]), "data_offsets ['0', '96']"),
    "offsets before the data": (entry(data_offsets=[-96, 0]), "data_offsets [-96, 0]"),
    "offsets past the end": (entry(data_offsets=[1000, 1096]), "truncated"),
    "no description": (replace(None), "no description"),
    "a description that is a list": (replace([1]), "no description"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_a_header_entry_that_cannot_be(tmp_path: Path, case: str) -> None:
    edit, words = BAD_ENTRIES[case]
    file = tmp_path / "model.safetensors"
    write_file(file, two_tensors(), edit)
    error = check_refused(file, repr(A), words)
    assert error.tensor == A  # type: ignore[attr-defined]


def test_overlapping_tensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"

    def edit(header: dict[str, Any]) -> None:
        header[B]["data_offsets"] = [95, 103]

    write_file(file, two_tensors(), edit)
    check_refused(file, repr(A), repr(B), "overlap")


@pytest.mark.parametrize(
    "header",
    [b"{", b"[]", b"null", b"\xff\xfe", b"[" * 200_000, b'{"a": ' + b"9" * 5000 + b"}", b""],
    ids=["cut off", "list", "null", "not UTF-8", "deep", "huge number", "empty"],
)
def test_a_header_that_is_no_json_object(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    write_raw(file, header, b"")
    check_refused(file)


def change_index(folder: Path, change: dict[str, Any]) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"].update(change)
    index.write_text(json.dumps(content))


def test_an_index_that_names_an_absent_file(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "f", {}, two_tensors())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors \(tensor 'b.weight' and others\)"):
        open_checkpoint(folder)


def test_an_index_that_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "f", {}, two_tensors())
    change_index(folder, {"c.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"'c.weight' is in model-00001-of-00002.safetensors") as caught:
        open_checkpoint(folder)
    assert caught.value.tensor == "c.weight"  # type: ignore[attr-defined]


def test_an_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "f", {}, two_tensors())
    change_index(folder, {A: "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"'a.weight' is in model-00002-of-00002.safetensors"):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """transformers would read one and we might read the other.

    The same goes for two whole checkpoints, below.
    """
    tensors = two_tensors()
    folder = write_sharded(tmp_path / "f", {}, tensors)
    stale: NDArray[Any] = np.zeros((4, 6), np.float32)
    write_file(folder / "model-00002-of-00002.safetensors", {A: ("F32", stale), B: tensors[B]})
    with pytest.raises(CheckpointError, match=r"is in both model-00001.* and model-00002"):
        open_checkpoint(folder)


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "f", {}, two_tensors())
    write_file(folder / "model.safetensors", two_tensors())
    with pytest.raises(CheckpointError, match="two checkpoints in one folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\0b"])
def test_an_index_that_leaves_its_folder(tmp_path: Path, name: str) -> None:
    folder = write_sharded(tmp_path / "f", {}, two_tensors())
    write_file(tmp_path / "secret.safetensors", two_tensors())
    change_index(folder, {A: name})
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[", "3"])
def test_an_index_of_another_kind(tmp_path: Path, content: str) -> None:
    folder = write_sharded(tmp_path / "f", {}, two_tensors())
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(folder)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf is a file; expected a folder"):
        open_checkpoint(file)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")


def test_an_empty_folder_and_one_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"neither model\.safetensors nor .* found config\.json, pytorch_model\.bin"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "hf_quant_config.json"])
def test_a_file_that_is_a_folder(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "f", {}, two_tensors(), sidecar={})
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a": 1', b"[]", b"\xff"], ids=["deep", "cut", "list", "binary"])
def test_a_config_that_is_no_json_object(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_folder(tmp_path / "f", {}, two_tensors(), sidecar={})
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(folder)


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", {}, two_tensors())
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"ended while tensor '{B}'"):
        checkpoint.read(B)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"tensor '{A}' cannot be read"):
        checkpoint.read(A)


def test_buffers_are_reused_from_block_to_block(tmp_path: Path) -> None:
    """Within a block nothing is overwritten, and outside one every read has memory of its own."""
    rng = np.random.default_rng(0)
    tensors: Tensors = {f"t{n}": ("U8", rng.integers(0, 256, 1000 + n, np.uint8)) for n in range(3)}
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", {}, tensors))
    places = []
    for _ in range(3):  # the first finds out how much is wanted
        with reuse_buffers():
            found = [checkpoint.read(name) for name in tensors]
            for array, (_, expected) in zip(found, tensors.values(), strict=True):
                np.testing.assert_array_equal(array, expected)
            places.append([array.ctypes.data for array in found])
    assert places[1] == places[2] != places[0]
    outside = [checkpoint.read("t0"), checkpoint.read("t0")]
    assert not np.shares_memory(*outside)
    assert not {array.ctypes.data for array in outside} & set(places[2])
