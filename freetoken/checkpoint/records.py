"""Reads a converted checkpoint: a folder whose experts lie as records, byte for byte what a bank holds.

    config.json, tokenizer files, model*.safetensors    all but the experts, as in the checkpoint it was made from
    experts-00000.bank ...                              4096 bytes of header, then E records, one file a layer
    freetoken.json                                      the manifest: which layer is which file, a checksum a record

`convert.py` writes it (docs/converted.md). Nothing is trusted: a header must be the very bytes that follow from the
manifest, sizes must fit, and every record is compared with its checksum when it is read or mapped.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from freetoken import formats
from freetoken.checkpoint.direct import BLOCK, read_direct
from freetoken.checkpoint.experts import ExpertScan, LayerExperts
from freetoken.checkpoint.safetensors import Checkpoint, TensorInfo, open_checkpoint, open_file, read_json
from freetoken.checkpoint.scan import scan_dense
from freetoken.checkpoint.shapes import check_hidden
from freetoken.errors import CheckpointError, ConfigError, FormatError
from freetoken.formats.base import Format
from freetoken.formats.record import LAYOUT_VERSION, Expert, RecordLayout
from freetoken.memory.mapping import map_file

MANIFEST = "freetoken.json"
JOURNAL = "conversion.jsonl"
KIND, VERSION = "freetoken-records", 1
"""What the manifest calls itself, and its version; the record's is `LAYOUT_VERSION`."""
HEADER_BYTES = BLOCK
"""Before the records of a file: whole pages and whole blocks, so that a mapping is a bank and direct reads fit."""


@dataclass(frozen=True)
class BankFile:
    """One layer's file: its name, the prefix of its experts in the checkpoint, and its records."""

    name: str
    prefix: str
    layout: RecordLayout
    n_experts: int

    @property
    def data_bytes(self) -> int:
        """Bytes of its records."""
        return self.n_experts * self.layout.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return HEADER_BYTES + self.data_bytes

    def describe(self) -> dict[str, Any]:
        """Its entry in the manifest, without checksums."""
        return {
            "file": self.name,
            "prefix": self.prefix,
            "format": self.layout.format.name,
            "experts": self.n_experts,
            "hidden": self.layout.hidden,
            "intermediate": self.layout.intermediate,
            "bias": self.layout.bias,
            "record_bytes": self.layout.nbytes,
        }

    def header(self) -> bytes:
        """The first `HEADER_BYTES` of the file: the same as JSON, with versions, so that a stray file tells its own."""
        facts = {"kind": KIND, "version": VERSION, "layout_version": LAYOUT_VERSION, **self.describe()}
        text = json.dumps(facts).encode() + b"\n"
        if len(text) > HEADER_BYTES:
            raise CheckpointError(f"the experts' prefix {shown(self.prefix)} is too long for a header", file=self.name)
        return text.ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True)
class RecordExperts(LayerExperts):
    """The experts of one layer as one file of records, with a CRC-32 of each."""

    info: TensorInfo
    checksums: tuple[int, ...]

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return (self.info,)

    @property
    def spelled(self) -> str:
        return "records"

    @property
    def interleaving(self) -> None:
        return None

    def read(self, expert: int) -> Expert:
        layout = self.layout()
        record = np.empty(layout.nbytes, np.uint8)
        self.read_record(expert, record)
        return layout.unpack(record)

    def read_record(self, expert: int, out: NDArray[np.uint8]) -> None:
        """One record into `out` (record_bytes,) uint8, checked; straight from the disk if `out` lies in a bank."""
        read_direct(self.info, self.info.offset + expert * out.nbytes, out)
        self.verify(expert, out)

    def verify(self, expert: int, record: NDArray[np.uint8]) -> None:
        """Raise `CheckpointError` naming file and expert when a record is not the one that was written."""
        found, expected = zlib.crc32(record.data), self.checksums[expert]
        if found != expected:
            raise CheckpointError(
                f"{self.info.file}: the record of expert {expert} has checksum {found:08x}, expected {expected:08x} "
                f"({MANIFEST}): the file is damaged; convert again with `ft convert`",
                file=str(self.info.file),
                tensor=self.info.name,
            )

    def map_records(self) -> NDArray[np.uint8]:
        """All records, (E * record_bytes,) uint8, read-only and not checked yet, shared with whoever maps them."""
        try:
            return map_file(self.info.file, self.info.offset, self.info.nbytes)
        except (OSError, ValueError) as error:  # ValueError: it became shorter
            raise CheckpointError(f"{self.info.file} cannot be mapped: {error}", file=str(self.info.file)) from error

    def check_scales(self) -> None:
        """Nothing: they were checked before they were written, and checksums tell whether they still are the same."""


