"""The record: where everything lies, the round trip, shards that add up, and the golden file that holds every byte."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freetoken import formats
from freetoken.errors import FormatError
from freetoken.formats import Format, Matrix
from freetoken.formats.record import LAYOUT_VERSION, Expert, RecordLayout, shard_bounds
from freetoken.kernels import reference
from tests.support.experts import make_expert

FORMATS = pytest.mark.parametrize("fmt", [formats.get(name) for name in formats.names()], ids=formats.names())
GOLDEN = Path(__file__).parents[1] / "data" / "record_v1.json"


def shape_of(fmt: Format) -> tuple[int, int]:
    """(H, I), ragged where the format allows it."""
    return {2: (22, 42), 128: (140, 396)}.get(fmt.block, (3 * fmt.block, 5 * fmt.block))


def layout_of(fmt: Format, bias: bool = False) -> RecordLayout:
    return RecordLayout(fmt, *shape_of(fmt), bias)


def expert_of(fmt: Format, bias: bool = False) -> Expert:
    return make_expert(fmt, *shape_of(fmt), bias=bias)


def pack(layout: RecordLayout, expert: Expert, fill: int = 0xFF) -> NDArray[np.uint8]:
    out = np.full(layout.nbytes, fill, np.uint8)
    layout.pack(expert, out)
    return out


def check_same_matrix(a: Matrix, b: Matrix) -> None:
    assert a.format is b.format
    np.testing.assert_array_equal(a.codes, b.codes)
    if a.scales is None or b.scales is None:
        assert a.scales is b.scales
    else:
        np.testing.assert_array_equal(a.scales, b.scales)
    assert a.global_scale == b.global_scale
    assert a.divides == b.divides


def check_same_expert(a: Expert, b: Expert) -> None:
    for name in ("gate", "up", "down"):
        check_same_matrix(getattr(a, name), getattr(b, name))
        bias, other = getattr(a, f"{name}_bias"), getattr(b, f"{name}_bias")
        if bias is None:
            assert other is None
        else:
            np.testing.assert_array_equal(bias, other)


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@FORMATS
def test_sections_follow_each_other_on_64_bytes(fmt: Format, bias: bool) -> None:
    layout = layout_of(fmt, bias)
    names = ["gate_up", "gate_up_globals", "gate_up_bias", "down", "down_globals", "down_bias"]
    assert list(layout.sections) == names
    offsets = [offset for offset, _ in layout.sections.values()]
    ends = [offset + size for offset, size in layout.sections.values()]
    assert offsets[0] == 0
    assert all(offset % 64 == 0 for offset in offsets)
    assert layout.nbytes % 64 == 0
    for end, following in pairwise([*zip(offsets, ends, strict=True), (layout.nbytes, layout.nbytes)]):
        assert 0 <= following[0] - end[1] < 64
    assert (layout.sections["gate_up_bias"][1] > 0) == bias


@FORMATS
def test_gate_and_up_tiles_alternate(fmt: Format) -> None:
    layout, expert = layout_of(fmt), expert_of(fmt)
    record, size = pack(layout, expert), fmt.tile_bytes(layout.hidden)
    tiles = record[: layout.sections["gate_up"][1]].reshape(-1, size)
    np.testing.assert_array_equal(tiles[0::2], fmt.pack(expert.gate).reshape(-1, size))
    np.testing.assert_array_equal(tiles[1::2], fmt.pack(expert.up).reshape(-1, size))


@pytest.mark.parametrize("bias", [False, True])
@FORMATS
def test_pack_sets_every_byte(fmt: Format, bias: bool) -> None:
    layout, expert = layout_of(fmt, bias), expert_of(fmt, bias)
    np.testing.assert_array_equal(pack(layout, expert, 0xFF), pack(layout, expert, 0x00))


def test_biases_are_padded_to_tiles() -> None:
    fmt = formats.get("bf16")
    layout, expert = layout_of(fmt, True), expert_of(fmt, True)
    record = pack(layout, expert)
    offset, size = layout.sections["gate_up_bias"]
    values = record[offset : offset + size].view(np.float32).reshape(2, 48)  # 42 rows
    np.testing.assert_array_equal(values[:, :42], [expert.gate_bias, expert.up_bias])
    assert not values[:, 42:].any()
    offset, size = layout.sections["down_bias"]
    values = record[offset : offset + size].view(np.float32)
    assert values.shape == (32,)  # 22 rows
    np.testing.assert_array_equal(values[:22], expert.down_bias)


@pytest.mark.parametrize(
    ("first", "second", "divides", "mode"),
    [(1.0, 1.0, False, 0), (1.0, 1.0, True, 0), (0.5, 1.0, False, 1), (1.0, 0.25, True, 2), (3e-5, 7e8, False, 1)],
)
def test_globals_section(first: float, second: float, divides: bool, mode: int) -> None:
    fmt = formats.get("nvfp4")
    layout, plain = layout_of(fmt), expert_of(fmt)
    expert = Expert(
        replace(plain.gate, global_scale=first, divides=divides),
        replace(plain.up, global_scale=second, divides=divides),
        replace(plain.down, global_scale=2.0, divides=divides),
    )
    record = pack(layout, expert)
    at = layout.sections["gate_up_globals"][0]
    np.testing.assert_array_equal(record[at : at + 8].view(np.float32), np.float32([first, second]))
    assert record[at + 8 : at + 12].view(np.int32)[0] == mode
    at = layout.sections["down_globals"][0]
    np.testing.assert_array_equal(record[at : at + 4].view(np.float32), np.float32([2.0]))
    assert record[at + 8 : at + 12].view(np.int32)[0] == (2 if divides else 1)


# --- round trip -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@FORMATS
def test_round_trip(fmt: Format, bias: bool) -> None:
    layout, expert = layout_of(fmt, bias), expert_of(fmt, bias)
    check_same_expert(layout.unpack(pack(layout, expert)), expert)


@pytest.mark.parametrize("divides", [False, True])
def test_round_trip_of_globals(divides: bool) -> None:
    fmt = formats.get("nvfp4")
    layout, plain = layout_of(fmt), expert_of(fmt)
    gate, up, down = (
        replace(matrix, global_scale=value, divides=divides)
        for matrix, value in ((plain.gate, 0.5), (plain.up, 1.0), (plain.down, 1536.0))
    )
    check_same_expert(layout.unpack(pack(layout, Expert(gate, up, down))), Expert(gate, up, down))


def test_a_global_of_one_has_no_direction() -> None:
    """Multiplying and dividing by one are the same: the record says neither, the values stay."""
    fmt = formats.get("nvfp4")
    layout, plain = layout_of(fmt), expert_of(fmt)
    ones = [replace(m, global_scale=1.0, divides=True) for m in (plain.gate, plain.up, plain.down)]
    back = layout.unpack(pack(layout, Expert(*ones)))
    for matrix, wanted in zip((back.gate, back.up, back.down), ones, strict=True):
        np.testing.assert_array_equal(matrix.dequantize(), wanted.dequantize())


# --- what is refused --------------------------------------------------------------------------------------------------


@FORMATS
def test_widths_are_refused_by_name(fmt: Format) -> None:
    good, bad = 2 * fmt.block, 2 * fmt.block + 1
    with pytest.raises(FormatError, match=f"{fmt.name}: the hidden size is {bad}"):
        RecordLayout(fmt, bad, good)
    with pytest.raises(FormatError, match=f"{fmt.name}: the expert width is {bad}"):
        RecordLayout(fmt, good, bad)
    with pytest.raises(FormatError, match="the expert width is 0"):
        RecordLayout(fmt, good, 0)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_wrong_shapes_are_refused(name: str) -> None:
    fmt = formats.get("bf16")
    layout, expert = layout_of(fmt), expert_of(fmt)
    matrix = getattr(expert, name)
    for wrong in (matrix.rows(0, matrix.shape[0] - 1), matrix.columns(0, matrix.shape[1] - 2)):
        with pytest.raises(FormatError, match=f"{name} is bf16") as caught:
            pack(layout, replace(expert, **{name: wrong}))
        assert caught.value.shape == wrong.shape


def test_another_format_is_refused() -> None:
    nvfp4, mxfp4 = formats.get("nvfp4"), formats.get("mxfp4")
    with pytest.raises(FormatError, match=r"gate is nvfp4 \(64, 64\), expected mxfp4 \(64, 64\)"):
        pack(RecordLayout(mxfp4, 64, 64), make_expert(nvfp4, 64, 64))


def test_gate_and_up_agree_in_direction() -> None:
    fmt = formats.get("nvfp4")
    expert = expert_of(fmt)
    with pytest.raises(FormatError, match="differ in direction"):
        pack(layout_of(fmt), replace(expert, up=replace(expert.up, divides=True)))


@pytest.mark.parametrize("name", ["gate_bias", "up_bias", "down_bias"])
def test_biases_agree_with_the_layout(name: str) -> None:
    fmt = formats.get("bf16")
    whole = expert_of(fmt, True)
    with pytest.raises(FormatError, match=f"{name} is None, expected"):
        pack(layout_of(fmt, True), replace(whole, **{name: None}))
    with pytest.raises(FormatError, match=rf"{name} is \(1,\), expected"):
        pack(layout_of(fmt, True), replace(whole, **{name: np.ones(1, np.float32)}))
    bare = expert_of(fmt)
    with pytest.raises(FormatError, match=rf"{name} is \(\d+,\), expected None"):
        pack(layout_of(fmt), replace(bare, **{name: getattr(whole, name)}))


# --- shards -----------------------------------------------------------------------------------------------------------


def test_shard_bounds_of_2880_in_four() -> None:
    bounds = shard_bounds(formats.get("mxfp4"), 2880, 4)
    assert [(b - a) // 32 for a, b in bounds] == [23, 23, 22, 22]
    assert bounds[0] == (0, 736)


@FORMATS
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_shard_bounds_cover_the_width(fmt: Format, parts: int) -> None:
    width = 29 * fmt.granule
    bounds = shard_bounds(fmt, width, parts)
    assert [a for a, _ in bounds] == [0, *(b for _, b in bounds[:-1])]
    assert bounds[-1][1] == width
    sizes = [b - a for a, b in bounds]
    assert all(size % fmt.granule == 0 for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= fmt.granule


def test_the_last_shard_may_end_inside_a_tile() -> None:
    assert shard_bounds(formats.get("bf16"), 88, 2) == [(0, 48), (48, 88)]
    assert shard_bounds(formats.get("bf16"), 88, 6)[-1] == (80, 88)


@FORMATS
def test_shard_bounds_refused(fmt: Format) -> None:
    width = 2 * fmt.granule
    for parts in (3, 0, -1):
        with pytest.raises(FormatError, match=f"{fmt.name}: a width of {width} .* {parts}"):
            shard_bounds(fmt, width, parts)
    with pytest.raises(FormatError, match=f"{fmt.name}: the expert width is {width + 1}"):
        shard_bounds(fmt, width + 1, 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inner", "parts"), [(640, 3), (2880, 4), (768, 5), (88, 2)])
@FORMATS
def test_shards_are_experts_that_add_up(fmt: Format, inner: int, parts: int, bias: bool) -> None:
    if inner % fmt.width_step or inner <= (parts - 1) * fmt.granule:
        with pytest.raises(FormatError):
            shard_bounds(fmt, inner, parts)
        return
    hidden = 2 * fmt.block
    expert = make_expert(fmt, hidden, inner, bias=bias)
    x = np.random.default_rng(0).standard_normal((3, hidden))
    total = np.zeros((3, hidden))
    for start, stop in shard_bounds(fmt, inner, parts):
        layout = RecordLayout(fmt, hidden, stop - start, bias)
        shard = layout.unpack(pack(layout, expert.shard(start, stop)))
        assert shard.gate.shape == (stop - start, hidden)
        if bias:
            assert shard.down_bias is not None
            assert shard.down_bias.any() == (start == 0), "the down bias is in shard 0 only"
        total += reference.run_expert(shard, x)
    np.testing.assert_allclose(total, reference.run_expert(expert, x), rtol=1e-11, atol=1e-12)


def test_2880_makes_uneven_shards_and_a_granule_is_not_cut() -> None:
    expert = make_expert(formats.get("mxfp4"), 32, 2880)
    widths = [expert.shard(a, b).gate.shape[0] for a, b in shard_bounds(formats.get("mxfp4"), 2880, 4)]
    assert widths == [736, 736, 704, 704]
    with pytest.raises(FormatError, match="cut a block"):
        expert.shard(0, 720)


# --- the golden file --------------------------------------------------------------------------------------------------


def numbers(count: int, salt: int) -> NDArray[np.int64]:
    """0 <= numbers < 65536 that look random, by integer arithmetic alone: the same in every version of everything."""
    i = np.arange(count, dtype=np.int64) + 1000 * salt
    return (i * 40503 + (i >> 3) * 977 + salt * 12345 >> 4) & 0xFFFF


def golden_matrix(fmt: Format, n: int, k: int, salt: int) -> Matrix:
    """Codes and scales of any value below NaN; a global of the size of nvfp4's."""
    codes = (numbers(n * k * fmt.bits // 8, salt) & 0xFF).astype(np.uint8).reshape(n, -1)
    if fmt.bits == 16:
        codes = (codes.view(np.uint16) & 0xBFFF).view(np.uint8)
    if fmt.name == "fp8_block":
        codes -= codes & 0x7F == 0x7F
    if fmt.scale_dtype is None:
        return Matrix(fmt, codes)
    mask = {1: 0x3F, 2: 0x3FFF, 4: 0x3FFF}[fmt.scale_bytes]
    scales = (numbers(n * -(-k // fmt.block), salt + 1) & mask).astype(fmt.scale_dtype).reshape(n, -1)
    if fmt.scale_bytes == 4:
        scales = scales << 16 | scales
    return Matrix(fmt, codes, scales, 1 / (1 << salt) if fmt.name == "nvfp4" else 1.0)


def golden_record(fmt: Format) -> tuple[RecordLayout, NDArray[np.uint8]]:
    """A small record with biases; bf16's has ragged tiles, fp8_block's ragged blocks."""
    shape = {2: (6, 18), 128: (20, 132)}.get(fmt.block, (fmt.block, 2 * fmt.block))
    layout = RecordLayout(fmt, *shape, bias=True)
    hidden, inner = layout.hidden, layout.intermediate
    biases = [(numbers(n, 8) / 4096).astype(np.float32) for n in (inner, hidden)]
    expert = Expert(
        golden_matrix(fmt, inner, hidden, 1),
        golden_matrix(fmt, inner, hidden, 3),
        golden_matrix(fmt, hidden, inner, 5),
        biases[0],
        -biases[0],
        biases[1],
    )
    return layout, pack(layout, expert)


def golden_entry(fmt: Format) -> dict[str, Any]:
    layout, record = golden_record(fmt)
    return {
        "hidden": layout.hidden,
        "intermediate": layout.intermediate,
        "sections": {name: list(place) for name, place in layout.sections.items()},
        "sha256": hashlib.sha256(record.tobytes()).hexdigest(),
        "base64": base64.b64encode(record.tobytes()).decode(),
    }


def write_golden() -> None:
    """Run by hand, once for each format and version: adds what is missing and never changes what is there.

    python -c "from tests.formats.test_record import write_golden; write_golden()"
    """
    held = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {"layout_version": LAYOUT_VERSION, "records": {}}
    for name in formats.names():
        held["records"].setdefault(name, golden_entry(formats.get(name)))
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(held, indent=1) + "\n")


@FORMATS
def test_golden_record(fmt: Format) -> None:
    """A byte that moves needs a new LAYOUT_VERSION and a new file; a new format needs `write_golden`."""
    assert LAYOUT_VERSION == 1
    held = json.loads(GOLDEN.read_text())
    assert held["layout_version"] == LAYOUT_VERSION
    wanted = held["records"][fmt.name]
    layout, record = golden_record(fmt)
    assert (layout.hidden, layout.intermediate) == (wanted["hidden"], wanted["intermediate"])
    assert {name: list(place) for name, place in layout.sections.items()} == wanted["sections"]
    bytes_held = base64.b64decode(wanted["base64"])
    assert hashlib.sha256(bytes_held).hexdigest() == wanted["sha256"], "the golden file itself is damaged"
    assert len(bytes_held) == layout.nbytes
    np.testing.assert_array_equal(record, np.frombuffer(bytes_held, np.uint8))


@FORMATS
def test_golden_record_is_read_back(fmt: Format) -> None:
    layout, _ = golden_record(fmt)
    held = base64.b64decode(json.loads(GOLDEN.read_text())["records"][fmt.name]["base64"])
    expert = layout.unpack(np.frombuffer(held, np.uint8))
    assert fmt.find_bad(expert.gate) is None
    check_same_matrix(expert.up, golden_matrix(fmt, layout.intermediate, layout.hidden, 3))
    np.testing.assert_array_equal(pack(layout, expert), np.frombuffer(held, np.uint8))
