"""The job of one layer cut into shards, and the one function that does it."""
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int32_t, uint64_t

from freetoken.kernels._experts cimport ft_barrier, job, room


cdef struct sharded_job:
    # The same routes through each shard; what the shards give adds up.
    ptrdiff_t shards
    job *jobs               # their y: (tokens, H) fp32 each
    void *y
    bint y_bf16
    # The team: thread t is the rank[t]-th of the size[shard] threads of shard[t].
    int threads
    const int *shard
    const int *rank
    const int *size
    # Where it stays: a mask of CPUs for each thread, and its key; key 0 leaves a thread alone.
    const uint64_t *masks
    ptrdiff_t mask_words
    const uint64_t *keys
    ft_barrier barrier


cdef void sharded_layer(sharded_job *s, int thread, int n_threads) noexcept nogil
cdef void cut_sharded_room(room *r, sharded_job *s, size_t routes, size_t experts, int n_threads) noexcept nogil
cdef void share_routes(sharded_job *s) noexcept nogil


cdef class ShardedLayer:
    cdef tuple layers
    cdef sharded_job template
    cdef int *numbers           # shard, rank and size
    cdef uint64_t *masks
    cdef uint64_t *keys
    cdef readonly Py_ssize_t n_experts
    cdef readonly Py_ssize_t hidden
    cdef bint begin(
        self, sharded_job *s, x, const int32_t[:, ::1] ids, const float[:, ::1] weights, out, int n_threads
    ) except -1