@dataclass(frozen=True)
class RecordCheckpoint(Checkpoint):
    """A converted folder. The records of a layer are one tensor `<prefix>.records`, (E, record_bytes) U8."""

    layers: tuple[RecordExperts, ...] = ()


def is_converted(folder: Path) -> bool:
    """Whether a folder is one of ours, finished, not finished, or without its manifest."""
    names = (MANIFEST, bank_name(0))
    return any(os.path.exists(folder / name) for name in names) or _is_unfinished(folder)  # False for too long a path


def bank_name(number: int) -> str:
    """The file of a layer."""
    return f"experts-{number:05}.bank"


def _is_unfinished(folder: Path) -> bool:
    """Whether there is a journal, and the folder's name or its beginning says that it is ours."""
    if not os.path.isfile(folder / JOURNAL):
        return False
    with open_file(folder / JOURNAL) as (stream, _):
        ours = stream.read(100).startswith(json.dumps({"writes": KIND}).removesuffix("}").encode())
    return ours or os.path.realpath(folder).endswith(".partial")


def open_records(folder: Path) -> RecordCheckpoint:
    """Read manifest, config and headers of a converted folder.

    Raises `CheckpointError` naming the file when something is missing, of another version, or contradicts itself.
    """
    file = folder / MANIFEST
    if not file.exists():
        if _is_unfinished(folder):
            what = "is a conversion that was not finished: run the same `ft convert` again to finish it"
        else:
            what = f"holds converted experts, but {MANIFEST} is gone: copy it again, or convert again with `ft convert`"
        raise CheckpointError(f"{folder} {what}", file=str(file))
    manifest = _read_manifest(file)
    plain = open_checkpoint(folder)
    layers: dict[str, RecordExperts] = {}
    files: set[str] = set()
    for number, entry in enumerate(manifest["layers"]):
        bank, checksums = _read_entry(file, number, entry)
        shape = bank.n_experts, bank.layout.nbytes
        name = f"{bank.prefix}.records"
        if name in layers or name in plain.tensors or bank.name in files:
            raise _bad(file, f"layer {number} ({bank.name}, {shown(bank.prefix)}) is there twice")
        files.add(bank.name)
        info = TensorInfo(name, "U8", shape, folder / bank.name, HEADER_BYTES, bank.data_bytes)
        _check_file(info, bank)
        layout = bank.layout
        layers[name] = RecordExperts(
            plain, bank.prefix, layout.format, bank.n_experts, layout.hidden, layout.intermediate, layout.bias,
            info=info, checksums=checksums,
        )  # fmt: skip
    found = sum(layer.nbytes for layer in layers.values())
    if manifest.get("bank_bytes") != found:
        raise _bad(file, f"it says {shown(manifest.get('bank_bytes'))} bytes of records, its layers have {found}")
    tensors = {**plain.tensors, **{name: layer.info for name, layer in layers.items()}}
    return RecordCheckpoint(folder, plain.config, plain.sidecar, tensors, tuple(layers.values()))


def scan_records(checkpoint: RecordCheckpoint) -> ExpertScan:
    """As `scan.scan`: the layers that the manifest lists, and the quantized matrices of the dense part."""
    for layer in checkpoint.layers:
        check_hidden(checkpoint, layer.prefix, layer.hidden, layer.info)
    elsewhere = {layer.info.name for layer in checkpoint.layers}
    quantization, dense = scan_dense(checkpoint, elsewhere)
    return ExpertScan(checkpoint, quantization, checkpoint.layers, dense)


