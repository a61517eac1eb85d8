"""The job of one layer and the one function that does it; any team of threads may call it."""
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int32_t, uint8_t, uint16_t

from freetoken.kernels._isa cimport ft_kernel


cdef extern from "barrier.h" nogil:
    ctypedef struct ft_barrier:
        pass
    void ft_barrier_wait(ft_barrier *b, int n)


cdef extern from "queue.h" nogil:
    ctypedef struct ft_queue:
        pass
    void ft_queue_fill(ft_queue *q, ptrdiff_t start, ptrdiff_t end)
    ptrdiff_t ft_queue_take(ft_queue *q)


cdef enum:
    SILU = 0    # g * sigmoid(g) * u
    SWIGLU_CLAMPED = 1  # min(g, limit) * sigmoid(alpha * g) * (clamp(u, +-limit) + 1)
    SILU_LIMITED = 2    # min(g, limit) * sigmoid(g) * clamp(u, +-limit)


cdef enum:
    ROUND_NONE = 0
    ROUND_BF16 = 1      # in fp32 vectors; bf16 vectors are so by themselves
    ROUND_FP8 = 2       # e4m3 times a power of two, which fp32 and bf16 vectors hold exactly


cdef struct matrix:
    # One matrix (or the gate and up pair) of a record.
    ptrdiff_t offset, globals_offset, bias_offset   # from the record's start; bias -1: none
    ptrdiff_t tile_bytes, tiles, rows, k            # rows before padding; weights along the input dimension
    ptrdiff_t vector_bytes                          # one prepared input vector


cdef struct job:
    # Weights: set once for a bank.
    const uint8_t *bank
    ptrdiff_t record_bytes
    matrix gate_up, down
    ft_kernel kernel
    ptrdiff_t block, line                           # weights along K in a block, in a line
    ptrdiff_t unit                                  # activations that stay together when work is shared out
    int rounding                                    # of activations before they are prepared
    int activation
    float alpha, limit
    # Routes, sorted by expert: group g holds routes [start[g], start[g + 1]) of expert[g]. Where `kernel` takes many, a
    # group has at most so many, and an expert may have several.
    ptrdiff_t tokens, routes, groups
    const int32_t *expert
    const int32_t *start
    const int32_t *token
    const float *weight
    int32_t *ends           # of each expert's routes
    # Input and output, (tokens, H), bf16 or fp32.
    const void *x
    void *y
    bint x_bf16, y_bf16
    # Scratch.
    uint8_t *prepared       # tokens x gate_up.vector_bytes
    uint8_t *prepared_many  # the same as the tile function for many wants them; `prepared` if that is the same
    uint8_t *hidden         # routes x down.vector_bytes
    float *sums             # for each thread: tokens x a run of tiles x 16
    ptrdiff_t sums_stride
    float *rows             # for each thread: H floats, or a chunk of as many tokens as one call takes
    ptrdiff_t rows_stride
    uint8_t *panels         # for each thread, if `kernel` takes many: a group's prepared vectors, one after the other
    ft_queue *queues        # two for each thread: its chunks of gate and up, its tiles of down
    ft_barrier barrier


cdef uint8_t *first_line(uint8_t *data) noexcept nogil


cdef class Block:
    cdef uint8_t *data


cdef class Scratch:
    cdef uint8_t *data
    cdef size_t size
    cdef Block block
    cdef list left          # blocks that somebody may still look at; None: nobody does
    cdef uint8_t *reserve(self, size_t size) except NULL
    cdef void keep(self)


cdef class ExpertLayer:
    cdef job template
    cdef object owner
    cdef readonly Py_ssize_t n_experts
    cdef readonly Py_ssize_t hidden
    cdef void describe(self, matrix *m, object layout, str name, ptrdiff_t rows, ptrdiff_t k)


cdef void layer(job *j, int thread, int n_threads) noexcept nogil

# What it consists of.
cdef void share_out(job *j, int thread, int n_threads) noexcept nogil
cdef void prepare_tokens(const job *j, int thread, int n_threads) noexcept nogil
cdef void gate_up(job *j, int thread, int n_threads) noexcept nogil
cdef void down(job *j, int thread, int n_threads) noexcept nogil


cdef struct room:
    # Scratch that is being cut into buffers: measured first (base NULL), then handed out.
    uint8_t *base
    size_t used
    int passes


# A call: its input is checked, its scratch measured and handed out, its routes are sorted.
cdef bint set_input(
    job *j, Py_ssize_t hidden, x, const int32_t[:, ::1] ids, const float[:, ::1] weights, out, int n_threads
) except -1
cdef bint take_all(room *r, Scratch scratch) except -1
cdef uint8_t *take(room *r, size_t nbytes) noexcept nogil
cdef void take_common(room *r, job *j, size_t routes, size_t experts) noexcept nogil
cdef void take_own(room *r, job *j, size_t routes, int n_threads) noexcept nogil
cdef void cut_room(room *r, job *j, size_t routes, size_t experts, int n_threads) noexcept nogil
cdef int sort_routes(job *j, const int32_t[:, ::1] ids, const float[:, ::1] weights, size_t experts) except -1
cdef void sort_by_expert(
    job *j, const int32_t *ids, const float *weights, ptrdiff_t tokens, ptrdiff_t k, ptrdiff_t experts
) noexcept nogil
