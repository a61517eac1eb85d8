"""What a conversion has finished: a file that survives a kill at any moment, in a folder that one process may work in.

The first line says what is converted into what; each further line is one file that is whole and on the disk. A line
that was cut off counts for nothing. `new_folder` uses the same for what starts anew each time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from freetoken.checkpoint.records import JOURNAL
from freetoken.checkpoint.write import check_free, free_place, require_space, sync, write_error
from freetoken.errors import ConfigError


def partial_folder(place: Path) -> Path:
    """The unfinished folder of a place."""
    return place.with_name(f"{place.name}.partial")


class Journal:
    """The unfinished folder and its journal: a context manager that holds a lock on the folder.

    identity: what must be the same for a run to go on from where another one ended. `finished` maps the name of a file
    to what `add` was told about it. Everything else in the folder is removed on entry. Raises `ConfigError` when the
    folder belongs to another conversion or to a running one.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.identity = json.loads(json.dumps(identity))
        self.finished: dict[str, dict[str, Any]] = {}
        self._file = folder / JOURNAL
        self._lock = -1

    def __enter__(self) -> Journal:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._take_lock()
            self._read()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def add(self, name: str, **facts: Any) -> None:
        """Note that a file is finished; it must be on the disk already, as the note is when this returns."""
        self.finished[name] = facts
        self._append({"file": name, **facts})

    def drop(self, name: str) -> None:
        """Remove a file that is finished, to be written again."""
        del self.finished[name]
        (self.folder / name).unlink()

    def finish(self, place: Path) -> None:
        """Give the folder its name. The journal goes last: after a kill before that, it lies in a complete folder."""
        for path in [*self.folder.iterdir(), self.folder]:
            sync(path)
        check_free(place)
        os.rename(self.folder, place)
        (place / JOURNAL).unlink()
        sync(place.parent)

    def discard(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._refuse("another process is converting into it: wait for that one") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise  # some network file systems have no locks; there it is the user who must not start two

    def _read(self) -> None:
        lines = self._file.read_bytes().splitlines(keepends=True) if self._file.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            if any(path != self._file for path in self.folder.iterdir()):
                raise self._refuse("it was not left by an unfinished conversion: remove it, or choose another name")
            self._file.unlink(missing_ok=True)
            self._append(self.identity)
            return
        try:
            identity, *notes = map(json.loads, whole)
            self.finished = {note.pop("file"): note for note in notes}
            if not all(isinstance(name, str) for name in self.finished):
                raise TypeError("a name that is no text")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise self._refuse(f"its {JOURNAL} is damaged: remove the folder to start anew") from error
        self._compare(identity)
        if whole != lines:
            os.truncate(self._file, sum(map(len, whole)))
        for path in self.folder.iterdir():
            note = self.finished.get(path.name)
            if path != self._file and (note is None or path.stat().st_size != note.get("bytes")):
                self.finished.pop(path.name, None)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        there = set(os.listdir(self.folder))
        self.finished = {name: note for name, note in self.finished.items() if name in there}

    def _compare(self, identity: Any) -> None:
        was: Mapping[str, Any] = identity if isinstance(identity, dict) else {}
        for name, now in self.identity.items():
            if was.get(name) != now:
                raise self._refuse(
                    f"it holds the beginning of another conversion ({name} was {_short(was.get(name), now)}, now is "
                    f"{_short(now, was.get(name))}): remove it to start anew"
                )

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._file.open("ab") as stream:
            stream.write(json.dumps(line).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _refuse(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.folder}: {what}", name="destination", value=str(self.folder), expected="the same conversion"
        )


@contextlib.contextmanager
def new_folder(destination: str | os.PathLike[str], nbytes: int, writes: str) -> Iterator[Path]:
    """A folder that becomes `destination` when the block ends, or goes away with everything in it when it fails.

    nbytes: what will be written there. writes: what kind of thing; what a killed run of that kind left is removed.
    Raises `ConfigError` for a destination that is not free or not to be written, or where another run is at work, and
    `CapacityError` where the disk is or becomes too small.
    """
    place = free_place(destination)
    try:
        with Journal(partial_folder(place), {"writes": writes}) as journal:
            try:
                require_space(journal.folder, nbytes)
                yield journal.folder
                journal.finish(place)
            except BaseException:
                journal.discard()
                raise
    except OSError as error:
        raise write_error(error, place, nbytes, "nothing of it stays") from error


def _short(value: object, other: object) -> object:
    """A value, or of an object only what differs from another."""
    if isinstance(value, dict) and isinstance(other, dict):
        return {key: item for key, item in value.items() if other.get(key) != item}
    return value
