"""Reading converted folders: what was written comes back, and nothing about them is believed unseen."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken import formats
from freetoken.banks import Bank
from freetoken.checkpoint.inspect import inspect
from freetoken.checkpoint.load import fill_banks
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.checkpoint.records import HEADER_BYTES, MANIFEST, RecordExperts, require_shareable
from freetoken.errors import CheckpointError, ConfigError
from freetoken.formats.record import LAYOUT_VERSION
from tests.support.checkpoints import EXPERTS, LAYERS, bf16, write_file, write_qwen3
from tests.support.converted import contents, convert_folder, edit_manifest, flip_bit

PREFIX = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole converted folder in nvfp4: tests change a copy."""
    folder = tmp_path_factory.mktemp("good")
    convert_folder(write_qwen3(folder / "source", "modelopt"), folder / "m")
    return folder / "m"


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "m"))


def groups_of(folder: Path) -> tuple[RecordExperts, ...]:
    groups = scan_any(open_any(folder)).groups
    assert all(isinstance(group, RecordExperts) for group in groups)
    return groups  # type: ignore[return-value]


def banks_of(groups: tuple[RecordExperts, ...], fmt: str | None = None, shared: bool = False) -> list[Bank]:
    target = None if fmt is None else formats.get(fmt)
    banks = [Bank(g.layout(target), g.n_experts, g.map_records() if shared else None) for g in groups]
    fill_banks(zip(banks, groups, strict=True), 2)
    return banks


def check_refused(folder: Path, *words: str) -> CheckpointError:
    """By open or scan, in one line with these words; `inspect` refuses it or says that it does not load."""
    with pytest.raises(CheckpointError) as caught:
        scan_any(open_any(folder))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    try:
        said = inspect(folder).why
    except CheckpointError as error:
        said = str(error)
    assert said == message
    return caught.value


def test_banks_are_the_files(good: Path) -> None:
    """Read or mapped, a bank holds the file's bytes; a mapped one is read-only and on 64 bytes."""
    groups = groups_of(good)
    read, mapped = banks_of(groups), banks_of(groups, shared=True)
    assert len(groups) == LAYERS
    for group, own, shared in zip(groups, read, mapped, strict=True):
        data = np.fromfile(group.info.file, np.uint8)[HEADER_BYTES:].reshape(EXPERTS, -1)
        np.testing.assert_array_equal(own.records, data)
        np.testing.assert_array_equal(shared.records, data)
        assert own.missing == shared.missing == []
        assert (own.shared, shared.shared) == (False, True)
        assert own.records.flags.writeable
        assert not shared.records.flags.writeable
        assert shared.records.ctypes.data % 64 == 0


def test_a_bank_of_the_same_format_is_read_without_conversion(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.formats.record.RecordLayout.pack", lambda *args: pytest.fail("packed"))
    monkeypatch.setattr("freetoken.formats.record.RecordLayout.unpack", lambda *args: pytest.fail("unpacked"))
    for shared in (False, True):
        assert all(not bank.missing for bank in banks_of(groups_of(good), shared=shared))


def test_another_format_is_made_from_records(tmp_path: Path, good: Path) -> None:
    again = write_qwen3(tmp_path / "source", "modelopt")
    plain = scan_any(open_any(again)).groups
    banks = [Bank(group.layout(formats.get("q8_0")), group.n_experts) for group in plain]
    fill_banks(zip(banks, plain, strict=True), 1)
    for one, other in zip(banks, banks_of(groups_of(good), "q8_0"), strict=True):
        np.testing.assert_array_equal(one.records, other.records)


def test_inspect_says_what_it_is(good: Path) -> None:
    found = inspect(good)
    assert found.loads
    assert found.formats == ("nvfp4 (records)",)
    assert found.quantization == "modelopt (nvfp4)"
    assert found.bank_bytes == sum(f.stat().st_size - HEADER_BYTES for f in good.glob("*.bank"))
    assert inspect(good, formats.get("bf16")).formats == ("nvfp4 (records), to become bf16",)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2000, 12345, -1])
@pytest.mark.parametrize("how", ["read", "converted", "shared"])
def test_a_flipped_bit_of_a_record(folder: Path, at: int, how: str) -> None:
    file = folder / "experts-00001.bank"
    group = groups_of(folder)[1]
    position = HEADER_BYTES + at if at >= 0 else file.stat().st_size - 1
    flip_bit(file, position, at % 8)
    expert = (position - HEADER_BYTES) // group.layout().nbytes
    with pytest.raises(CheckpointError, match=rf"experts-00001\.bank: the record of expert {expert} has checksum") as e:
        banks_of(groups_of(folder), "q8_0" if how == "converted" else None, how == "shared")
    assert e.value.file == str(file)  # type: ignore[attr-defined]