def require_shareable(found: ExpertScan, fmt: Format | None) -> None:
    """Raise `ConfigError` unless all experts lie as records of the format asked for, so that they can be mapped."""
    path = found.checkpoint.path
    for group in found.groups:
        wanted = fmt or group.format
        if not isinstance(group, RecordExperts) or group.format is not wanted:
            held = f"as {group.format.name}" if isinstance(group, RecordExperts) else "as other tools write them"
            raise ConfigError(
                f"shared=True maps experts as they lie in a file, and {path} holds them {held}: make a folder to share "
                f"with `ft convert {path} DST --expert-format {wanted.name}`",
                name="shared",
                value=True,
                expected=f"a folder that `ft convert` made with {wanted.name} experts",
            )


def _read_manifest(file: Path) -> Mapping[str, Any]:
    with _converted_again():
        manifest = read_json(file)
    if manifest.get("kind") != KIND:
        raise _bad(file, f"its kind is {shown(manifest.get('kind'))}, expected {KIND!r}")
    for name, what, known in (("version", "manifest", VERSION), ("layout_version", "record layout", LAYOUT_VERSION)):
        if manifest.get(name) != known:
            raise CheckpointError(
                f"{file}: its {what} has version {shown(manifest.get(name))}, this freetoken reads version {known}: "
                "convert the checkpoint it was made from again with `ft convert`",
                file=str(file),
            )
    if manifest.get("checksum") != "crc32":
        raise _bad(file, f"its checksum is {shown(manifest.get('checksum'))}, expected 'crc32'")
    if not isinstance(manifest.get("layers"), list) or not manifest["layers"]:
        raise _bad(file, "it has no list of layers")
    return manifest


def _read_entry(file: Path, number: int, entry: Any) -> tuple[BankFile, tuple[int, ...]]:
    """A layer of the manifest, every field checked, and the checksums of its records."""

    def bad(what: str) -> NoReturn:
        raise _bad(file, f"layer {number} {what}")

    if not isinstance(entry, dict):
        bad(f"is {shown(entry)}, expected an object")
    name, prefix = entry.get("file"), entry.get("prefix")
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".bank"):
        bad(f"names the file {shown(name)}, expected a .bank file in its folder")
    if not isinstance(prefix, str) or not prefix:
        bad(f"has the prefix {shown(prefix)}, expected the experts' name")
    if entry.get("format") not in formats.names():
        bad(f"has format {shown(entry.get('format'))}; known formats: {', '.join(formats.names())}")
    for key in ("experts", "hidden", "intermediate"):
        if type(entry.get(key)) is not int or not 0 < entry[key] < 2**31:
            bad(f"has {key} {shown(entry.get(key))}, expected a positive number")
    if not isinstance(entry.get("bias"), bool):
        bad(f"has bias {shown(entry.get('bias'))}, expected true or false")
    checksums = entry.get("checksums")
    if not isinstance(checksums, list) or len(checksums) != entry["experts"]:
        bad(f"has no list of {entry['experts']} checksums")
    try:
        layout = RecordLayout(formats.get(entry["format"]), entry["hidden"], entry["intermediate"], entry["bias"])
        numbers = tuple(int(text, 16) for text in checksums)
    except (FormatError, ValueError, TypeError) as error:
        bad(f"contradicts itself: {error}")
    bank = BankFile(name, prefix, layout, entry["experts"])
    for key, expected in bank.describe().items():
        if entry.get(key) != expected:
            bad(f"has {key} {shown(entry.get(key))}, expected {expected!r}")
    return bank, numbers


def _check_file(info: TensorInfo, bank: BankFile) -> None:
    file = info.file
    with _converted_again(), open_file(file) as (stream, size):
        header = stream.read(HEADER_BYTES)
    if size != bank.nbytes:
        raise CheckpointError(
            f"{file} has {size} bytes, {bank.n_experts} records of {bank.layout.nbytes} take {bank.nbytes}: it is not "
            "whole; copy it again, or convert again with `ft convert`",
            file=str(file),
            tensor=info.name,
        )
    if header != bank.header():
        raise CheckpointError(
            f"{file}: its header is not the one of {bank.prefix} in {MANIFEST}: the file is damaged or another's; "
            "convert again with `ft convert`",
            file=str(file),
            tensor=info.name,
        )


@contextlib.contextmanager
def _converted_again() -> Iterator[None]:
    """Add the next step to what is wrong with one of our files."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}; convert again with `ft convert`", file=error.facts["file"]) from error


def _bad(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{file}: {what}; it is damaged: convert again with `ft convert`", file=str(file))
