"""GGUF headers that lie in every way, split files, and experts that come out of blocks exactly."""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from freetoken import formats
from freetoken.checkpoint.gguf import GgufCheckpoint, open_gguf, read_header, read_token
from freetoken.checkpoint.gguf_experts import scan_gguf
from freetoken.checkpoint.inspect import inspect
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.errors import CheckpointError, FreeTokenError, UnsupportedError
from freetoken.formats import Matrix
from tests.support.checkpoints import EXPERTS, LAYERS, qwen3_config, write_qwen3
from tests.support.gguf import EXACT, Tensors, gguf_tensors, write_gguf
from tests.support.oracle import Weights, dequantize_folder, take_expert

HELD = {name: kind for name, kind in EXACT.items() if name in formats.names()}
U8, I8, BOOL, U32, F32, STRING, ARRAY, U64 = 0, 1, 7, 4, 6, 8, 9, 10


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return dequantize_folder(write_qwen3(tmp_path_factory.mktemp("plain") / "m"))


def write(file: Path, weights: Weights, kind: Any = Type.BF16, merged: bool = False, parts: int = 0) -> Path:
    return write_gguf(file, qwen3_config(), gguf_tensors(qwen3_config(), weights, kind, merged), parts=parts)


# --- headers ---------------------------------------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(name: str = "a", dims: tuple[int, ...] = (32, 2), kind: int = 8, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def value(key: str | bytes, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def u32(key: str, number: int) -> bytes:
    return value(key, U32, struct.pack("<I", number))


def array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + raw


def file_of(
    path: Path,
    entries: list[bytes],
    values: list[bytes] | None = None,
    data: int = 128,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    magic: bytes = b"GGUF",
) -> Path:
    """A file by hand: counts are what it claims, data the bytes after the aligned header."""
    values = values or []
    n = (len(entries), len(values)) if counts is None else counts
    head = magic + struct.pack("<IQQ", version, *n) + b"".join(values) + b"".join(entries)
    path.write_bytes(head + bytes(-len(head) % 32 + data))
    return path


def check_refused(file: Path, *words: str, read: Callable[[Path], Any] = read_header) -> FreeTokenError:
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        read(file)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(file), *words):
        assert word in message
    return caught.value


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_by_hand(tmp_path: Path, version: int) -> None:
    values = [
        value("a", BOOL, b"\1"),
        value("b", F32, struct.pack("<f", 0.5)),
        value("c", STRING, text("word")),
        value("d", ARRAY, array(STRING, 2, text("x") + text(""))),
        value("e", ARRAY, array(U32, 3, bytes(12))),
    ]
    header = read_header(file_of(tmp_path / "m.gguf", [entry(), entry("b", (3,), 0, 96)], values, version=version))
    assert {key: header.metadata[key] for key in "abc"} == {"a": True, "b": 0.5, "c": "word"}
    assert [header.metadata[key].length for key in "de"] == [2, 3]
    a, b = header.tensors["a"], header.tensors["b"]
    assert (a.dtype, a.shape, a.nbytes) == ("Q8_0", (2, 32), 68)
    assert (b.dtype, b.shape, b.nbytes, b.offset - a.offset) == ("F32", (3,), 12, 96)


