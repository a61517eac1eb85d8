"""Memory read by a team of threads, plainly or by a tile function: what a machine gives, for benchmarks and plans."""
from cython.parallel cimport prange
from libc.stdint cimport uint8_t, uint64_t

from freetoken.kernels._isa cimport TileKernel, ft_tile

cdef extern from "read.h" nogil:
    enum:
        FT_READ_PLAIN
        FT_READ_PREFETCH
        FT_READ_STREAMS
        FT_READ_STEP
    ctypedef uint64_t (*ft_read)(const uint8_t *p, ptrdiff_t n, int way)
    ft_read ft_read_best()

cdef dict NUMBERS = {"plain": FT_READ_PLAIN, "prefetch": FT_READ_PREFETCH, "streams": FT_READ_STREAMS}
WAYS = tuple(NUMBERS)
STEP = 4 * FT_READ_STEP

cdef enum:
    PIECE = 1 << 20


def read(const uint8_t[::1] memory, str way, int n_threads):
    """Read (n,) uint8, n a multiple of `STEP`, once, with `n_threads` threads; way: one of `WAYS`.

    Threads take pieces of 1 MiB turn by turn: cores are not equally fast, and with equal shares all wait for the
    slowest (16 Xeon cores: 102 against 150 GB/s). Returns the sum of its bytes taken as 64-bit numbers, modulo 2**64.
    The GIL is released.
    """
    if way not in NUMBERS:
        raise ValueError(f"unknown way {way!r}, expected one of {', '.join(WAYS)}")
    if memory.shape[0] % STEP or n_threads < 1:
        raise ValueError(f"{memory.shape[0]} bytes, {n_threads} threads: expected a multiple of {STEP} and at least 1")
    if memory.shape[0] == 0:
        return 0
    cdef int number = NUMBERS[way]
    cdef ft_read best = ft_read_best()
    cdef const uint8_t *p = &memory[0]
    cdef ptrdiff_t size = memory.shape[0], i
    cdef uint64_t total = 0
    for i in prange((size + PIECE - 1) // PIECE, nogil=True, num_threads=n_threads, schedule="dynamic"):
        total += best(p + i * PIECE, min(<ptrdiff_t> PIECE, size - i * PIECE), number)
    return total


def multiply(
    const uint8_t[:, ::1] records, offset_and_size, fmt, ptrdiff_t k, TileKernel kernel not None,
    const uint8_t[::1] vector, int n_threads,
):
    """Multiply all tiles of a section of every record with one vector: a tile function's bare loop.

    records: (E, record_bytes) uint8. offset_and_size: of a section of whole tiles in `fmt`, k weights wide. vector: as
    `kernel` wants it (isa.h), at least 4 k bytes. Threads take pieces as in `read`. Returns the sum of all results.
    """
    cdef ptrdiff_t offset, size, tile_bytes = fmt.tile_bytes(k)
    offset, size = offset_and_size
    if fmt.kernels != kernel.format:
        raise ValueError(f"{kernel!r} cannot read tiles of {fmt.name}")
    if offset < 0 or size <= 0 or size % tile_bytes or offset + size > records.shape[1]:
        raise ValueError(
            f"[{offset}, {offset + size}) of {records.shape[1]} bytes, expected whole tiles of {tile_bytes}"
        )
    if vector.shape[0] < 4 * k or n_threads < 1:
        raise ValueError(f"a vector of {vector.shape[0]} bytes, {n_threads} threads: expected {4 * k} and at least 1")
    cdef ptrdiff_t tiles = size // tile_bytes, at_once = max(<ptrdiff_t> 1, <ptrdiff_t> PIECE // tile_bytes)
    cdef ptrdiff_t pieces = (tiles + at_once - 1) // at_once, i
    cdef const uint8_t *first = &records[0, 0] + offset
    cdef ptrdiff_t record_bytes = records.shape[1]
    cdef double total = 0
    for i in prange(records.shape[0] * pieces, nogil=True, num_threads=n_threads, schedule="dynamic"):
        total += multiply_tiles(
            kernel.entry.tile, first + i // pieces * record_bytes + i % pieces * at_once * tile_bytes, tile_bytes,
            min(at_once, tiles - i % pieces * at_once), k, &vector[0],
        )
    return total


cdef double multiply_tiles(
    ft_tile tile, const uint8_t *w, ptrdiff_t tile_bytes, ptrdiff_t n, ptrdiff_t k, const void *x
) noexcept nogil:
    cdef float y[16]
    cdef double total = 0
    cdef ptrdiff_t t
    cdef int i
    for t in range(n):
        tile(w + t * tile_bytes, k, x, y)
        for i in range(16):
            total += y[i]
    return total
