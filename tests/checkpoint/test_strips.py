"""Experts permuted on their way from a file: the very bytes that reading and packing them gives, cached or not."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from freetoken import formats
from freetoken.checkpoint.direct import read_direct
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.checkpoint.safetensors import TensorInfo, read_exactly
from freetoken.checkpoint.strips import StoredExpert, StoredRows, look_alarming, write_stored
from freetoken.errors import CheckpointError
from freetoken.formats.base import Matrix
from freetoken.formats.record import Expert, RecordLayout, shard_bounds
from tests.support.checkpoints import DIALECTS, write_qwen3
from tests.support.experts import make_expert
from tests.support.gguf import EXACT, ggml_blocks
from tests.support.seccomp import refuse_calls

LONG_ROWS = (200_000, 18)
"""Rows of 400 kB in bf16: 16 or 32 of them are more than a window usually holds."""
SHAPES = [(64, 32), (128, 48), (192, 160), (320, 2048 + 32)]
ODD = {"bf16": [(90, 22), (34, 88), (6, 2), LONG_ROWS], "fp8_block": [(132, 88), (64, 20), (300, 264)]}
"""Widths that end inside a tile, a vector or a block."""


class Store:
    """Puts arrays into files of a folder, behind some bytes that make everything lie on odd places."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.n = 0

    def put(self, *arrays: NDArray[np.generic], odd: int = 7) -> list[TensorInfo]:
        """One file with all of them, one after the other."""
        self.n += 1
        file, infos, at = self.folder / f"{self.n}.bin", [], odd
        for array in arrays:
            infos.append(TensorInfo(f"t{self.n}.{len(infos)}", "U8", array.shape, file, at, array.nbytes))
            at += array.nbytes
        file.write_bytes(b"\xa5" * odd + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))
        return infos


def separate(store: Store, name: str, matrix: Matrix) -> StoredRows:
    (codes,) = store.put(matrix.codes)
    if matrix.scales is None:
        return StoredRows(name, codes, codes.offset)
    (scales,) = store.put(matrix.scales)
    return StoredRows(name, codes, codes.offset, scales, scales.offset)


def in_one_file(store: Store, name: str, matrix: Matrix) -> StoredRows:
    if matrix.scales is None:
        return separate(store, name, matrix)
    scales, codes = store.put(matrix.scales, matrix.codes)
    return StoredRows(name, codes, codes.offset, scales, scales.offset)


def in_memory(store: Store, name: str, matrix: Matrix) -> StoredRows:
    (codes,) = store.put(matrix.codes)
    return StoredRows(name, codes, codes.offset, values=matrix.scales)


def inline(store: Store, name: str, matrix: Matrix) -> StoredRows:
    (codes,) = store.put(ggml_blocks(matrix))
    return StoredRows(name, codes, codes.offset, halves=matrix.format.bits == 4)


