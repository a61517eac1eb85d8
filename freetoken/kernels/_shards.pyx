"""One layer of experts cut into shards, each in a bank of its own, on a node of its own.

The threads of a shard's node do its gate and up and its down; the outputs of the shards are added in their order after
one more barrier. The bits depend on how experts are cut, and on nothing else. `sharded_layer` is the entry, for all
threads of a team, as `layer` in `_experts.pyx`; `ShardedLayer` is the Python face.
"""
from cython.parallel cimport parallel, threadid
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int32_t, uint16_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from freetoken.kernels._experts cimport (
    ExpertLayer, Scratch, down, ft_barrier_wait, gate_up, job, prepare_tokens, room, set_input, share_out, sort_routes,
    take, take_all, take_common, take_own,
)

cdef extern from "team.h" nogil:
    int ft_team_size()
    enum:
        FT_MAX_CPUS
    void ft_bind_thread(const uint64_t *mask, ptrdiff_t words, uint64_t key)

cdef extern from "values.h" nogil:
    uint16_t ft_float_to_bf16(float value)

cdef enum:
    LINE = 32           # outputs that one thread writes: a line of bf16
    WORD_BITS = 64      # of a word of a mask of CPUs; the kernel's words are these or their halves


cdef void add_shards(const sharded_job *s, int thread, int n_threads) noexcept nogil:
    """Each thread takes lines of the output, for all shards in their order; rounds once."""
    cdef ptrdiff_t size = s.jobs[0].tokens * s.jobs[0].down.rows
    cdef ptrdiff_t lines = (size + LINE - 1) // LINE, i, k
    cdef ptrdiff_t stop = min(size, lines * (thread + 1) // n_threads * LINE)
    cdef float total
    for i in range(lines * thread // n_threads * LINE, stop):
        total = (<const float *> s.jobs[0].y)[i]
        for k in range(1, s.shards):
            total += (<const float *> s.jobs[k].y)[i]
        if s.y_bf16:
            (<uint16_t *> s.y)[i] = ft_float_to_bf16(total)
        else:
            (<float *> s.y)[i] = total


cdef void sharded_layer(sharded_job *s, int thread, int n_threads) noexcept nogil:
    cdef bint planned = n_threads == s.threads
    cdef ptrdiff_t k, first = 0, last = s.shards
    cdef int rank = thread, size = n_threads
    if planned:
        # thread 0 is the caller's own, and not ours to keep anywhere
        if thread and s.keys[thread]:
            ft_bind_thread(s.masks + thread * s.mask_words, s.mask_words, s.keys[thread])
        first = s.shard[thread]
        last, rank, size = first + 1, s.rank[thread], s.size[first]
    for k in range(first, last):
        share_out(&s.jobs[k], rank, size)
    prepare_tokens(&s.jobs[0], thread, n_threads)
    ft_barrier_wait(&s.barrier, n_threads)
    for k in range(first, last):
        gate_up(&s.jobs[k], rank, size)
    ft_barrier_wait(&s.barrier, n_threads)
    for k in range(first, last):
        down(&s.jobs[k], rank, size)
    ft_barrier_wait(&s.barrier, n_threads)
    add_shards(s, thread, n_threads)


cdef void share_common(job *j, const job *first) noexcept nogil:
    """The input, routes and prepared vectors of another shard; they are the same for all."""
    j.x, j.x_bf16, j.tokens = first.x, first.x_bf16, first.tokens
    j.prepared, j.prepared_many = first.prepared, first.prepared_many
    j.expert, j.start, j.token, j.weight = first.expert, first.start, first.token, first.weight


cdef void cut_sharded_room(room *r, sharded_job *s, size_t routes, size_t experts, int n_threads) noexcept nogil:
    """Working memory of all shards; each has an fp32 output of its own."""
    cdef ptrdiff_t k
    take_common(r, s.jobs, routes, experts)
    for k in range(s.shards):
        if k:
            share_common(&s.jobs[k], s.jobs)
        take_own(r, &s.jobs[k], routes, n_threads)
        s.jobs[k].y = take(r, s.jobs[k].tokens * s.jobs[k].down.rows * sizeof(float))
        s.jobs[k].y_bf16 = False


cdef void share_routes(sharded_job *s) noexcept nogil:
    """How many there are, once they are sorted."""
    cdef ptrdiff_t k
    for k in range(1, s.shards):
        s.jobs[k].routes, s.jobs[k].groups = s.jobs[0].routes, s.jobs[0].groups


cdef uint64_t hash_mask(const uint64_t *words, ptrdiff_t n) noexcept nogil:
    """FNV-1a of the words, never 0."""
    cdef uint64_t key = 0xcbf29ce484222325ULL
    cdef ptrdiff_t i
    for i in range(n):
        key = (key ^ words[i]) * 0x100000001b3ULL
    return key | 1


cdef class ShardedLayer:
    """The experts of one layer, cut into shards.

    layers: an `ExpertLayer` for each shard, of the same experts, hidden size and tile function. teams: for each thread
    the shard that it serves; every shard has a thread. cpus: for each thread the CPUs that it stays on from its first
    layer on, of those that it may run on; none to leave it alone. Thread 0 is the caller and always left alone. A team
    of another size serves all shards together, with the same result, and stays where it is.
    """

    def __cinit__(self, layers, teams, cpus):
        cdef sharded_job *s = &self.template
        cdef ptrdiff_t t, threads = len(teams), shards = len(layers), words
        cdef ExpertLayer one, first
        memset(s, 0, sizeof(sharded_job))
        self.numbers = NULL
        self.masks = NULL
        self.keys = NULL
        if not shards or sorted(set(teams)) != list(range(shards)) or len(cpus) != threads:
            raise ValueError(f"{shards} shards, teams {teams}, CPUs of {len(cpus)} threads: expected a thread for each")
        self.layers = tuple(layers)
        first = self.layers[0]
        for one in self.layers:
            if (
                one.n_experts != first.n_experts or one.hidden != first.hidden
                or one.template.kernel.tile != first.template.kernel.tile
                or one.template.rounding != first.template.rounding
            ):
                raise ValueError("shards differ in experts, hidden size, tile function or rounding")
        self.n_experts = first.n_experts
        self.hidden = first.hidden
        top = max([cpu for mask in cpus for cpu in mask], default=0)
        if top >= FT_MAX_CPUS:
            raise ValueError(f"CPU {top} is not below {FT_MAX_CPUS}")
        words = top // WORD_BITS + 1
        self.numbers = <int *> calloc(2 * threads + shards, sizeof(int))
        self.masks = <uint64_t *> calloc(threads * words, sizeof(uint64_t))
        self.keys = <uint64_t *> calloc(threads, sizeof(uint64_t))
        if self.numbers == NULL or self.masks == NULL or self.keys == NULL:
            raise MemoryError(f"the plan of {threads} threads")
        s.shards = shards
        s.threads = <int> threads
        s.shard, s.rank, s.size = self.numbers, self.numbers + threads, self.numbers + 2 * threads
        s.masks, s.mask_words, s.keys = self.masks, words, self.keys
        for t in range(threads):
            self.numbers[t] = teams[t]
            self.numbers[threads + t] = self.numbers[2 * threads + <int> teams[t]]
            self.numbers[2 * threads + <int> teams[t]] += 1
            for cpu in cpus[t]:
                self.masks[t * words + <int> cpu // WORD_BITS] |= (<uint64_t> 1) << (<int> cpu % WORD_BITS)
            self.keys[t] = hash_mask(self.masks + t * words, words) if cpus[t] else 0

    def __dealloc__(self):
        free(self.numbers)
        free(self.masks)
        free(self.keys)

    def run(
        self, x, const int32_t[:, ::1] ids, const float[:, ::1] weights, out, Scratch scratch not None, int n_threads,
    ):
        """See `ExpertLayer.run`."""
        cdef sharded_job s = self.template
        cdef sharded_job *shared = &s
        cdef room r
        cdef ptrdiff_t routes = ids.shape[0] * ids.shape[1]
        try:
            if not self.begin(shared, x, ids, weights, out, n_threads):
                return
            memset(&r, 0, sizeof(room))
            while take_all(&r, scratch):
                cut_sharded_room(&r, shared, routes, self.n_experts, n_threads)
            sort_routes(s.jobs, ids, weights, self.n_experts)
            share_routes(shared)
            with nogil, parallel(num_threads=n_threads):
                sharded_layer(shared, threadid(), ft_team_size())
        finally:
            free(s.jobs)

    cdef bint begin(
        self, sharded_job *s, x, const int32_t[:, ::1] ids, const float[:, ::1] weights, out, int n_threads
    ) except -1:
        """Jobs of all shards with their input, for the caller to free; False when there are no tokens."""
        cdef ExpertLayer one
        cdef ptrdiff_t k
        s.jobs = <job *> calloc(s.shards, sizeof(job))
        if s.jobs == NULL:
            raise MemoryError(f"jobs of {s.shards} shards")
        for k in range(s.shards):
            one = self.layers[k]
            s.jobs[k] = one.template
        if not set_input(s.jobs, self.hidden, x, ids, weights, out, n_threads):
            return False
        s.y, s.y_bf16 = s.jobs[0].y, s.jobs[0].y_bf16
        return True
