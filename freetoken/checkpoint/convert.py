"""Writes a checkpoint whose experts lie as records, the bytes that banks hold: what `records.py` reads.

Everything goes into DST.partial. A file that is whole and on the disk is noted in a journal there, so that the same
conversion, started again after whatever ended it, keeps it. The manifest comes last, then one rename to DST: a folder
of that name is always complete. Beside the records of a few experts nothing large is held in memory.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from freetoken import __version__
from freetoken.checkpoint.beside import Beside, file_checksum, stored_beside, write_safetensors
from freetoken.checkpoint.experts import ExpertScan, LayerExperts
from freetoken.checkpoint.inspect import check_config
from freetoken.checkpoint.jobs import run_jobs
from freetoken.checkpoint.journal import Journal, partial_folder
from freetoken.checkpoint.load import write_records
from freetoken.checkpoint.records import HEADER_BYTES, KIND, MANIFEST, VERSION, BankFile, bank_name
from freetoken.checkpoint.write import deal_out, free_place, require_space, write_at, write_error, write_index
from freetoken.errors import CheckpointError, FormatError
from freetoken.formats.base import Format
from freetoken.formats.record import LAYOUT_VERSION
from freetoken.units import format_bytes


@dataclass(frozen=True)
class Converted:
    """What was written; kept_bytes: of it, by an earlier run that did not come to its end."""

    path: str
    layers: int
    experts: int
    formats: tuple[str, ...]
    bank_bytes: int
    dense_bytes: int
    kept_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        kept = f"; {format_bytes(self.kept_bytes)} were there from an earlier run" if self.kept_bytes else ""
        return (
            f"{self.path}: {self.experts} experts in {self.layers} layers as {', '.join(self.formats)}, "
            f"{format_bytes(self.bank_bytes)} of records; dense part {format_bytes(self.dense_bytes)}{kept}"
        )


class Conversion:
    """What will be written where; making one checks everything that headers tell and writes nothing.

    found: the source. destination: a folder that does not exist or is empty. fmt: of all experts (default: each layer
    keeps its own). beside: everything but experts (default: as it lies in the source's folder). Raises
    `CheckpointError`, `FormatError` or `ConfigError`.
    """

    def __init__(
        self,
        found: ExpertScan,
        destination: str | os.PathLike[str],
        fmt: Format | None = None,
        beside: Beside | None = None,
    ) -> None:
        check_config(found)
        self.found = found
        self.named = os.fspath(destination)
        self.destination = free_place(destination)
        self.partial = partial_folder(self.destination)
        self.beside = stored_beside(found) if beside is None else beside
        self.banks = tuple(
            BankFile(bank_name(number), group.prefix, group.layout(fmt), group.n_experts)
            for number, group in enumerate(found.groups)
        )
        self.shards = deal_out(self.beside.tensors)
        self.format = fmt

    @property
    def nbytes(self) -> int:
        """Bytes of all records and of the dense part."""
        return self.bank_bytes + self.dense_bytes

    @property
    def bank_bytes(self) -> int:
        """Bytes of all records."""
        return sum(bank.data_bytes for bank in self.banks)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense tensors."""
        return sum(tensor.nbytes for tensor in self.beside.tensors)

    def run(self, threads: int, on_bytes: Callable[[int], object] = lambda n: None) -> Converted:
        """Write it all with `threads` threads, or what is missing of it.

        on_bytes is called with the bytes just written, and first with those kept from a run that did not end. What is
        finished stays after an interruption or a full disk; nothing stays where the source is at fault. Raises
        `CapacityError`, before the first byte if the disk is too small; `CheckpointError` for a damaged source.
        """
        source = _fingerprint(self.found)
        identity = {
            "writes": KIND,
            "source": str(self.found.checkpoint.path.resolve()),
            "source files": source,
            "expert format": None if self.format is None else self.format.name,
            "record layout version": LAYOUT_VERSION,
            "manifest version": VERSION,
            "freetoken version": __version__,  # another may round otherwise
            "banks": [bank.describe() for bank in self.banks],
            "dense part": list(self.shards),
        }
        try:
            with Journal(self.partial, identity) as journal:
                kept = self._run(journal, source, threads, on_bytes)
        except OSError as error:
            kept_too = (
                f"what is finished stays in {self.partial}" if os.path.exists(self.partial) else "nothing of it stays"
            )
            raise write_error(error, self.destination, self.nbytes, kept_too) from error
        return Converted(
            self.named,
            len(self.banks),
            sum(bank.n_experts for bank in self.banks),
            tuple(dict.fromkeys(bank.layout.format.name for bank in self.banks)),
            self.bank_bytes,
            self.dense_bytes,
            kept,
        )

    def _run(self, journal: Journal, source: Mapping[str, Any], threads: int, on_bytes: Callable[[int], object]) -> int:
        try:
            self._drop_damaged(journal)
            kept = sum(bank.data_bytes for bank in self.banks if bank.name in journal.finished)
            kept += sum(t.nbytes for name, shard in self.shards.items() if name in journal.finished for t in shard)
            require_space(self.partial, self.nbytes - kept + len(self.banks) * HEADER_BYTES)
            on_bytes(kept)
            self.beside.write_files(self.partial)
            write_index(self.partial, self.shards)
            self._write_dense(journal, on_bytes)
            self._write_banks(journal, threads, on_bytes)
            self._write_manifest(journal)
            if _fingerprint(self.found) != source:
                path = self.found.checkpoint.path
                raise CheckpointError(f"{path} was changed while it was converted; start again", file=str(path))
        except BaseException as error:
            if not journal.finished or isinstance(error, CheckpointError | FormatError):
                journal.discard()
            raise
        journal.finish(self.destination)
        return kept

    def _drop_damaged(self, journal: Journal) -> None:
        """A kept file must still have the checksums that it was noted with."""
        for bank in self.banks:
            note = journal.finished.get(bank.name)
            if note is not None and not _is_whole(self.partial / bank.name, bank, note.get("checksums")):
                journal.drop(bank.name)
        for name in self.shards:
            note = journal.finished.get(name)
            if note is not None and file_checksum(self.partial / name) != note.get("checksum"):
                journal.drop(name)

    def _write_dense(self, journal: Journal, on_bytes: Callable[[int], object]) -> None:
        for name, tensors in self.shards.items():
            if name not in journal.finished:
                file = self.partial / name
                try:
                    checksum = write_safetensors(file, tensors, on_bytes)
                except BaseException:
                    file.unlink(missing_ok=True)
                    raise
                journal.add(name, bytes=file.stat().st_size, checksum=checksum)

    def _write_banks(self, journal: Journal, threads: int, on_bytes: Callable[[int], object]) -> None:
        writers = [
            _BankWriter(self.partial / bank.name, bank, group)
            for bank, group in zip(self.banks, self.found.groups, strict=True)
            if bank.name not in journal.finished
        ]
        lock = threading.Lock()

        def write(job: tuple[_BankWriter, int]) -> None:
            writer, expert = job
            if writer.write(expert):
                with lock:
                    journal.add(writer.file.name, bytes=writer.bank.nbytes, checksums=writer.checksums)
            on_bytes(writer.bank.layout.nbytes)

        try:
            run_jobs(write, [(writer, e) for writer in writers for e in range(writer.bank.n_experts)], threads)
        finally:
            for writer in writers:
                writer.drop_unfinished()

    def _write_manifest(self, journal: Journal) -> None:
        manifest = {
            "kind": KIND,
            "version": VERSION,
            "layout_version": LAYOUT_VERSION,
            "written_by": f"freetoken {__version__}",
            "source": self.found.checkpoint.path.resolve().name,
            "checksum": "crc32",
            "bank_bytes": self.bank_bytes,
            "layers": [
                {**bank.describe(), "checksums": journal.finished[bank.name]["checksums"]} for bank in self.banks
            ],
        }
        (self.partial / MANIFEST).write_text(json.dumps(manifest, indent=1))


class _BankWriter:
    """One layer's file while it is written, by several threads."""

    def __init__(self, file: Path, bank: BankFile, group: LayerExperts) -> None:
        self.file, self.bank, self.group = file, bank, group
        self.checksums = [""] * bank.n_experts
        self._left = bank.n_experts
        self._lock = threading.Lock()
        self._fd = -1

    def write(self, expert: int) -> bool:
        """Write one record; True when it was the last, and the file is on the disk and read-only."""
        record = np.empty(self.bank.layout.nbytes, np.uint8)
        write_records(self.group, [expert], self.bank.layout, record[None])
        self.checksums[expert] = _checksum(record.data)
        with self._lock:
            if self._fd < 0:
                self._fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                write_at(self._fd, 0, np.frombuffer(self.bank.header(), np.uint8))
        write_at(self._fd, HEADER_BYTES + expert * record.nbytes, record)
        with self._lock:
            self._left -= 1
            if self._left:
                return False
        os.fchmod(self._fd, 0o444 & os.fstat(self._fd).st_mode)  # mapped by others, it must not change
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        return True

    def drop_unfinished(self) -> None:
        """Remove the file if it was begun and is not whole."""
        if self._fd >= 0:
            os.close(self._fd)
            self.file.unlink()


def _is_whole(file: Path, bank: BankFile, checksums: Any) -> bool:
    """Whether a bank's file has its header, and records with these checksums."""
    with file.open("rb", buffering=0) as stream:
        return stream.read(HEADER_BYTES) == bank.header() and checksums == [
            _checksum(stream.read(bank.layout.nbytes)) for _ in range(bank.n_experts)
        ]


def _checksum(record: bytes | memoryview) -> str:
    return f"{zlib.crc32(record):08x}"


def _fingerprint(found: ExpertScan) -> dict[str, list[int]]:
    """Size and time of every file that the source consists of."""
    checkpoint = found.checkpoint
    files = {checkpoint.config_file, *(info.file for info in checkpoint.tensors.values())}
    try:
        stats = {file.name: file.stat() for file in sorted(files)}
    except OSError as error:
        raise CheckpointError(f"{error.filename} is gone: {error.strerror}", file=str(error.filename)) from error
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