@pytest.mark.parametrize("at", [0, 9, 100, 300, 2000, HEADER_BYTES - 1])
def test_a_flipped_bit_of_a_header(folder: Path, at: int) -> None:
    flip_bit(folder / "experts-00000.bank", at, at % 8)
    check_refused(folder, "experts-00000.bank: its header is not the one of model.layers.0.mlp.experts")


def test_a_flipped_bit_of_the_manifest(folder: Path) -> None:
    """Anywhere: it is refused, some record is, or nothing that counts has changed."""
    whole = (folder / MANIFEST).read_bytes()
    groups = groups_of(folder)
    wanted = [(g.prefix, g.format, g.info, g.checksums) for g in groups]
    refused = 0
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 7
        (folder / MANIFEST).write_bytes(changed)
        try:
            found = groups_of(folder)
            banks_of(found)
        except CheckpointError:
            refused += 1
        else:
            assert [(g.prefix, g.format, g.info, g.checksums) for g in found] == wanted, at
    assert refused > len(whole) // 2


def test_a_truncated_file(folder: Path) -> None:
    file = folder / "experts-00001.bank"
    data = file.read_bytes()
    for changed in (data[:-1], data[:HEADER_BYTES], data[:100], b"", data + b"\0"):
        file.chmod(0o644)
        file.write_bytes(changed)
        check_refused(folder, f"{file} has {len(changed)} bytes", "it is not whole", "ft convert")


def test_a_file_cut_after_it_was_opened(folder: Path) -> None:
    group = groups_of(folder)[0]
    file = group.info.file
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"experts-00000\.bank ended while"):
        banks_of((group,))
    with pytest.raises(CheckpointError, match=r"experts-00000\.bank cannot be mapped"):
        group.map_records()


def test_a_missing_layer(folder: Path) -> None:
    (folder / "experts-00000.bank").unlink()
    check_refused(folder, "experts-00000.bank cannot be read: No such file")


def test_a_pipe_in_the_place_of_a_file(folder: Path) -> None:
    (folder / "experts-00000.bank").unlink()
    os.mkfifo(folder / "experts-00000.bank")
    check_refused(folder, "experts-00000.bank cannot be read: it is a pipe or a device")


def test_layers_that_changed_places(folder: Path) -> None:
    one, other = folder / "experts-00000.bank", folder / "experts-00001.bank"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)
    check_refused(folder, "experts-00000.bank: its header is not the one of model.layers.0.mlp.experts")


def first(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["layers"][0].update(changes)


def top(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.update(changes)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], tuple[str, ...]]] = {
    "a newer record": (top(layout_version=LAYOUT_VERSION + 1), (f"record layout has version {LAYOUT_VERSION + 1}",
                       f"reads version {LAYOUT_VERSION}", "again with `ft convert`")),
    "an older record": (top(layout_version=0), ("record layout has version 0", "again with `ft convert`")),
    "a newer manifest": (top(version=2), ("manifest has version 2", "reads version 1")),
    "no version": (lambda m: m.pop("layout_version"), ("record layout has version None",)),
    "another kind": (top(kind="x"), ("its kind is 'x'",)),
    "another checksum": (top(checksum="md5"), ("its checksum is 'md5'",)),
    "other bytes": (top(bank_bytes=5), ("it says 5 bytes",)),
    "no layers": (top(layers=[]), ("no list of layers",)),
    "layers of words": (top(layers=["x"]), ("layer 0 is 'x'",)),
    "a path": (first(file="../x.bank"), ("layer 0 names the file '../x.bank'",)),
    "an absolute path": (first(file="/etc/x.bank"), ("names the file '/etc/x.bank'",)),
    "another file": (first(file="model.safetensors"), ("names the file 'model.safetensors'",)),
    "no file": (first(file=None), ("names the file None",)),
    "a file of two layers": (first(file="experts-00001.bank"), ("header is not the one",)),
    "no prefix": (first(prefix=""), ("has the prefix ''",)),
    "another prefix": (first(prefix="model.layers.7.mlp.experts"), ("header is not the one",)),
    "an unknown format": (first(format="int3"), ("has format 'int3'", "known formats: bf16")),
    "a format of a list": (first(format=["nvfp4"]), ("has format ['nvfp4']",)),
    "another format": (first(format="q8_0"), ("has record_bytes", "expected")),
    "no experts": (first(experts=0), ("has experts 0",)),
    "experts of a word": (first(experts="4"), ("has experts '4'",)),
    "true experts": (first(experts=True), ("has experts True",)),
    "too many experts": (first(experts=5), ("no list of 5 checksums",)),
    "a huge width": (first(intermediate=2**40), ("has intermediate",)),
    "a width of no block": (first(intermediate=33), ("contradicts itself", "33")),
    "bias of a number": (first(bias=0), ("has bias 0",)),
    "bias": (first(bias=True), ("has record_bytes",)),
    "another record": (first(record_bytes=64), ("has record_bytes 64",)),
    "no checksums": (first(checksums=None), ("no list of 4 checksums",)),
    "checksums of words": (first(checksums=["x"] * 4), ("contradicts itself",)),
    "checksums of numbers": (first(checksums=[1] * 4), ("contradicts itself",)),
}  # fmt: skip


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_is_wrong(folder: Path, case: str) -> None:
    edit, words = MANIFESTS[case]
    edit_manifest(folder, edit)
    check_refused(folder, str(folder), *words)


