"""The job of one layer cut into shards, and the one function that does it."""
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport uint64_t

from freetoken.kernels._experts cimport ft_barrier, job


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