def alternating(one: NDArray[np.generic], other: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.stack([one, other], axis=1).reshape(-1, one.shape[1])


def store_expert(store: Store, expert: Expert, how: str) -> StoredExpert:
    put = {"separate": separate, "in one file": in_one_file, "in memory": in_memory, "inline": inline}
    parts: list[tuple[str, Matrix]] = [("gate", expert.gate), ("up", expert.up), ("down", expert.down)]
    if how == "alternating":
        gate, up = expert.gate, expert.up
        scales = None if gate.scales is None or up.scales is None else alternating(gate.scales, up.scales)
        both = replace(gate, codes=alternating(gate.codes, up.codes), scales=scales)
        parts = [("gate_up", both), ("down", expert.down)]
    rows = tuple(put.get(how, separate)(store, name, matrix) for name, matrix in parts)
    return StoredExpert(
        rows,
        (expert.gate.global_scale, expert.up.global_scale, expert.down.global_scale),
        expert.gate.divides,
        (expert.gate_bias, expert.up_bias, expert.down_bias),
    )


def packed(layout: RecordLayout, expert: Expert) -> NDArray[np.uint8]:
    out = np.full(layout.nbytes, 0xEE, np.uint8)
    layout.pack(expert, out)
    return out


def permuted(
    stored: list[StoredExpert], whole: RecordLayout, layout: RecordLayout, start: int = 0
) -> NDArray[np.uint8]:
    out = np.full((len(stored), layout.nbytes), 0x5A, np.uint8)
    assert write_stored(stored, whole, layout, start, out)
    return out


def cases() -> Iterator[tuple[str, str, tuple[int, int]]]:
    for name in formats.names():
        ways = ["separate", "in one file", "in memory", "alternating"]
        if formats.get(name).scale_dtype is None:
            ways = ["separate", "alternating"]
        if name in EXACT and name != "bf16":
            ways.append("inline")
        for how in ways:
            for shape in SHAPES + (ODD.get(name, []) if how != "inline" else []):
                if shape[1] % formats.get(name).width_step:
                    continue
                yield name, how, shape


@pytest.mark.parametrize(("name", "how", "shape"), list(cases()))
def test_records_are_those_that_packing_makes(tmp_path: Path, name: str, how: str, shape: tuple[int, int]) -> None:
    layout = RecordLayout(formats.get(name), *shape, bias=shape == SHAPES[1])
    experts = [make_expert(layout.format, *shape, bias=layout.bias, seed=n) for n in range(2)]
    store = Store(tmp_path)
    both = [store_expert(store, expert, how) for expert in experts]
    for record, expert in zip(permuted(both, layout, layout), experts, strict=True):
        np.testing.assert_array_equal(record, packed(layout, expert))
    granules = -(-shape[1] // layout.format.granule)
    for start, stop in shard_bounds(layout.format, shape[1], min(3, granules)):
        small = RecordLayout(layout.format, shape[0], stop - start, layout.bias)
        for record, expert in zip(permuted(both, layout, small, start), experts, strict=True):
            np.testing.assert_array_equal(record, packed(small, expert.shard(start, stop)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_permuted(tmp_path: Path, dialect: str) -> None:
    """The quick way is taken, and finds what the plain way reads."""
    for group in scan_any(open_any(write_qwen3(tmp_path / "m", dialect))).groups:
        layout = group.layout()
        stored = [group.stored(e) for e in range(group.n_experts)]
        records = permuted([s for s in stored if s is not None], layout, layout)
        assert len(records) == group.n_experts
        for e, record in enumerate(records):
            np.testing.assert_array_equal(record, packed(layout, group.read(e)))


PERMUTED = {
    "bf16-transformers-deepseekv3": True,
    "bf16-transformers-gptoss": False,  # transposed
    "bf16-transformers-mixtral": True,
    "bf16-transformers-qwen3moe": True,
    "fp4-deepseekv4-constructed": True,
    "fp8block-transformers-qwen3moe256": True,
    "mxfp4-native-gptoss-repacked": True,
    "mxfp4a16-llmcompressor-qwen3moe": True,
    "nvfp4-llmcompressor-qwen3moe": True,
    "nvfp4-modelopt-qwen3moe": True,
}


@pytest.mark.parametrize("name", PERMUTED)
def test_what_real_tools_wrote(shared_dir: Path, name: str) -> None:
    for group in scan_any(open_any(shared_dir / "checkpoints" / name)).groups:
        layout = group.layout()
        stored = [s for s in map(group.stored, range(group.n_experts)) if s is not None]
        assert len(stored) == (group.n_experts if PERMUTED[name] else 0)
        if stored:
            for e, record in enumerate(permuted(stored, layout, layout)):
                np.testing.assert_array_equal(record, packed(layout, group.read(e)))


# --- what is no number -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", formats.names())
def test_no_number_without_an_alarm(name: str) -> None:
    """Of all codes and all scales, those without alarm bits are fine, and some with them are not."""
    fmt = formats.get(name)
    width = fmt.line_k * 4 if fmt.scale_dtype is None else fmt.block
    if fmt.bits >= 8:
        codes = np.arange(1 << fmt.bits, dtype=np.uint16 if fmt.bits == 16 else np.uint8)
        bad = {int(c) for c in codes if check(fmt, width, code=int(c))}
        alarming = {int(c) for c in codes if fmt.code_alarm and (c & fmt.code_alarm) == fmt.code_alarm}
        assert bad == alarming
    if fmt.scale_dtype is not None:
        scales = range(0, 1 << 8 * fmt.scale_bytes, 1 if fmt.scale_bytes < 4 else 0xFFFF)  # of fp32 some
        bad = {s for s in scales if check(fmt, width, scale=s)}
        alarming = {s for s in scales if any(s & bits == bits for bits in fmt.scale_alarms)}
        assert bad <= alarming
        assert bad


def check(fmt: formats.Format, width: int, code: int | None = None, scale: int | None = None) -> str | None:
    codes = np.zeros((1, width * fmt.bits // 8), np.uint8)
    if code is not None:
        codes.view(np.uint16 if fmt.bits == 16 else np.uint8)[0, -1] = code
    scales = None if fmt.scale_dtype is None else np.zeros((1, fmt.n_blocks(width)), fmt.scale_dtype)
    if scale is not None and scales is not None:
        scales[0, -1] = scale
    return fmt.find_bad(Matrix(fmt, codes, scales))


@pytest.mark.parametrize(
    ("name", "how", "shape"), [case for case in cases() if case[2] not in (SHAPES[1], SHAPES[3], LONG_ROWS)]
)
@pytest.mark.parametrize("where", ["first", "last"])
def test_alarms_are_seen_wherever_they_are(
    tmp_path: Path, name: str, how: str, shape: tuple[int, int], where: str
) -> None:
    layout, fmt = RecordLayout(formats.get(name), *shape), formats.get(name)
    at = (0, 0) if where == "first" else (-1, -1)
    spoilt = []
    if fmt.code_alarm:
        spoilt.append(("codes", fmt.code_alarm, np.uint16 if fmt.bits == 16 else np.uint8))
    spoilt += [("scales", bits, fmt.scale_dtype) for bits in fmt.scale_alarms]
    for kind, bits, dtype in spoilt:
        for matrix in ("gate", "up", "down"):
            expert = make_expert(fmt, *shape)
            array = getattr(getattr(expert, matrix), kind).copy()
            array.view(dtype)[at] = bits
            expert = replace(expert, **{matrix: replace(getattr(expert, matrix), **{kind: array})})
            stored = store_expert(Store(tmp_path), expert, how)
            assert not write_stored([stored], layout, layout, 0, np.empty((1, layout.nbytes), np.uint8))


def test_a_global_scale_that_is_no_number(tmp_path: Path) -> None:
    layout = RecordLayout(formats.get("nvfp4"), *SHAPES[0])
    stored = store_expert(Store(tmp_path), make_expert(layout.format, *SHAPES[0]), "separate")
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        damaged = replace(stored, factors=(1.0, factor, 1.0))
        assert not write_stored([damaged], layout, layout, 0, np.empty((1, layout.nbytes), np.uint8))


def test_a_look_at_scales_finds_the_last_byte(tmp_path: Path) -> None:
    fmt, rng = formats.get("nvfp4"), np.random.default_rng(0)
    arrays, store = [rng.integers(0, 0x7F, n, np.uint8) for n in (1, 15, 16, 300_001)], Store(tmp_path)
    infos = [info for _ in range(2) for info in store.put(*arrays)]
    assert not look_alarming(infos, fmt)
    for info in infos:
        put_byte(info, 0xFF)
        assert look_alarming([info], fmt)
        assert look_alarming(infos[::-1], fmt)
        assert not look_alarming([other for other in infos if other is not info], fmt)  # with a gap
        put_byte(info, 0)
    os.truncate(infos[7].file, infos[7].offset + 9)
    with pytest.raises(CheckpointError, match=f"ended while tensor '{infos[7].name}' was read"):
        look_alarming([infos[4], infos[7]], fmt)


def put_byte(info: TensorInfo, value: int) -> None:
    """As the last of a tensor."""
    with info.file.open("r+b") as stream:
        stream.seek(info.offset + info.nbytes - 1)
        stream.write(bytes([value]))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_tensors_in_any_order(tmp_path: Path, seed: int) -> None:
    """In one file, with gaps or without, codes and scales forwards and backwards."""
    rng = np.random.default_rng(seed)
    layout = RecordLayout(formats.get("nvfp4"), *SHAPES[2])
    experts = [make_expert(layout.format, *SHAPES[2], seed=n) for n in range(3)]
    names = [(e, name) for e in range(3) for name in ("gate", "up", "down")]
    arrays = {
        (e, name, kind): getattr(getattr(experts[e], name), kind) for e, name in names for kind in ("codes", "scales")
    }
    gaps = {(at,): np.full(rng.integers(1, 9000), 0xFF, np.uint8) for at in range(seed % 3)}
    keys = [(*arrays, *gaps)[n] for n in rng.permutation(len(arrays) + len(gaps))]
    infos = dict(zip(keys, Store(tmp_path).put(*((arrays | gaps)[key] for key in keys)), strict=True))

    def rows(e: int, name: str) -> StoredRows:
        codes, scales = infos[e, name, "codes"], infos[e, name, "scales"]
        return StoredRows(name, codes, codes.offset, scales, scales.offset)

    stored = [
        StoredExpert(
            tuple(rows(e, name) for name in ("gate", "up", "down")),
            (expert.gate.global_scale, expert.up.global_scale, expert.down.global_scale),
        )
        for e, expert in enumerate(experts)
    ]
    for record, expert in zip(permuted(stored, layout, layout), experts, strict=True):
        np.testing.assert_array_equal(record, packed(layout, expert))


def test_a_file_that_changed_is_read_anew(tmp_path: Path) -> None:
    layout = RecordLayout(formats.get("bf16"), *SHAPES[0])
    at, size = layout.sections["down"]
    for seed in range(2):
        expert = make_expert(layout.format, *SHAPES[0], seed=seed)
        (info,) = Store(tmp_path).put(expert.down.codes)  # a file of the same name
        only = StoredExpert((StoredRows("down", info, info.offset),))
        record = permuted([only], layout, layout)[0]
        np.testing.assert_array_equal(record[at : at + size], packed(layout, expert)[at : at + size])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("read", ["permuted", "looked at", "plainly", "directly"])
def test_a_file_that_became_a_pipe_is_not_waited_for(tmp_path: Path, read: str) -> None:
    layout = RecordLayout(formats.get("nvfp4"), *SHAPES[0])
    stored = store_expert(Store(tmp_path), make_expert(layout.format, *SHAPES[0]), "separate")
    info, out = stored.rows[0].codes, np.empty((1, layout.nbytes), np.uint8)
    info.file.unlink()
    os.mkfifo(info.file)
    ways: dict[str, Callable[[], object]] = {
        "permuted": lambda: write_stored([stored], layout, layout, 0, out),
        "looked at": lambda: look_alarming([info], layout.format),
        "plainly": lambda: read_exactly(info, info.offset, out[0]),
        "directly": lambda: read_direct(info, info.offset, out[0]),
    }
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ways[read])
        try:
            with pytest.raises(CheckpointError, match=f"tensor '{info.name}' cannot be read: Illegal seek"):
                future.result(timeout=60)
        finally:
            if not future.done():  # let it go
                os.close(os.open(info.file, os.O_WRONLY))


LARGE = (1024, 2048)
"""Experts of 12 MiB in bf16: several windows of 4 MiB."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Expert], list[StoredExpert]]:
    """Two experts in one file, codes and scales of both side by side as safetensors have them."""
    experts = [make_expert(formats.get("q8_0"), *LARGE, seed=n) for n in range(2)]
    matrices = [matrix for expert in experts for matrix in (expert.gate, expert.up, expert.down)]
    codes = [matrix.codes for matrix in matrices]
    scales = [matrix.scales for matrix in matrices if matrix.scales is not None]
    infos = Store(tmp_path_factory.mktemp("large")).put(*codes, *scales, odd=4000)
    rows = [
        StoredRows(name, infos[n], infos[n].offset, infos[n + 6], infos[n + 6].offset)
        for n, name in enumerate(("gate", "up", "down") * 2)
    ]
    fd = os.open(infos[0].file, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return experts, [StoredExpert(tuple(rows[:3])), StoredExpert(tuple(rows[3:]))]


def cached_share(file: Path) -> float:
    """How much of a file is in the page cache (mincore(2))."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        pages = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapping, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(*map(ctypes.c_void_p, (view.ctypes.data, len(mapping), pages.ctypes.data)))
        del view
        if failed:
            pytest.skip("this system does not say what is cached")
        return float((pages & 1).mean())


def set_cached(file: Path, nbytes: int) -> None:
    """Have the first bytes of a file in the page cache, no others."""
    with file.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        stream.read(nbytes)


def check_large(large: tuple[list[Expert], list[StoredExpert]]) -> None:
    experts, stored = large
    layout = RecordLayout(formats.get("q8_0"), *LARGE)
    for record, expert in zip(permuted(stored, layout, layout), experts, strict=True):
        np.testing.assert_array_equal(record, packed(layout, expert))


needs_fadvise = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot empty its cache")


@needs_fadvise
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.9, 1])
def test_cached_or_not(large: tuple[list[Expert], list[StoredExpert]], share: float) -> None:
    """What is cached stays so, and what is not does not get there."""
    file = large[1][0].rows[0].codes.file
    set_cached(file, int(file.stat().st_size * share))
    before = cached_share(file)
    if not share * 0.9 <= before <= share * 1.1 + 0.01:
        pytest.skip(f"the page cache keeps what it wants: {before:.0%} of the file, not {share:.0%}")
    check_large(large)
    if can_tell(file):
        assert before * 0.99 <= cached_share(file) <= before + 0.1


def can_tell(file: Path) -> bool:
    """Whether direct reads and reads of what is cached are to be had."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        os.close(fd)
        with file.open("rb") as stream:
            os.preadv(stream.fileno(), [bytearray(16)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except (AttributeError, OSError):
        return False
    return True


@needs_fadvise
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="calls have other numbers")
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM])
def test_a_system_that_does_not_tell_what_is_cached(
    large: tuple[list[Expert], list[StoredExpert]], number: int
) -> None:
    set_cached(large[1][0].rows[0].codes.file, 0)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            refuse_calls([{"x86_64": 327, "aarch64": 287}[platform.machine()]], number)  # preadv2
            check_large(large)
        except BaseException as error:  # noqa: BLE001 shown by the thread that waits
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("of_scales", [True, False])
def test_a_file_that_ends_early(tmp_path: Path, cached: bool, of_scales: bool) -> None:
    layout = RecordLayout(formats.get("nvfp4"), *SHAPES[2])
    stored = store_expert(Store(tmp_path), make_expert(layout.format, *SHAPES[2]), "separate")
    info = stored.rows[1].scales if of_scales else stored.rows[1].codes
    assert info is not None
    os.truncate(info.file, info.offset + info.nbytes - 1)
    if not cached and hasattr(os, "posix_fadvise"):
        set_cached(info.file, 0)
    out = np.empty((1, layout.nbytes), np.uint8)
    with pytest.raises(CheckpointError, match=f"ended while tensor '{info.name}' was read"):
        write_stored([stored], layout, layout, 0, out)
    info.file.unlink()
    with pytest.raises(CheckpointError, match=f"tensor '{info.name}' cannot be read: No such file"):
        write_stored([stored], layout, layout, 0, out)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(20):
        with pytest.raises(CheckpointError):
            write_stored([stored], layout, layout, 0, out)
    assert before == (len(os.listdir("/proc/self/fd")) if before else 0)