def test_a_layer_twice(folder: Path) -> None:
    edit_manifest(folder, lambda m: m["layers"].append(m["layers"][0]))
    check_refused(folder, "layer 2 (experts-00000.bank, 'model.layers.0.mlp.experts') is there twice")


def test_a_manifest_that_is_no_json(folder: Path) -> None:
    for text in ("", "[]", "{", '"x"'):
        (folder / MANIFEST).write_text(text)
        check_refused(folder, MANIFEST, "convert again with `ft convert`")


def test_a_manifest_that_is_gone(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    check_refused(folder, "holds converted experts, but freetoken.json is gone", "convert again with `ft convert`")


def test_a_bank_that_is_gone(folder: Path) -> None:
    (folder / "experts-00001.bank").unlink()
    check_refused(folder, "experts-00001.bank cannot be read: No such file", "convert again with `ft convert`")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_experts", 5, "num_experts 5, model.layers.0.mlp.experts has 4 experts"),
        ("moe_intermediate_size", 64, "moe_intermediate_size 64, model.layers.0.mlp.experts has experts of width 32"),
        ("hidden_size", 32, "has hidden size 64, config.json says hidden_size 32"),
    ],
)
def test_a_config_that_contradicts(folder: Path, key: str, value: int, words: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    found = inspect(folder)
    assert not found.loads
    assert words in found.why


def test_experts_beside_banks(folder: Path) -> None:
    """Whose would count?"""
    name = f"{PREFIX}.0.up_proj.weight"
    write_file(folder / "model.safetensors", {name: bf16(np.zeros((32, 64)))})
    check_refused(folder, f"tensor {name!r} is an expert's", "are in banks")
    write_file(folder / "model.safetensors", {f"{PREFIX}.records": bf16(np.zeros((32, 64)))})
    check_refused(folder, "is there twice")


def test_the_dense_part_is_checked_as_ever(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    check_refused(folder, "model.safetensors", "truncated")
    file.unlink()
    check_refused(folder, "neither model.safetensors nor")


def test_an_unfinished_conversion_does_not_open(tmp_path: Path) -> None:
    for name, text in (("m.partial", "{}\n"), ("moved", '{"writes": "freetoken-records", "source": "/a"}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "conversion.jsonl").write_text(text)
        check_refused(tmp_path / name, "was not finished: run the same `ft convert` again")


def test_a_stranger_of_that_name_is_no_conversion(tmp_path: Path) -> None:
    source = write_qwen3(tmp_path / "source")
    (source / "conversion.jsonl").write_text('{"writes": "letters"}\n')
    assert inspect(source).loads


# --- sharing ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_shared(tmp_path: Path, good: Path) -> None:
    converted = scan_any(open_any(good))
    require_shareable(converted, None)
    require_shareable(converted, formats.get("nvfp4"))
    with pytest.raises(ConfigError, match=r"holds them as nvfp4: .*`ft convert .* DST --expert-format q8_0`"):
        require_shareable(converted, formats.get("q8_0"))
    plain = scan_any(open_any(write_qwen3(tmp_path / "m")))
    with pytest.raises(ConfigError, match=r"as other tools write them: .* --expert-format bf16`"):
        require_shareable(plain, None)


def test_a_mapping_outlives_its_folder(folder: Path) -> None:
    """A folder that is removed or replaced keeps its pages for whoever has them mapped."""
    group = groups_of(folder)[0]
    bank = banks_of((group,), shared=True)[0]
    before = bank.records.copy()
    kept = contents(folder)
    shutil.rmtree(folder)
    np.testing.assert_array_equal(bank.records, before)
    assert kept["experts-00000.bank"][HEADER_BYTES:] == before.tobytes()
