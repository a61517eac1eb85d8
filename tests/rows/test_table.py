"""Rows come from files as they lie there, in whatever way the system lets them be read, or an error says why not."""

from __future__ import annotations

import errno
import functools
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freetoken.errors import CheckpointError, ClosedError, ConfigError, FreeTokenError, RowError, UnsupportedError
from freetoken.rows import DiskRowTable, RowFile, _reader, table
from tests.support.rows import (
    Change,
    Laid,
    Recorder,
    fail_often,
    lay_rows,
    random_rows,
    refuse_direct,
    refuse_ring,
)
from tests.support.seccomp import RING_ENTER, RING_SETUP, refuse_calls

ROWS, ROW_BYTES = 3000, 160
RAM = 64 << 20
"""What a table may hold besides ids and rows."""
SORTED = 1 << 19
"""Ids that are sorted at once."""

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp and /proc are Linux's")


@pytest.fixture
def laid(tmp_path: Path) -> Laid:
    rng = np.random.default_rng(1)
    return lay_rows(tmp_path, rng, random_rows(rng, ROWS, ROW_BYTES), 5, cut=False)


def open_table(laid: Laid, **more: Any) -> DiskRowTable:
    return DiskRowTable.open(laid.files, *laid.rows.shape, "U8", cut=laid.cut, **more)


def check_rows(opened: DiskRowTable, rows: NDArray[np.uint8], ids: Any) -> None:
    """Gathered into memory that held something else before."""
    out = np.full((*np.shape(ids), rows.shape[1]), 0xA5, np.uint8)
    assert opened.gather(ids, out) is out
    np.testing.assert_array_equal(out, rows[np.asarray(ids, np.int64)])


