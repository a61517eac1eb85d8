"""Ten thousand damaged checkpoints: each is read in full or refused in one line, and takes no memory beyond its size.

For each file kind thousands of seeded mutations (`tests/support/mutate.py`) of small valid checkpoints go through all
that happens before a bank is allocated, and through reading every expert. FREETOKEN_FUZZ="seed:cases" runs others.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken import formats
from freetoken.checkpoint.gguf import GgufCheckpoint, gguf_package, read_token
from freetoken.checkpoint.inspect import check_config, inspect
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.errors import CapacityError, CheckpointError, FreeTokenError
from tests.support import mutate
from tests.support.mutate import Files

SEED, CASES = (int(n) for n in os.environ.get("FREETOKEN_FUZZ", "0:3400").split(":"))
HANG_S = 30
"""A case that takes longer hangs: none takes a hundredth of it."""

FIXED_BYTES, PER_BYTE = 256 * 1024, 40
"""The most that opening may allocate: so much, and so much for each byte of the files.

Text becomes Python objects: `{"":1},` is 7 bytes and a dictionary of 232, `[],` 3 bytes and a list of 56 with its place
in another. The fixed part is what caches keep, a read buffer of 64 KiB, and Python's parser of regular expressions.
"""
MAX_MESSAGE = 2_000


class Hang(BaseException):
    """The alarm clock's; no `except Exception` catches it."""


def open_fully(path: Path, fmt: Any = None) -> None:
    """All that a load asks of the files before it allocates a bank, and all experts."""
    inspect(path, fmt)
    checkpoint = open_any(path)
    if isinstance(checkpoint, GgufCheckpoint):
        for token in (0, 5, 2**31):
            read_token(checkpoint, token)
    found = scan_any(checkpoint, fmt)
    check_config(found)
    found.check_scales()
    for group in found.groups:
        group.layout(fmt)
        for expert in range(group.n_experts):
            group.read(expert)


def find_fault(path: Path, size: int, opened: Callable[[Path], object] = open_fully) -> tuple[str, str | None]:
    """How opening ended ("read", or an error's name) and what is wrong with that, or None. size: bytes of the files.

    What allocates too much is opened again: a table of the interpreter (of interned strings) grows by a megabyte once.
    """
    found = _open_once(path, size, opened)
    return _open_once(path, size, opened) if found[1] is not None and "allocates" in found[1] else found


def _open_once(path: Path, size: int, opened: Callable[[Path], object]) -> tuple[str, str | None]:
    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    tracemalloc.reset_peak()
    start, _ = tracemalloc.get_traced_memory()
    outcome, fault = "read", None
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        opened(path)
    except FreeTokenError as error:
        message, outcome = str(error), type(error).__name__
        if not message.isprintable():
            fault = f"its message is not one printable line: {message[:300]!r}"
        elif len(message) > MAX_MESSAGE:
            fault = f"its message has {len(message)} characters: {message[:300]!r}"
    except Hang:
        fault = f"it hangs ({HANG_S} s)"
    except Exception as error:  # noqa: BLE001 that is what is looked for
        fault = f"{type(error).__name__} escapes: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    peak = tracemalloc.get_traced_memory()[1] - start
    if fault is None and peak > FIXED_BYTES + PER_BYTE * size:
        fault = f"it allocates {peak} bytes for files of {size}"
    return outcome, fault