HUGE = 2**63 + 5
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "other magic": ({"entries": [entry()], "magic": b"GGML"}, "no GGUF file"),
    "version 1": ({"entries": [entry()], "version": 1}, "GGUF version 1"),
    "big-endian": ({"entries": [entry()], "version": 3 << 24}, "big-endian"),
    "more tensors": ({"entries": [entry()], "counts": (HUGE, 0)}, ""),
    "more metadata": ({"entries": [entry()], "counts": (1, HUGE)}, ""),
    "type of metadata": ({"entries": [], "values": [value("k", 13, b"")]}, "'k' has type 13"),
    "long key": ({"entries": [], "values": [struct.pack("<Q", HUGE)]}, "name of"),
    "long string": ({"entries": [], "values": [value("k", STRING, struct.pack("<Q", HUGE))]}, "name of"),
    "string to the end": ({"entries": [], "values": [value("k", STRING, struct.pack("<Q", 999))]}, "truncated"),
    "not UTF-8": ({"entries": [], "values": [value("k", STRING, text(b"\xff\xfe"))]}, "not UTF-8"),
    "same key": ({"entries": [], "values": [u32("k", 1), u32("k", 1)]}, "'k' is there twice"),
    "long array": ({"entries": [], "values": [value("k", ARRAY, array(U64, HUGE))]}, "truncated"),
    "many strings": ({"entries": [], "values": [value("k", ARRAY, array(STRING, HUGE))]}, "more than the file"),
    "array of arrays": ({"entries": [], "values": [value("k", ARRAY, array(ARRAY, 1))]}, "array of arrays"),
    "array of nothing": ({"entries": [], "values": [value("k", ARRAY, array(99, 1))]}, "type 99"),
    "alignment 0": ({"entries": [], "values": [u32("general.alignment", 0)]}, "power of two"),
    "alignment 48": ({"entries": [], "values": [u32("general.alignment", 48)]}, "power of two"),
    "alignment text": ({"entries": [], "values": [value("general.alignment", STRING, text("a"))]}, "power of two"),
    "alignment 2**31": ({"entries": [entry()], "values": [u32("general.alignment", 2**31)]}, "truncated"),
    "five dimensions": ({"entries": [entry(dims=(32, 1, 1, 1, 1))]}, "5 dimensions"),
    "many dimensions": ({"entries": [text("a") + struct.pack("<I", 2**32 - 1)]}, "dimensions"),
    "unknown type": ({"entries": [entry(kind=4)]}, "'a' has type 4"),
    "half a block": ({"entries": [entry(dims=(33, 2))]}, "multiples of 32"),
    "offset unaligned": ({"entries": [entry(offset=8)]}, "multiple of 32"),
    "beyond the end": ({"entries": [entry(offset=96)]}, "truncated"),
    "far beyond the end": ({"entries": [entry(offset=2**64 - 32)]}, "truncated"),
    "size overflows": ({"entries": [entry(dims=(2**62, 2**62, 4, 4))]}, "truncated"),
    "same tensor": ({"entries": [entry(), entry()]}, "'a' is there twice"),
    "overlap": ({"entries": [entry(), entry("b", offset=32)]}, "overlap"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(tmp_path: Path, lie: str) -> None:
    arguments, words = LIES[lie]
    file = file_of(tmp_path / "m.gguf", **arguments)
    tracemalloc.start()
    check_refused(file, words)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20, "messages and traces, not what was claimed"


@pytest.mark.parametrize("size", [0, 3, 23])
def test_a_file_of_few_bytes(tmp_path: Path, size: int) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF"[:size] + bytes(max(0, size - 4)))
    check_refused(file, "no GGUF file")


def test_cut_anywhere(tmp_path: Path, weights: Weights) -> None:
    whole = write(tmp_path / "m.gguf", weights).read_bytes()
    file = tmp_path / "cut.gguf"
    for size in [*range(24, 4000, 7), *range(4000, len(whole) - 32, 4001), len(whole) - 32]:
        file.write_bytes(whole[:size])
        check_refused(file)


def test_mutated_headers_end_in_our_errors(tmp_path: Path, weights: Weights) -> None:
    """Bytes and numbers of the first 4 KiB, which hold all of the header, changed at random."""
    whole = write(tmp_path / "m.gguf", weights, Type.Q8_0).read_bytes()
    file, rng = tmp_path / "mutant.gguf", np.random.default_rng(0)
    messages = []
    for _ in range(600):
        mutant = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(0, 4000))
            new = rng.choice([b"\0", b"\xff", b"\x7f", struct.pack("<Q", 2**63), struct.pack("<I", 2**31 - 1), b"\1"])
            mutant[at : at + len(new)] = new
        file.write_bytes(mutant)
        try:
            scan_any(open_any(file))
        except FreeTokenError as error:
            messages.append(str(error))
    assert len(messages) > 300
    assert not [message for message in messages if "\n" in message]