def in_thread(run: Callable[[], Any]) -> Any:
    """What it returns in a thread of its own, which what it does to threads ends with."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


# --- any table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain sailing", "failures", "no ring", "no direct reads", "threads"])
@pytest.mark.parametrize("seed", range(12))
def test_any_table(tmp_path: Path, seed: int, way: str) -> None:
    rng = np.random.default_rng([seed, len(way)])
    row_bytes = int(rng.choice([1, 7, 160, 511, 512, 513, 2560, 5000, 40000]))
    rows = random_rows(rng, int(rng.integers(1, 400)), row_bytes)
    laid = lay_rows(tmp_path, rng, rows, int(rng.integers(1, 9)), cut=bool(rng.integers(2)))
    changes = {"failures": fail_often(rng), "no ring": refuse_ring, "no direct reads": refuse_direct}
    change: Change | None = changes.get(way)

    def check() -> None:
        if way == "threads":
            refuse_calls((RING_SETUP,), errno.EPERM)
        with open_table(laid, depth=int(rng.choice([1, 2, 16, 256])), change=change) as opened:
            for n in (0, 1, 16, 700):
                check_rows(opened, rows, rng.integers(0, len(rows), n))
            check_rows(opened, rows, np.arange(len(rows)))
            check_rows(opened, rows, rng.permutation(len(rows)).reshape(1, -1, 1))
            assert opened.held_bytes < RAM

    in_thread(check)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no tmpfs where Linux has one")
def test_tmpfs() -> None:
    path = Path("/dev/shm") / f"freetoken-rows-{os.getpid()}"
    rows = random_rows(np.random.default_rng(0), 500, ROW_BYTES)
    try:
        path.write_bytes(b"abc" + rows.tobytes())
        with DiskRowTable.open([RowFile(path, 3)], 500, ROW_BYTES, "U8") as opened:
            check_rows(opened, rows, np.arange(499, -1, -1))
    finally:
        path.unlink()


def test_ids_of_all_kinds(laid: Laid) -> None:
    with open_table(laid) as opened:
        for ids in ([], 5, [1, 1], [[3], [2]], np.array([7], np.uint8), np.array([7], np.uint64), np.arange(9)[::2]):
            check_rows(opened, laid.rows, ids)
        for bad in ([0.5], ["1"], [True]):
            with pytest.raises(TypeError, match="expected whole numbers"):
                opened.gather(bad)


def test_ids_that_lie_anywhere_in_a_table_of_many_rows(tmp_path: Path) -> None:
    """All digits of their numbers are sorted by. The file is sparse."""
    n, width = 1 << 33, 8
    path = tmp_path / "sparse"
    rng = np.random.default_rng(5)
    ids = np.unique(np.concatenate([rng.integers(0, n, 300), [0, n - 1, 255, 256, 65535, 65536, 1 << 24, 1 << 32]]))
    try:
        with path.open("wb") as stream:
            stream.truncate(n * width)
            for number in ids:
                stream.seek(int(number) * width)
                stream.write(int(number + 1).to_bytes(width, "little"))
    except OSError:
        pytest.skip("this file system has no sparse files of 64 GiB")
    rng.shuffle(ids)
    with DiskRowTable.open([RowFile(path)], n, width, "U64") as opened:
        np.testing.assert_array_equal(opened.gather(ids).view(np.uint64)[:, 0], ids.astype(np.uint64) + 1)


@pytest.mark.parametrize("bad", [-1, ROWS, 2**62, -(2**63), np.uint64(2**64 - 1)])
@pytest.mark.parametrize("n", [1, 16, SORTED + 5])
def test_a_row_that_is_not_there(laid: Laid, bad: int, n: int) -> None:
    """Nothing is read: neither the rows before nor those after."""
    recorder = Recorder()
    ids = np.zeros(n, type(bad) if isinstance(bad, np.uint64) else np.int64)
    ids[n // 2] = bad
    with open_table(laid, change=recorder) as opened:
        with pytest.raises(RowError, match=f"has rows 0 to {ROWS - 1}; id {n // 2} of those asked for is") as caught:
            opened.gather(ids)
        assert isinstance(caught.value, IndexError)
        assert caught.value.facts == {"row": min(int(bad), 2**63 - 1), "rows": ROWS}
        assert recorder.reads == []
        check_rows(opened, laid.rows, [0])


def test_out_that_does_not_fit(laid: Laid) -> None:
    read_only = np.zeros((2, ROW_BYTES), np.uint8)
    read_only.flags.writeable = False
    outs = (np.zeros((3, ROW_BYTES), np.uint8), np.zeros((2, ROW_BYTES), np.int8), np.zeros((2, 320), np.uint8)[:, ::2])
    with open_table(laid) as opened:
        for out in (*outs, read_only):
            with pytest.raises(ValueError, match=r"expected uint8 \(2, 160\), C-contiguous and writeable"):
                opened.gather([0, 1], out)


# --- which reads are made --------------------------------------------------------------------------------------------


def spans(recorder: Recorder) -> list[tuple[int, int]]:
    return sorted((offset, offset + nbytes) for _, _, offset, nbytes in recorder.reads)


def lay_plainly(folder: Path, n: int, row_bytes: int, offset: int = 0) -> Laid:
    rows = random_rows(np.random.default_rng(2), n, row_bytes)
    (folder / "rows").write_bytes(bytes(offset) + rows.tobytes() + bytes(5000))
    return Laid(rows, [RowFile(folder / "rows", offset, rows.nbytes)], cut=False)


def require_direct(path: Path) -> int:
    """What direct reads of files there are aligned to."""
    fd, align, why = table.open_rows(path)
    os.close(fd)
    if why:
        pytest.skip(f"no direct reads here: {why}")
    return align


def test_a_row_takes_the_sectors_it_lies_in(tmp_path: Path) -> None:
    laid = lay_plainly(tmp_path, 5000, ROW_BYTES, offset=77)
    align = require_direct(tmp_path / "rows")
    recorder = Recorder()
    with open_table(laid, change=recorder) as opened:
        for row in (0, 3, 1234, 4999):
            recorder.reads.clear()
            check_rows(opened, laid.rows, [row])
            first = 77 + row * ROW_BYTES
            expected = first // align * align, -(-(first + ROW_BYTES) // align) * align
            assert spans(recorder) == [expected]
            assert recorder.reads[0][1], "a direct read"


@pytest.mark.parametrize("n", [900, SORTED + 1000])
@pytest.mark.parametrize("apart", [5000, 100_000])
def test_the_same_rows_are_read_once(tmp_path: Path, n: int, apart: int) -> None:
    """However often and in whatever order they are asked for, and however many ids there are: more than are sorted."""
    laid = lay_plainly(tmp_path, 100_000, 8)
    few = np.arange(3, 100_000, apart)  # too far from each other to share reads
    recorder = Recorder()
    with open_table(laid, change=recorder) as opened:
        check_rows(opened, laid.rows, np.random.default_rng(3).choice(few, n))
    assert len(recorder.reads) == len(few)


def test_neighbours_share_a_read(tmp_path: Path) -> None:
    """And what lies close enough that skipping it would take as long as reading it; none is longer than its memory."""
    laid = lay_plainly(tmp_path, 5000, ROW_BYTES)
    recorder = Recorder()
    with open_table(laid, change=recorder) as opened:
        check_rows(opened, laid.rows, [11, 10, 12, 20])
        assert len(recorder.reads) == 1
        recorder.reads.clear()
        check_rows(opened, laid.rows, [0, 100, 200])  # 16,000 bytes apart
        assert len(recorder.reads) == 3
        recorder.reads.clear()
        check_rows(opened, laid.rows, np.arange(5000))
    found = spans(recorder)
    assert len(found) < 40
    assert max(stop - start for start, stop in found) <= table.SLOT_BYTES + 2 * table.PAGE


def test_many_reads_are_in_flight_and_no_more_than_wanted(laid: Laid) -> None:
    """A pool starts as many threads as there are reads at once, and none for a read that is the only one."""

    def count(depth: int, ids: NDArray[np.int64]) -> int:
        refuse_calls((RING_SETUP,), errno.EPERM)
        with open_table(laid, depth=depth) as opened:
            check_rows(opened, laid.rows, ids)
            assert opened._reader is not None
            return opened._reader.n_threads

    apart = np.arange(0, ROWS, 100)
    assert in_thread(lambda: count(16, apart)) == 16
    assert in_thread(lambda: count(256, apart)) == len(apart)
    assert in_thread(lambda: count(256, apart[:1])) == 0


# --- ways that are refused --------------------------------------------------------------------------------------------


@needs_linux
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", [RING_SETUP, RING_ENTER], ids=["setup", "first submit"])
def test_a_ring_that_is_refused(laid: Laid, call: int, number: int, caplog: pytest.LogCaptureFixture) -> None:
    def check() -> str:
        refuse_calls((call,), number)
        with open_table(laid) as opened:
            for _ in range(2):
                check_rows(opened, laid.rows, np.arange(0, ROWS, 7))
            return opened.reading

    with caplog.at_level(logging.INFO, "freetoken"):
        reading = in_thread(check)
    assert reading.startswith(f"by threads, because io_uring was refused ({os.strerror(number)})")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].endswith(reading)


@needs_linux
def test_a_ring_that_is_refused_while_reads_are_in_flight(tmp_path: Path) -> None:
    """What the kernel took before comes, the rest by threads."""
    laid = lay_plainly(tmp_path, 2000, 5000)
    seen: list[str] = []

    def change(way: str, direct: bool, offset: int, nbytes: int, result: int) -> int:
        seen.append(way)
        if len(seen) == 5:
            refuse_calls((RING_ENTER,), errno.EPERM)
        return result

    def check() -> None:
        with open_table(laid, change=change, depth=16) as opened:
            check_rows(opened, laid.rows, np.arange(0, 2000, 3))
            assert "io_uring was refused" in opened.reading

    in_thread(check)
    assert {"ring", "pool"} == set(seen)


def test_a_ring_whose_reads_are_refused(laid: Laid) -> None:
    with open_table(laid, change=refuse_ring) as opened:
        direct = "directly" in opened.reading
        check_rows(opened, laid.rows, np.arange(0, ROWS, 7))
        assert opened.reading.startswith("by threads, because io_uring was refused")
        assert ("directly" in opened.reading) == direct


def test_direct_reads_that_are_refused_at_the_first(laid: Laid, caplog: pytest.LogCaptureFixture) -> None:
    require_direct(Path(laid.files[0].file))
    recorder = Recorder()

    def change(*answer: Any) -> int:
        recorder(*answer)
        return refuse_direct(*answer)

    with caplog.at_level(logging.INFO, "freetoken"), open_table(laid, change=change) as opened:
        for _ in range(3):
            check_rows(opened, laid.rows, np.arange(ROWS))
        recorder.reads.clear()
        check_rows(opened, laid.rows, [5])
        assert "through the page cache, because direct reads were refused (Invalid argument)" in opened.reading
    assert recorder.reads[0][1] is False, "what was refused is not tried again"
    assert len(caplog.records) == 1


def test_direct_reads_that_are_refused_at_opening(laid: Laid, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    with open_table(laid) as opened:
        check_rows(opened, laid.rows, np.arange(ROWS - 1, -1, -1))
        assert opened.reading.endswith("through the page cache, because direct reads were refused (Invalid argument)")


def test_a_system_without_direct_reads(laid: Laid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    with open_table(laid) as opened:
        check_rows(opened, laid.rows, [1, 2, 1])
        assert "(this system has none)" in opened.reading


@pytest.mark.parametrize(("told", "refused", "expected"), [
    (4096, 0, 4096), (1 << 16, 0, 1 << 16), (1 << 20, 0, 1), (0, 0, 1), (-1, 0, 512), (-1, 512, 4096), (-1, 4096, 1),
])  # fmt: skip
def test_alignment(laid: Laid, monkeypatch: pytest.MonkeyPatch, told: int, refused: int, expected: int) -> None:
    """Of direct reads: as the kernel tells, and tried where it does not; refused: all up to so many bytes are."""
    path = Path(laid.files[0].file)
    require_direct(path)
    real = os.preadv

    def preadv(fd: int, buffers: list[Any], offset: int) -> int:
        if len(buffers[0]) <= refused:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(_reader, "direct_align", lambda fd: told)
    fd, align, why = table.open_rows(path)
    os.close(fd)
    assert align == expected
    assert bool(why) == (expected == 1)
    recorder = Recorder()
    with open_table(laid, change=recorder) as opened:
        check_rows(opened, laid.rows, [7, 9, 100])
    assert all(direct == (expected > 1) for _, direct, _, _ in recorder.reads)
    if expected > 1:
        assert all(offset % expected == 0 and nbytes % expected == 0 for _, _, offset, nbytes in recorder.reads)


# --- reads that fail --------------------------------------------------------------------------------------------------


def test_a_drive_that_fails(tmp_path: Path) -> None:
    laid = lay_plainly(tmp_path, 1000, 5000)
    broken = range(500 * 5000, 500 * 5000 + 1)

    def change(way: str, direct: bool, offset: int, nbytes: int, result: int) -> int:
        return -errno.EIO if offset <= broken.start < offset + nbytes else result

    with open_table(laid, change=change) as opened:
        with pytest.raises(CheckpointError) as caught:
            opened.gather(np.arange(0, 1000, 50))
        assert caught.value.facts == {"file": str(tmp_path / "rows"), "tensor": None, "row": 500}
        assert f"{tmp_path / 'rows'}: row 500 of" in str(caught.value)
        assert "Input/output error" in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        check_rows(opened, laid.rows, [499, 501])


def test_the_row_that_is_named_is_the_first_one_not_read(tmp_path: Path) -> None:
    """Several rows share the read that fails after some of it came."""
    laid = lay_plainly(tmp_path, 1000, 100)

    def change(way: str, direct: bool, offset: int, nbytes: int, result: int) -> int:
        return 1024 if direct else -errno.EIO

    require_direct(tmp_path / "rows")
    with open_table(laid, change=change) as opened, pytest.raises(CheckpointError, match="row 11 of"):
        opened.gather([3, 4, 9, 11, 12])


def test_a_file_that_was_cut_after_opening(tmp_path: Path) -> None:
    laid = lay_plainly(tmp_path, 1000, ROW_BYTES, offset=10)
    end = 10 + 600 * ROW_BYTES + 50
    with open_table(laid) as opened:
        check_rows(opened, laid.rows, np.arange(1000))
        os.truncate(tmp_path / "rows", end)
        out = np.full((3, ROW_BYTES), 0xA5, np.uint8)
        with pytest.raises(
            CheckpointError, match=f"row 600 of .* the file has {end} bytes now, expected at least"
        ) as caught:
            opened.gather([5, 600, 5], out)
        assert caught.value.facts["row"] == 600
        assert (out[1] == 0xA5).all(), "what was not read is not there, nor are zeros"
        with pytest.raises(CheckpointError, match=f"row 999 of .* the file has {end} bytes now"):
            opened.gather([999])
        check_rows(opened, laid.rows, np.arange(600))


def test_a_file_in_whose_place_another_was_put(tmp_path: Path) -> None:
    """Its rows go on being those of the file that was opened; a plain read of the other one is refused."""
    laid = lay_plainly(tmp_path, 1000, ROW_BYTES)
    require_direct(tmp_path / "rows")
    with open_table(laid) as opened, open_table(laid, change=refuse_direct) as plain:
        (tmp_path / "rows").unlink()
        (tmp_path / "rows").write_bytes(bytes(1000 * ROW_BYTES))
        check_rows(opened, laid.rows, [1, 999])
        with pytest.raises(CheckpointError, match=os.strerror(errno.ESTALE)):
            plain.gather([1])


def test_reads_that_are_interrupted_for_ever(laid: Laid) -> None:
    again = open_table(laid, change=lambda *answer: -errno.EAGAIN)
    with again as opened, pytest.raises(CheckpointError, match=os.strerror(errno.EAGAIN)):
        opened.gather([0, 50])


@pytest.mark.parametrize("ring", [True, False])
def test_an_error_of_python_in_between(laid: Laid, ring: bool) -> None:
    """As Ctrl-C is: what is in flight lands, and the table can be used."""
    seen: list[int] = []

    def change(way: str, direct: bool, offset: int, nbytes: int, result: int) -> int:
        seen.append(offset)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return result if ring or way != "ring" else -errno.ENOSYS

    with open_table(laid, change=change) as opened:
        with pytest.raises(KeyboardInterrupt):
            opened.gather(np.arange(0, ROWS, 50))
        check_rows(opened, laid.rows, np.arange(0, ROWS, 50))


@needs_linux
def test_control_c_ends_a_long_reading(tmp_path: Path) -> None:
    """Millions of reads, as an alarm in the main thread ends them."""
    n = 4_000_000
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(n * 5000)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    with DiskRowTable.open([RowFile(tmp_path / "sparse")], n, 5000, "U8", depth=4) as opened:
        assert opened._reader is not None
        ids, out = np.arange(0, n, 16), np.empty(n // 16 * 5000, np.uint8)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            with pytest.raises(KeyboardInterrupt):
                opened._reader.gather(ids, out)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert opened._reader.n_reads < ids.size
        assert not opened.gather([0, n - 1]).any()


# --- closing, threads, processes --------------------------------------------------------------------------------------


def test_closed(laid: Laid) -> None:
    opened = open_table(laid)
    duty = opened.stage(np.zeros(1, np.int64), np.zeros((1, ROW_BYTES), np.uint8))
    opened.close()
    opened.close()
    uses: list[Callable[[], Any]] = [duty, functools.partial(opened.gather, [0]), lambda: opened.reading]
    for use in (*uses, lambda: opened.held_bytes):
        with pytest.raises(ClosedError, match="was closed: open it again") as caught:
            use()
        assert isinstance(caught.value, ValueError)


@needs_linux
@pytest.mark.parametrize("bad", [False, True])
def test_files_are_closed(laid: Laid, bad: bool) -> None:
    folder = str(laid.files[0].find().file.parent)

    def descriptors() -> list[str]:
        """Of its files and of rings: garbage of other tests may close anything else meanwhile."""
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return sorted(link for link in links if link.startswith(folder) or "io_uring" in link)

    gc.collect()
    before = descriptors()
    if bad:
        with pytest.raises(CheckpointError):
            DiskRowTable("t", [*(f.find() for f in laid.files[:-1]), missing(laid)], *laid.rows.shape, "U8")
    else:
        with open_table(laid, change=refuse_direct) as opened:
            check_rows(opened, laid.rows, np.arange(ROWS))
            assert descriptors() != before
    assert descriptors() == before


def missing(laid: Laid) -> Any:
    place = laid.files[-1].find()
    return place._replace(file=Path(str(place.file) + "-gone"))


@pytest.mark.parametrize("change", [None, refuse_ring])
def test_closing_while_reading(tmp_path: Path, change: Change | None) -> None:
    """The reading ends with an error, and closing returns when nobody reads any more."""
    laid = lay_plainly(tmp_path, 2000, 5000)
    reached, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def wait(*answer: Any) -> int:
        reached.set()
        go_on.wait(20)
        return change(*answer) if change else answer[-1]

    opened = open_table(laid, change=wait, depth=4)

    def read() -> None:
        with pytest.raises(ClosedError):
            opened.gather(np.arange(0, 2000, 2))
        order.append("read")

    def close() -> None:
        opened.close()
        order.append("closed")

    threads = [threading.Thread(target=read), threading.Thread(target=close), threading.Thread(target=read)]
    threads[0].start()
    assert reached.wait(20)
    threads[1].start()
    for _ in range(20_000):
        if is_stopping(opened):
            break
        time.sleep(0.001)
    threads[2].start()
    assert order == []
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert sorted(order) == ["closed", "read", "read"]
    assert order[0] == "read"


def is_stopping(opened: DiskRowTable) -> bool:
    return opened._reader is None or opened._reader.stopping


@pytest.mark.parametrize("change", [None, refuse_ring])
def test_several_threads(laid: Laid, change: Change | None) -> None:
    with open_table(laid, change=change, depth=8) as opened:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for n in (1, 16, 300, 16):
                check_rows(opened, laid.rows, rng.integers(0, ROWS, n))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(16)))


def test_others_run_while_rows_are_read(tmp_path: Path) -> None:
    """The reader has no use for the interpreter's lock, neither sorting nor waiting."""
    laid = lay_plainly(tmp_path, 1000, 8)
    ids = np.random.default_rng(0).integers(0, 1000, 6 * SORTED)
    state: list[str] = []
    with open_table(laid) as opened:
        opened.gather(ids[:SORTED])

        def read() -> None:
            state.append("reads")
            opened._reader.gather(ids, out)  # type: ignore[union-attr]
            state.append("done")

        out = np.empty(ids.size * 8, np.uint8)
        thread = threading.Thread(target=read)
        thread.start()
        seen = 0
        while state[-1:] != ["done"]:
            seen += state[-1:] == ["reads"]
            time.sleep(0.0005)
        thread.join()
    assert seen > 4, "a thread that kept the lock would be seen at most when it begins"


