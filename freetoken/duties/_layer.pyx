"""A layer of experts as a duty: input and output stay where they are, and a team computes it without Python."""
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from freetoken.duties._worker cimport TeamWork
from freetoken.kernels._experts cimport (
    ExpertLayer, Scratch, cut_room, first_line, job, layer, room, set_input, sort_by_expert, take,
)
from freetoken.kernels._shards cimport ShardedLayer, cut_sharded_room, share_routes, sharded_job, sharded_layer


cdef struct call:
    # A call of a layer that is made again and again; jobs.shards is 0 for a layer in one piece.
    job whole
    sharded_job parts
    const int32_t *ids
    const float *weights
    ptrdiff_t k, experts
    int threads
    uint8_t **scratch   # of a Scratch, which may grow and so move between two calls
    int64_t *took       # NULL: nobody wants to know
    int64_t begun


cdef int32_t *cut(call *c, room *r) noexcept nogil:
    """Returns where ids are copied to: the device may write the next ones while late work looks at these."""
    cdef ptrdiff_t tokens = c.parts.jobs[0].tokens if c.parts.shards else c.whole.tokens
    cdef int32_t *ids = <int32_t *> take(r, tokens * c.k * sizeof(int32_t))
    if c.parts.shards:
        cut_sharded_room(r, &c.parts, c.parts.jobs[0].tokens * c.k, c.experts, c.threads)
    else:
        cut_room(r, &c.whole, c.whole.tokens * c.k, c.experts, c.threads)
    return ids


cdef int64_t now() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return <int64_t> time.tv_sec * 1_000_000_000 + time.tv_nsec


cdef void before_layer(void *context) noexcept nogil:
    cdef call *c = <call *> context
    c.begun = now()
    cdef job *first = c.parts.jobs if c.parts.shards else &c.whole
    cdef int32_t *ids
    cdef room r
    memset(&r, 0, sizeof(room))
    r.base = first_line(c.scratch[0])
    ids = cut(c, &r)
    memcpy(ids, c.ids, first.tokens * c.k * sizeof(int32_t))
    sort_by_expert(first, ids, c.weights, first.tokens, c.k, c.experts)
    if c.parts.shards:
        share_routes(&c.parts)


cdef void run_layer(void *context, int thread, int n) noexcept nogil:
    cdef call *c = <call *> context
    if c.parts.shards:
        sharded_layer(&c.parts, thread, n)
    else:
        layer(&c.whole, thread, n)


cdef void after_layer(void *context) noexcept nogil:
    cdef call *c = <call *> context
    c.took[0] = max(<int64_t> 1, now() - c.begun)


cdef class LayerWork(TeamWork):
    """One layer over fixed buffers, for a `Duty`.

    experts: an `ExpertLayer` or `ShardedLayer`. x, ids, weights, out: as `ExpertLayer.run` takes them, with at least
    one token and one route; read and written each time that the duty is done. scratch: shared by layers that are never
    computed at the same time. n_threads: at most so many compute it. took: (1,) int64, gets the nanoseconds that this
    takes, at least 1, before the answer.
    """

    cdef call c
    cdef tuple kept

    def __cinit__(
        self, experts not None, x, const int32_t[:, ::1] ids, const float[:, ::1] weights, out,
        Scratch scratch not None, int n_threads, int64_t[::1] took=None,
    ):
        cdef room r
        memset(&self.c, 0, sizeof(call))
        self.kept = (experts, x, ids, weights, out, scratch, took)
        if ids.shape[0] < 1 or ids.shape[1] < 1:
            raise ValueError(f"ids are {ids.shape[0]} x {ids.shape[1]}, expected at least one token and one route")
        if took is not None and took.shape[0] != 1:
            raise ValueError(f"took has {took.shape[0]} numbers, expected one")
        if isinstance(experts, ShardedLayer):
            self.c.parts = (<ShardedLayer> experts).template
            (<ShardedLayer> experts).begin(&self.c.parts, x, ids, weights, out, n_threads)
            self.c.experts = (<ShardedLayer> experts).n_experts
        else:
            self.c.whole = (<ExpertLayer?> experts).template
            set_input(&self.c.whole, (<ExpertLayer> experts).hidden, x, ids, weights, out, n_threads)
            self.c.experts = (<ExpertLayer> experts).n_experts
        self.c.ids, self.c.weights, self.c.k = &ids[0, 0], &weights[0, 0], ids.shape[1]
        self.c.threads = n_threads
        self.c.scratch = &scratch.data
        memset(&r, 0, sizeof(room))
        cut(&self.c, &r)  # measures
        scratch.keep()
        scratch.reserve(r.used)
        self.task.before, self.task.work = before_layer, run_layer
        self.task.context, self.task.threads = &self.c, n_threads
        if took is not None:
            self.c.took = &took[0]
            self.task.after = after_layer

    def __dealloc__(self):
        free(self.c.parts.jobs)