def test_tokens_are_found(tmp_path: Path) -> None:
    words = [text(word) for word in ("<pad>", "", "wörd")]
    values = [
        value("general.architecture", STRING, text("other")),
        value("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, b"".join(words))),
    ]
    checkpoint = open_gguf(file_of(tmp_path / "m.gguf", [], values))
    assert [read_token(checkpoint, n) for n in (0, 1, 2, 3, -1)] == ["<pad>", "", "wörd", None, None]


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 3])
def test_a_split_model_opens_by_any_part(tmp_path: Path, weights: Weights, number: int) -> None:
    whole = open_gguf(write(tmp_path / "m.gguf", weights))
    first = write(tmp_path / "s.gguf", weights, parts=3)
    split = open_gguf(first.with_name(f"s-{number:05}-of-00003.gguf"))
    assert (split.path, split.config) == (first, whole.config)
    assert len({info.file for info in split.tensors.values()}) == 3
    assert split.tensors.keys() == whole.tensors.keys()
    for name in whole.tensors:
        np.testing.assert_array_equal(split.read_bytes(name), whole.read_bytes(name))


def test_a_split_model_that_is_not_whole(tmp_path: Path, weights: Weights) -> None:
    first = write(tmp_path / "s.gguf", weights, parts=3)
    second, third = (first.with_name(f"s-0000{n}-of-00003.gguf") for n in (2, 3))
    raw = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"s-00003-of-00003.gguf: its header does not say .* part 3 of 3"):
        open_gguf(first)
    third.write_bytes(raw)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"s-00002-of-00003.gguf is missing: the model is split into 3"):
        open_gguf(first)
    alone = first.rename(tmp_path / "alone.gguf")
    check_refused(alone, "one of 1 files", "one of 3", read=open_gguf)


def test_a_folder_of_gguf_files(tmp_path: Path, weights: Weights) -> None:
    write(tmp_path / "m.gguf", weights)
    with pytest.raises(CheckpointError, match=r"name the one to load: m\.gguf"):
        open_any(tmp_path)


# --- metadata --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, "3 blocks, tensors are there for 2"),
        ({"num_hidden_layers": 2**31 - 1}, "blocks"),
        ({"num_attention_heads": 8}, "width of all heads is 128"),
        ({"num_key_value_heads": 1}, "width of key heads is 16"),
        ({"hidden_size": 128}, "hidden size is 128"),
        ({"num_experts_per_tok": 0}, "expert_used_count is 0"),
        ({"rms_norm_eps": float("nan")}, "layer_norm_rms_epsilon is nan"),
    ],
)
def test_metadata_that_contradict_the_tensors(
    tmp_path: Path, weights: Weights, changes: dict[str, Any], words: str
) -> None:
    tensors = gguf_tensors(qwen3_config(), weights)
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(**changes), tensors)
    check_refused(file, words, read=open_gguf)