@needs_linux
@pytest.mark.parametrize("change", [None, refuse_ring])
def test_a_forked_child_is_refused_and_ends(laid: Laid, change: Change | None) -> None:
    opened = open_table(laid, change=change)
    check_rows(opened, laid.rows, np.arange(0, ROWS, 50))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            opened.gather([0])
        except UnsupportedError as error:
            os.write(write, str(error).encode())
        opened.close()
        del opened
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        assert b"before a fork" in stream.read()
    assert os.waitpid(child, 0)[1] == 0
    check_rows(opened, laid.rows, np.arange(0, ROWS, 50))
    opened.close()


# --- duties -----------------------------------------------------------------------------------------------------------


def test_a_duty_reads_the_ids_that_are_there_when_it_runs(laid: Laid) -> None:
    ids, out = np.full((2, 4), -5), np.zeros((2, 4, ROW_BYTES), np.uint8)
    scales = np.zeros((2, 4), np.float32)
    with open_table(laid, scale=0.5) as opened:
        duty = opened.stage(ids, out, scales)
        for seed in range(3):
            ids[...] = np.random.default_rng(seed).integers(0, ROWS, (2, 4))
            assert in_thread(duty) is None
            np.testing.assert_array_equal(out, laid.rows[ids])
            assert (scales == 0.5).all()
        ids[1, 2] = ROWS
        with pytest.raises(RowError, match="id 6 of those"):
            duty()


