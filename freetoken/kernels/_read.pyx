"""Plain reads of memory by a team of threads: what a machine's memory gives, for benchmarks and plans."""
from cython.parallel cimport prange
from libc.stdint cimport uint8_t, uint64_t

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