@pytest.mark.parametrize(
    ("key", "number", "words"),
    [
        ("qwen3moe.rope.scaling.attn_factor", 2, "'qwen3moe.rope.scaling.attn_factor' is not supported"),
        ("qwen3moe.rope.dimension_count", 8, "rotated width of a head is 8, the tensors that it is 16"),
    ],
)
def test_metadata_that_would_change_the_model(
    tmp_path: Path, weights: Weights, key: str, number: int, words: str
) -> None:
    config = qwen3_config(rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    file = write_gguf(tmp_path / "m.gguf", config, gguf_tensors(config, weights), more={key: number})
    check_refused(file, words, read=open_gguf)


def test_another_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    look = inspect(tmp_path / "m.gguf")
    assert not look.loads
    assert "architecture 'llama' is not supported in GGUF files; supported: gpt-oss, qwen3moe" in look.why


# --- experts ---------------------------------------------------------------------------------------------------------


def check_experts(checkpoint: GgufCheckpoint, tensors: Tensors, merged: bool = False) -> None:
    """Every expert has exactly the values that gguf finds in its rows."""
    for group in scan_gguf(checkpoint).groups:
        assert (group.n_experts, group.hidden, group.intermediate, group.bias) == (EXPERTS, 64, 32, False)
        for e in range(EXPERTS):
            expert = group.read(e)
            for name in ("gate", "up", "down"):
                stem = "gate_up" if merged and name != "down" else name
                kind, rows = tensors[f"blk.{group.layer}.ffn_{stem}_exps.weight"]
                wanted = gguf.dequantize(rows[e], kind)
                if stem == "gate_up":
                    wanted = wanted[:32] if name == "gate" else wanted[32:]
                np.testing.assert_array_equal(getattr(expert, name).dequantize(), wanted)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_blocks_are_taken_as_they_are(tmp_path: Path, weights: Weights, name: str, merged: bool) -> None:
    tensors = gguf_tensors(qwen3_config(), weights, HELD[name], merged)
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", qwen3_config(), tensors))
    found = scan_gguf(checkpoint)
    assert {group.format.name for group in found.groups} == {name}
    assert len(found.groups) == LAYERS
    check_experts(checkpoint, tensors, merged)


@pytest.mark.parametrize("kind", [Type.F16, Type.F32])
def test_16_and_32_bits_are_rounded_to_bf16(tmp_path: Path, weights: Weights, kind: Type) -> None:
    """The weights are bf16 from the start, and large enough for fp16."""
    tensors = gguf_tensors(qwen3_config(), weights, {"gate": kind, "up": Type.BF16, "down": kind})
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", qwen3_config(), tensors))
    assert {group.format.name for group in scan_gguf(checkpoint).groups} == {"bf16"}
    check_experts(checkpoint, tensors)


def test_q8_0_is_what_safetensors_become(tmp_path: Path, weights: Weights) -> None:
    group = scan_gguf(open_gguf(write(tmp_path / "m.gguf", weights, Type.Q8_0))).groups[1]
    for e in range(EXPERTS):
        expert, plain = group.read(e), take_expert(weights, group.prefix, e)
        for name in ("gate", "up", "down"):
            values = plain[name]
            assert values is not None
            ours: Matrix = formats.get("q8_0").quantize(values.float().numpy())
            np.testing.assert_array_equal(getattr(expert, name).codes, ours.codes)
            np.testing.assert_array_equal(getattr(expert, name).scales, ours.scales)


def test_other_types_are_refused_with_an_offer(tmp_path: Path, weights: Weights) -> None:
    tensors = gguf_tensors(qwen3_config(), weights, {"gate": Type.Q5_1, "up": Type.BF16, "down": Type.Q8_0})
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(), tensors)
    check_refused(
        file,
        "'blk.0.ffn_gate_exps.weight' is Q5_1",
        "BF16, MXFP4",
        "expert_format='q8_0'",
        "--expert-format q8_0",
        read=lambda f: scan_any(open_any(f)),
    )
    assert "Q5_1" in inspect(file).why
    look = inspect(file, formats.get("q8_0"))
    assert look.loads, look.why
    for group in scan_gguf(open_gguf(file), formats.get("q8_0")).groups:
        expert = group.read(2)
        for name in ("gate", "up", "down"):
            kind, rows = tensors[f"blk.{group.layer}.ffn_{name}_exps.weight"]
            wanted = formats.get("q8_0").quantize(gguf.dequantize(rows[2], kind))
            np.testing.assert_array_equal(getattr(expert, name).codes, wanted.codes)


def test_types_that_differ_are_refused_with_an_offer(tmp_path: Path, weights: Weights) -> None:
    file = write(tmp_path / "m.gguf", weights, {"gate": Type.Q8_0, "up": Type.Q8_0, "down": Type.BF16})
    words = ("ffn_down_exps.weight", "gate Q8_0, up Q8_0, down BF16", "re-quantize")
    check_refused(file, *words, read=lambda f: scan_any(open_any(f)))
    assert inspect(file, formats.get("mxfp4")).loads