def test_what_cannot_be_staged(laid: Laid) -> None:
    ids, out = np.zeros(4, np.int64), np.zeros((4, ROW_BYTES), np.uint8)
    with open_table(laid) as opened:
        for wrong in (ids.astype(np.int32), np.zeros(8, np.int64)[::2]):
            with pytest.raises(ValueError, match="expected C-contiguous int64"):
                opened.stage(wrong, out)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="out for rows"):
            opened.stage(ids, out[:3])
        with pytest.raises(ValueError, match="out for scales"):
            opened.stage(ids, out, np.zeros(3, np.float32))


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_bytes", [1, 160, 30_000, 1 << 20, table.MAX_ROW_BYTES])
@pytest.mark.parametrize("depth", [1, 256, 4096])
def test_memory_is_bounded(tmp_path: Path, row_bytes: int, depth: int) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as stream:
        stream.truncate(3 * row_bytes)
    with DiskRowTable.open([RowFile(path)], 3, row_bytes, "U8", depth=depth) as opened:
        opened.gather(np.zeros(SORTED + 1 if row_bytes == 1 else 2, np.int64))
        assert opened.held_bytes <= RAM
        assert opened.held_bytes + 2 * SORTED * 16 <= RAM or row_bytes == 1, "with as many ids as are sorted at once"