@pytest.fixture
def traced() -> Iterator[None]:
    """Allocations are counted, and a hang that no signal interrupts ends the run with a trace."""
    formats.names()
    gguf_package()
    tracemalloc.start()
    faulthandler.dump_traceback_later(20 * 60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    tracemalloc.stop()


def write(folder: Path, files: Files, there: Files) -> None:
    """Make the folder hold these files; there: what it holds, kept up to date."""
    for name in there.keys() - files.keys():
        (folder / name).unlink()
        del there[name]
    for name, raw in files.items():
        if there.get(name) != raw:
            (folder / name).write_bytes(raw)
            there[name] = raw


KINDS: dict[str, tuple[Callable[[], list[Any]], Callable[[random.Random, Any], Files]]] = {
    "safetensors": (mutate.folders, mutate.mutate_safetensors),
    "config": (mutate.folders, mutate.mutate_config),
    "gguf": (mutate.ggufs, mutate.mutate_gguf),
}
MODEL = {"gguf": ("m.gguf", "m-00001-of-00002.gguf")}
"""What is opened, if it is not the folder: the first of these that is there."""


def path_of(kind: str, folder: Path, files: Files) -> Path:
    return next((folder / name for name in MODEL.get(kind, ()) if name in files), folder)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    make, damage = KINDS[kind]
    bases = make()
    faults, outcomes, there = [], Counter[str](), [Files() for _ in bases]
    folders = [tmp_path / str(n) for n in range(len(bases))]
    for base, folder, now in zip(bases, folders, there, strict=True):
        folder.mkdir()
        write(folder, mutate.files_of(base), now)
        # what a first call imports and keeps is no part of what a file costs
        assert find_fault(path_of(kind, folder, now), 1 << 20) == ("read", None)
    for number in range(CASES):
        rng = random.Random(f"{kind} {SEED} {number}")
        which = number % len(bases)
        files = damage(rng, bases[which])
        fmt = formats.get("q8_0") if rng.randrange(4) == 0 else None
        write(folders[which], files, there[which])
        size = sum(len(raw) for raw in files.values())
        path = path_of(kind, folders[which], files)
        outcome, fault = find_fault(path, size, lambda path, fmt=fmt: open_fully(path, fmt))
        outcomes[outcome] += 1
        if fault is not None:
            faults.append(f"{kind} {SEED}:{number}: {fault}")
    assert not faults, f"{len(faults)} of {CASES}\n" + "\n".join(faults[:40])
    assert outcomes["read"] >= CASES // 50, outcomes  # some damage is none, so the way to the end is taken, too
    assert outcomes["CheckpointError"] >= CASES // 3, outcomes


# --- files that are none ---------------------------------------------------------------------------------------------


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def loop(file: Path) -> None:
    file.symlink_to(file)


def folder(file: Path) -> None:
    file.mkdir()


def nowhere(file: Path) -> None:
    file.symlink_to(file.with_name("absent"))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("make", [pipe, device, loop, folder, nowhere])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "hf_quant_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "model-00002-of-00002.safetensors",
        "m.gguf",
        "m-00002-of-00002.gguf",
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    """A pipe nobody writes to, a device without an end, a link to itself or to nothing, a folder."""
    bases = mutate.ggufs() if name.endswith("gguf") else mutate.folders()
    base = next(base for base in bases if name in mutate.files_of(base))
    files = mutate.files_of(base)
    write(tmp_path, files, {})
    (tmp_path / name).unlink()
    make(tmp_path / name)
    path = path_of("gguf" if name.endswith("gguf") else "safetensors", tmp_path, files)
    outcome, fault = find_fault(path, sum(map(len, files.values())))
    assert fault is None, fault
    assert outcome == "CheckpointError"


@pytest.mark.parametrize("number", [1e308, 1e-300, float("inf"), float("nan"), -1.0])
def test_a_real_number_that_float32_does_not_hold(tmp_path: Path, number: float) -> None:
    """64 bits of a GGUF file's metadata, found by a longer run."""
    (model,) = mutate.ggufs()[0]
    key = b"qwen3moe.attention.layer_norm_rms_epsilon"
    model.values = [(k, 12, struct.pack("<d", number)) if k == key else (k, t, raw) for k, t, raw in model.values]
    (tmp_path / "m.gguf").write_bytes(model.encode()[1])
    with pytest.raises(CheckpointError, match=r"rms_epsilon is .* expected a positive number"):
        open_any(tmp_path / "m.gguf")


# --- the checker -----------------------------------------------------------------------------------------------------


def sleep(_: Path) -> None:
    time.sleep(30)


def spin(_: Path) -> None:
    try:
        while True:
            pass
    except Exception:  # noqa: BLE001 what a reader must not do, and must not get away with
        pass


def allocate(_: Path) -> None:
    np.empty(4 << 20, np.uint8)


def key_error(_: Path) -> None:
    raise KeyError("a")


def two_lines(_: Path) -> None:
    error = CheckpointError("a")
    error.args = ("a\nb",)
    raise error


def memory_error(_: Path) -> None:
    raise MemoryError


BROKEN: dict[Callable[[Path], None], str] = {
    sleep: "hangs",
    spin: "hangs",
    allocate: "allocates",
    key_error: "KeyError escapes",
    memory_error: "MemoryError escapes",
    two_lines: "not one printable line",
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_reader_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[[Path], None]
) -> None:
    monkeypatch.setattr("tests.checkpoint.test_fuzz.HANG_S", 0.2)
    _, fault = find_fault(tmp_path, 1000, broken)
    assert fault is not None
    assert BROKEN[broken] in fault


@pytest.mark.usefixtures("traced")
def test_a_good_reader_is_not(tmp_path: Path) -> None:
    def refuse(_: Path) -> None:
        raise CapacityError("a", needed=1, available=0, where="b")

    assert find_fault(tmp_path, 1000, lambda path: None) == ("read", None)
    assert find_fault(tmp_path, 1000, refuse) == ("CapacityError", None)


@pytest.mark.parametrize("kind", KINDS)
def test_mutations_are_the_same_each_time_and_differ_from_their_base(kind: str) -> None:
    make, damage = KINDS[kind]
    bases = make() * 5
    once, again = ([damage(random.Random(n), base) for n, base in enumerate(bases)] for _ in range(2))
    assert once == again
    changed = sum(files != mutate.files_of(base) for files, base in zip(once, bases, strict=True))
    assert changed > len(bases) * 3 // 4
