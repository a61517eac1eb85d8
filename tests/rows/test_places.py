"""Where a table lies is told by headers and sizes, and every contradiction is named before a row is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from freetoken.checkpoint.safetensors import open_checkpoint
from freetoken.errors import CheckpointError, FormatError, FreeTokenError
from freetoken.rows import DiskRowTable, RowFile, RowTable, SafetensorsRows
from tests.support.rows import random_rows

N, WIDTH, SHARDS = 1200, 160, 12
"""Twelve shards, so that their names are not in the order of their numbers."""
NAME = "model.ngram_embedding.shard_{i}.weight"
SCALE = "model.ngram_embedding.weight_scale"


def e4m3(rows: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(rows).view(torch.float8_e4m3fn)


@pytest.fixture
def rows() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return random_rows(np.random.default_rng(0), N, WIDTH)


def write(folder: Path, rows: np.ndarray[Any, Any], **more: torch.Tensor) -> Path:
    """A checkpoint of two files; tensors of other names lie before and between."""
    (folder / "config.json").write_text("{}")
    parts = np.split(rows, SHARDS)
    tensors = {NAME.format(i=number): e4m3(part.copy()) for number, part in enumerate(parts)}
    tensors |= {"a": torch.zeros(3, dtype=torch.uint8), SCALE: torch.tensor(0.25)} | more
    where = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: t for name, t in tensors.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def open_table(folder: Path, name: str = NAME, **more: Any) -> DiskRowTable:
    return DiskRowTable.open(
        SafetensorsRows.of(folder, name), **{"rows": N, "row_bytes": WIDTH, "dtype": "F8_E4M3", "scale": SCALE, **more}
    )


def test_shards_of_a_checkpoint(tmp_path: Path, rows: Any) -> None:
    """Numbered through, in the order of their numbers."""
    with open_table(write(tmp_path, rows)) as table:
        ids = np.random.default_rng(1).permutation(N)
        np.testing.assert_array_equal(table.gather(ids), rows[ids])
        np.testing.assert_array_equal(table.gather_scales(ids[:5]), np.full(5, 0.25, np.float32))
        assert table.width == WIDTH


def test_one_tensor_of_one_file(tmp_path: Path, rows: Any) -> None:
    save_file({"t": e4m3(rows).reshape(N, 4, 40)}, tmp_path / "f")
    with open_table(tmp_path / "f", "t", scale=2.0) as table:
        np.testing.assert_array_equal(table.gather([N - 1, 0]), rows[[N - 1, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("column", [False, True])
def test_a_scale_for_each_row(tmp_path: Path, rows: Any, dtype: torch.dtype, sharded: bool, column: bool) -> None:
    scales = torch.rand(N).add(0.1).to(dtype)
    parts = [part.reshape(-1, 1) if column else part for part in scales.split(N // SHARDS if sharded else N)]
    name = "s_{i}" if sharded else "s"
    more = {name.format(i=number): part.clone() for number, part in enumerate(parts)}
    ids = np.random.default_rng(2).integers(0, N, (3, 16))
    with open_table(write(tmp_path, rows, **more), scale=name) as table:
        out, found = np.zeros((3, 16, WIDTH), np.uint8), np.zeros((3, 16), np.float32)
        table.stage(ids, out, found)()
        np.testing.assert_array_equal(out, rows[ids])
        np.testing.assert_array_equal(found, scales.float().numpy()[ids])
        of_rows = table.scale
        assert isinstance(of_rows, RowTable)
    with pytest.raises(FreeTokenError, match="was closed"):
        of_rows.gather([0])


def remove(folder: Path, name: str) -> dict[str, Any]:
    """The headers of a folder without one tensor."""
    return {known: info for known, info in open_checkpoint(folder).tensors.items() if known != name}


def test_a_shard_that_is_missing(tmp_path: Path, rows: Any) -> None:
    tensors = remove(write(tmp_path, rows), NAME.format(i=7))
    with pytest.raises(CheckpointError, match=r"tensor 'model.ngram_embedding.shard_7.weight' is missing") as caught:
        DiskRowTable.open(SafetensorsRows(tensors, NAME), N, WIDTH, "F8_E4M3")
    assert caught.value.facts["tensor"] == NAME.format(i=7)
    last = remove(tmp_path, NAME.format(i=SHARDS - 1))
    with pytest.raises(CheckpointError, match=r"in 11 part\(s\), which is 1100 rows of 160; expected 1200 rows"):
        DiskRowTable.open(SafetensorsRows(last, NAME), N, WIDTH, "F8_E4M3")


@pytest.mark.parametrize(("more", "message"), [
    ({"name": "no.shard_{i}.weight"}, r"'no.shard_0.weight' is missing; .* 'model.ngram_embedding.shard_0.weight'"),
    ({"name": "no"}, "tensor 'no' is missing; the files have 17 tensors, of which none end alike"),
    ({"dtype": "U8"}, r"is F8_E4M3 \[100, 160\], expected rows of 160 bytes of U8"),
    ({"row_bytes": 80, "rows": 2 * N}, r"is F8_E4M3 \[100, 160\], expected rows of 80 bytes"),
    ({"rows": N + 1}, "expected 1201 rows, 192160 bytes"),
    ({"scale": "a"}, "scale 'a' is U8, expected one of F32, BF16, F16"),
    ({"scale": "nan"}, "has the scale nan"),
    ({"scale": "few"}, "which is 100 rows of 4; expected 1200 rows"),
    ({"scale": "two"}, r"tensor 'two' is F32 \[1200, 2\], expected rows of 4 bytes of F32"),
    ({"scale": "gone"}, "tensor 'gone' is missing"),
])  # fmt: skip
def test_what_contradicts_itself(tmp_path: Path, rows: Any, more: dict[str, Any], message: str) -> None:
    others = {"nan": torch.tensor(float("nan")), "few": torch.ones(100), "two": torch.ones(N, 2)}
    with pytest.raises(FreeTokenError, match=message):
        open_table(write(tmp_path, rows, **others), **more)


def test_scales_that_are_no_scales(tmp_path: Path, rows: Any) -> None:
    folder = write(tmp_path, rows)
    with open_table(folder, scale=None) as other, pytest.raises(FormatError, match="expected one number for each of"):
        open_table(folder, scale=other)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1001), (1001, None), (-1, 5), (500, 501), (0, -1)])
def test_files_that_are_shorter(tmp_path: Path, offset: int, nbytes: int | None) -> None:
    (tmp_path / "f").write_bytes(bytes(1000))
    with pytest.raises(CheckpointError, match=f"f has 1000 bytes, expected .* from byte {offset} on"):
        RowFile(tmp_path / "f", offset, nbytes).find()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            DiskRowTable.open([RowFile(path)], 1, 1, "U8")


def test_rows_that_go_on_in_the_next_file_are_refused_unless_said(tmp_path: Path) -> None:
    """As `split -b` cuts; one row lies in three files."""
    whole = random_rows(np.random.default_rng(3), 6, 100)
    files = []
    for number, (start, stop) in enumerate([(0, 150), (150, 150), (150, 190), (190, 600)]):
        (tmp_path / f"{number}").write_bytes(whole.tobytes()[start:stop])
        files.append(RowFile(tmp_path / f"{number}"))
    with pytest.raises(CheckpointError, match="has 150 bytes of rows, expected whole rows of 100: pass cut=True"):
        DiskRowTable.open(files, 6, 100, "U8")
    with DiskRowTable.open(files, 6, 100, "U8", cut=True) as table:
        np.testing.assert_array_equal(table.gather([1, 5, 1, 0, 1]), whole[[1, 5, 1, 0, 1]])