GROWS = """
import sys
from pathlib import Path
import numpy as np
from freetoken.rows import DiskRowTable, RowFile

def held(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) << 10

rows = int(sys.argv[2])
ids = np.random.default_rng(0).integers(0, rows, 3 << 20)
out = np.ones((ids.size, 8), np.uint8)
table = DiskRowTable.open([RowFile(sys.argv[1])], rows, 8, "U64")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM is counted from here on
before = held("VmRSS")
table.gather(ids, out)
assert (out.view(np.uint64)[:, 0] == ids.view(np.uint64)).all(), "wrong rows"
print(held("VmHWM") - before, table.held_bytes)
"""


@needs_linux
def test_memory_while_very_many_rows_are_read(tmp_path: Path) -> None:
    """3 Mi ids, which would take 48 MiB twice if they were sorted at once: 24 MB of rows are read for them."""
    rows = 1 << 20
    np.arange(rows, dtype=np.uint64).tofile(tmp_path / "rows")
    done = subprocess.run(
        [sys.executable, "-c", GROWS, str(tmp_path / "rows"), str(rows)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, held = map(int, done.stdout.split())
    assert grown <= RAM
    assert held <= RAM


def test_ids_that_others_write_while_they_are_read(tmp_path: Path) -> None:
    """Too many to be copied: an error, and no row from outside the table."""
    laid = lay_plainly(tmp_path, 1000, 64)
    ids = np.random.default_rng(0).integers(0, 1000, SORTED + 1)

    def change(way: str, direct: bool, offset: int, nbytes: int, result: int) -> int:
        ids[...] = 2**62
        return result

    with open_table(laid, change=change) as opened, pytest.raises(FreeTokenError, match="others wrote to them"):
        opened.gather(ids)


# --- what cannot be opened --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "message"), [
    ({"rows": ROWS + 1}, f"which is {ROWS} rows of 160; expected {ROWS + 1} rows"),
    ({"rows": ROWS - 1}, f"expected {ROWS - 1} rows"),
    ({"row_bytes": 100}, "expected whole rows of 100: pass cut=True"),
    ({"rows": 0}, "rows must be a positive multiple of 1"),
    ({"rows": 2**60}, r"all bytes fewer than 2\*\*62"),
    ({"row_bytes": 0}, "row_bytes must be a positive multiple of 1"),
    ({"row_bytes": 161, "dtype": "BF16"}, "row_bytes must be a positive multiple of 2"),
    ({"dtype": "F9"}, "rows of dtype 'F9' are not known: choose one of BOOL"),
    ({"scale": float("nan")}, "has the scale nan, expected a finite number"),
    ({"scale": 0.0}, "has the scale 0.0"),
    ({"scale": "weight_scale"}, "rows in plain files have none beside them"),
    ({"depth": 0}, "depth=0 is not from 1 to 4096"),
])  # fmt: skip
def test_what_cannot_be_a_table(laid: Laid, arguments: dict[str, Any], message: str) -> None:
    wanted = {"rows": ROWS, "row_bytes": ROW_BYTES, "dtype": "U8", **arguments}
    with pytest.raises(FreeTokenError, match=message):
        DiskRowTable.open(laid.files, **wanted)


def test_rows_that_are_too_long(tmp_path: Path) -> None:
    row_bytes = table.MAX_ROW_BYTES + 1
    with (tmp_path / "f").open("wb") as stream:
        stream.truncate(row_bytes)
    with pytest.raises(UnsupportedError, match="at most 8388608 are read from disk"):
        DiskRowTable.open([RowFile(tmp_path / "f")], 1, row_bytes, "U8")


def test_no_files() -> None:
    with pytest.raises(CheckpointError, match=r"a table without files has 0 bytes in 0 part\(s\)"):
        DiskRowTable.open([], 1, 1, "U8")
    with pytest.raises(ConfigError):
        DiskRowTable.open([], 0, 1, "U8")