def k_quants(kind: Type) -> tuple[dict[str, Any], Tensors]:
    """A model wide enough for blocks of 256, with K-quants of random bytes and small scales as experts."""
    rng = np.random.default_rng(0)
    config = qwen3_config(
        hidden_size=256, moe_intermediate_size=256, num_hidden_layers=1, num_experts=2, num_attention_heads=2
    )
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = rng.integers(0, 256, (2, 256, block_bytes), np.uint8)
    scale = np.array([0.01], np.float16).view(np.uint8)
    for at in {Type.Q4_K: (0, 2), Type.Q6_K: (208,), Type.Q8_K: ()}[kind]:
        rows[:, :, at : at + 2] = scale
    tensors: Tensors = {f"blk.0.ffn_{name}_exps.weight": (kind, rows) for name in ("gate", "up", "down")}
    for name, shape in (("token_embd", (96, 256)), ("blk.0.attn_q", (32, 256)), ("blk.0.attn_k", (32, 256))):
        tensors[f"{name}.weight"] = Type.F32, np.zeros(shape, np.float32)
    return config, tensors


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K])
def test_k_quants_are_requantized(tmp_path: Path, kind: Type) -> None:
    config, tensors = k_quants(kind)
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", config, tensors))
    with pytest.raises(CheckpointError, match=f"ffn_gate_exps.weight' is {kind.name}.*expert_format='q8_0'"):
        scan_gguf(checkpoint)
    (group,) = scan_gguf(checkpoint, formats.get("q8_0")).groups
    rows = tensors["blk.0.ffn_up_exps.weight"][1]
    values = gguf.dequantize(rows[1], kind)
    assert np.abs(group.read(1).up.dequantize() - values).max() <= np.abs(values).max() / 200


def test_what_gguf_cannot_dequantize_is_refused(tmp_path: Path) -> None:
    config, tensors = k_quants(Type.Q8_K)
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", config, tensors))
    with pytest.raises(UnsupportedError, match=r"ffn_gate_exps.weight' is Q8_K, which the gguf package cannot"):
        scan_gguf(checkpoint, formats.get("q8_0"))


@pytest.mark.parametrize(
    ("kind", "at", "raw", "words"),
    [
        (Type.Q8_0, 34, b"\0\x7c", "row 0 has a NaN or infinite block scale"),
        (Type.MXFP4, 17, b"\xff", "row 0"),
        (Type.BF16, 2, b"\xc0\x7f", "row 0 holds a NaN"),
        (Type.F32, 4, b"\0\0\x80\x7f", "row 0 holds a NaN or infinite"),
        (Type.F16, 2, b"\0\xfc", "row 0 holds a NaN or infinite"),
    ],
)
def test_what_is_no_number_is_refused(
    tmp_path: Path, weights: Weights, kind: Type, at: int, raw: bytes, words: str
) -> None:
    file = write(tmp_path / "m.gguf", weights, kind)
    info = open_gguf(file).tensors["blk.1.ffn_up_exps.weight"]
    data = bytearray(file.read_bytes())
    data[info.offset + at : info.offset + at + len(raw)] = raw
    file.write_bytes(data)
    group = scan_gguf(open_gguf(file)).groups[1]
    check_refused(file, "'blk.1.ffn_up_exps.weight' expert 0", words, read=lambda _: group.read(0))
    group.read(1)


def rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def reshape(name: str, shape: tuple[int, ...]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: (Type.F32, np.zeros(shape, np.float32))})


UP, DOWN = "blk.1.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(UP), "incomplete: block 1 has down, gate only"),
        (rename(UP, "blk.1.ffn_up_exps.scale"), "'blk.1.ffn_up_exps.scale' (BF16 [4, 32, 64]) is claimed by nothing"),
        (reshape(UP, (4, 32, 32)), f"'{UP}' has shape [4, 32, 32], expected [4, 32, 64]"),
        (reshape(UP, (3, 32, 64)), f"'{UP}' has shape [3, 32, 64], expected [4, 32, 64]"),
        (reshape(DOWN, (64, 32)), f"'{DOWN}' has shape [64, 32], expected [experts"),
        (reshape("blk.1.ffn_up_exps.bias", (4, 32)), "only up of block 1 have a bias"),
    ],
)
def test_experts_that_are_not_whole(
    tmp_path: Path, weights: Weights, change: Callable[[Tensors], object], words: str
) -> None:
    tensors = gguf_tensors(qwen3_config(), weights)
    change(tensors)
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(), tensors)
    check_refused(file, words, read=lambda f: scan_any(open_any(f)))


def test_a_block_without_experts(tmp_path: Path, weights: Weights) -> None:
    tensors = {n: t for n, t in gguf_tensors(qwen3_config(), weights).items() if not re.match(r"blk\.1\.ffn.*exps", n)}
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(), tensors)
    check_refused(file, "block 1 has no experts", read=lambda f: scan_any(open_any(f)))
