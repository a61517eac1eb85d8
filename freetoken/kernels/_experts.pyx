"""One layer of experts on the CPU: prepare activations, gate and up with the activation function, down and combine.

`layer` is the only entry: every thread of a team calls it with the same job. Three phases, a barrier between them:

    prepare   each thread takes tokens; x becomes vectors in the form the tile function wants
    gate_up   each thread takes chunks of intermediate rows of the routed experts; results are prepared at once
    down      each thread takes output tiles of all tokens and adds up the routes of each token

Threads begin with equal shares, and who is done helps who is late (queue.h).

A value is computed by one thread, from start to end, and routes are added in the order of their expert's number:
the bits do not depend on the number of threads or on which other tokens are in the batch. `ExpertLayer` is the Python
face. `_shards.pyx` has the same for experts cut into shards.
"""
from cython.parallel cimport parallel, threadid
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from freetoken.kernels._isa cimport FT_BF16, FT_FEW, FT_FP32, FT_INT8, FT_INT15, FT_MANY, TileKernel

cdef extern from "team.h" nogil:
    int ft_team_size()

cdef extern from "values.h" nogil:
    void ft_swish(const float *g, float alpha, float *out)
    void ft_whole_block(
        const float *x, ptrdiff_t n, int steps, int offset, float unit, const uint8_t *order, ptrdiff_t line,
        signed char *out, signed char *low, float *scale, int32_t *correction,
    )
    void ft_wide_block(
        const float *x, ptrdiff_t n, int steps, const uint8_t *order, ptrdiff_t line, uint16_t *out, float *scale,
    )
    float ft_bf16_to_float(uint16_t bits)
    uint16_t ft_float_to_bf16(float value)
    void ft_round_fp8(const float *x, ptrdiff_t n, float *out)
    enum:
        FT_FP8_GROUP

cdef enum:
    TILE = 16
    INT15_STEPS = 127 * 128     # the largest value of two digits whose high one is at most 127
    DOWN_TILES = 8      # tiles of down that are read in a row, at most


cdef inline ptrdiff_t blocks_of(const job *j, ptrdiff_t k) noexcept nogil:
    # The last may be shorter than the others.
    return (k + j.block - 1) // j.block


cdef inline ptrdiff_t units_of(const job *j, ptrdiff_t k) noexcept nogil:
    return (k + j.unit - 1) // j.unit


cdef inline int digits_of(const job *j) noexcept nogil:
    # Of an activation that is a whole number, a byte each.
    return 2 if j.kernel.act == FT_INT15 else 1


cdef void prepare_fp32(const job *j, const float *x, ptrdiff_t n, float *out) noexcept nogil:
    cdef ptrdiff_t k, i
    cdef const uint8_t *order = j.kernel.order
    cdef bint to_bf16 = j.rounding == ROUND_BF16
    if order == NULL and not to_bf16:
        memcpy(out, x, n * sizeof(float))
        return
    k = 0
    while k < n:
        for i in range(j.line):
            out[k + (i if order == NULL else order[i])] = (
                ft_bf16_to_float(ft_float_to_bf16(x[k + i])) if to_bf16 else x[k + i]
            )
        k += j.line


cdef void prepare_bf16(const job *j, const float *x, ptrdiff_t n, uint16_t *out) noexcept nogil:
    cdef ptrdiff_t k, i
    if j.kernel.order == NULL:
        for k in range(n):
            out[k] = ft_float_to_bf16(x[k])
    else:
        k = 0
        while k < n:
            for i in range(j.line):
                out[k + j.kernel.order[i]] = ft_float_to_bf16(x[k + i])
            k += j.line


cdef void prepare_int(
    const job *j, const float *x, ptrdiff_t n, int steps,
    signed char *out, signed char *low, float *scales, int32_t *corrections,
) noexcept nogil:
    """Blocks of whole numbers, of one digit or, with `low`, two."""
    cdef ptrdiff_t b, at
    for b in range(blocks_of(j, n)):
        at = b * j.block
        ft_whole_block(
            x + at, min(j.block, n - at), steps, j.kernel.offset, j.kernel.unit, j.kernel.order, j.line,
            out + at, NULL if low == NULL else low + at, &scales[b], &corrections[b],
        )


cdef void prepare_wide(
    const job *j, const float *x, ptrdiff_t n, uint16_t *out, float *scales
) noexcept nogil:
    """Blocks of INT15 values as the tile function for many wants them."""
    cdef ptrdiff_t b, at
    for b in range(blocks_of(j, n)):
        at = b * j.block
        ft_wide_block(x + at, j.block, INT15_STEPS, j.kernel.many_order, j.line, out + 2 * at, &scales[b])


cdef void prepare(
    const job *j, const float *x, ptrdiff_t first, ptrdiff_t n, ptrdiff_t width, bint many, uint8_t *out
) noexcept nogil:
    """Values [first, first + n) of a vector of `width` values, into their places; first is a multiple of the unit.

    many: for the tile function that takes many.
    """
    cdef signed char *codes
    cdef float *scales
    cdef int32_t *corrections
    if j.kernel.act == FT_FP32:
        prepare_fp32(j, x, n, (<float *> out) + first)
    elif j.kernel.act == FT_BF16:
        prepare_bf16(j, x, n, (<uint16_t *> out) + first)
    elif many:
        prepare_wide(j, x, n, (<uint16_t *> out) + 2 * first, (<float *> (out + 4 * width)) + first // j.block)
    else:
        codes = <signed char *> out
        scales = <float *> (codes + digits_of(j) * width)
        corrections = <int32_t *> (scales + blocks_of(j, width))
        prepare_int(
            j, x, n, INT15_STEPS if j.kernel.act == FT_INT15 else 127,
            codes + first, codes + width + first if j.kernel.act == FT_INT15 else NULL,
            scales + first // j.block, corrections + first // j.block,
        )


cdef void prepare_tokens(const job *j, int thread, int n_threads) noexcept nogil:
    cdef ptrdiff_t width = j.gate_up.k, per_token = units_of(j, j.gate_up.k)
    cdef ptrdiff_t units = j.tokens * per_token
    cdef ptrdiff_t at = units * thread // n_threads, stop = units * (thread + 1) // n_threads
    cdef ptrdiff_t token, first, n, k
    cdef float *row = j.rows + thread * j.rows_stride
    cdef const float *x
    cdef const uint16_t *x16
    while at < stop:
        token = at // per_token
        first = (at - token * per_token) * j.unit
        n = min(width - first, (stop - at) * j.unit)
        if j.x_bf16:
            x16 = (<const uint16_t *> j.x) + token * width + first
            for k in range(n):
                row[k] = ft_bf16_to_float(x16[k])
            x = row
        else:
            x = (<const float *> j.x) + token * width + first
        if j.rounding == ROUND_FP8:
            ft_round_fp8(x, n, row)
            x = row
        prepare(j, x, first, n, width, False, j.prepared + token * j.gate_up.vector_bytes)
        if j.prepared_many != j.prepared:
            prepare(j, x, first, n, width, True, j.prepared_many + token * j.gate_up.vector_bytes)
        at += units_of(j, n)


cdef inline void finish_tile(
    const matrix *m, const uint8_t *record, int which, ptrdiff_t bias_row, float *y
) noexcept nogil:
    """Apply a matrix's global scale (which: 0 gate or down, 1 up) and its bias to 16 sums."""
    cdef const float *value = <const float *> (record + m.globals_offset)
    cdef int mode = (<const int32_t *> value)[2]
    cdef const float *bias
    cdef int i
    if mode == 1:
        for i in range(TILE):
            y[i] *= value[which]
    elif mode == 2:
        for i in range(TILE):
            y[i] /= value[which]
    if m.bias_offset >= 0:
        bias = (<const float *> (record + m.bias_offset)) + bias_row
        for i in range(TILE):
            y[i] += bias[i]


cdef void activate(const job *j, const float *gate, const float *up, float *out) noexcept nogil:
    cdef int i
    cdef float g[TILE]
    cdef float u[TILE]
    if j.activation == SILU:
        ft_swish(gate, 1, g)
        for i in range(TILE):
            out[i] = g[i] * up[i]
        return
    for i in range(TILE):
        # comparisons in this order keep a NaN
        g[i] = j.limit if gate[i] > j.limit else gate[i]
        u[i] = j.limit if up[i] > j.limit else (-j.limit if up[i] < -j.limit else up[i])
    if j.activation == SILU_LIMITED:
        ft_swish(g, 1, g)
        for i in range(TILE):
            out[i] = g[i] * u[i]
    else:
        ft_swish(g, j.alpha, g)
        for i in range(TILE):
            out[i] = g[i] * (u[i] + 1)


cdef inline bint takes_many(const job *j, ptrdiff_t n) noexcept nogil:
    """Whether a group of n routes is multiplied by one call."""
    return j.kernel.many != NULL and n >= j.kernel.many_from


cdef inline int find_vectors(
    const job *j, const uint8_t *vectors, ptrdiff_t stride, const int32_t *number, ptrdiff_t route, ptrdiff_t stop,
    const uint8_t **x,
) noexcept nogil:
    """Vectors of the next routes that one call takes, number[route] or route being their place; how many.

    Many must lie one after the other (number is NULL), and x[0] is the first of them. The last of few is there several
    times if they are not FT_FEW.
    """
    cdef int few = <int> min(<ptrdiff_t> FT_FEW, stop - route) if j.kernel.few != NULL else 1
    cdef int i
    cdef ptrdiff_t at
    if number == NULL and takes_many(j, stop - route):
        x[0] = vectors + route * stride
        return <int> (stop - route)
    for i in range(FT_FEW):
        at = route + min(i, few - 1)
        x[i] = vectors + (at if number == NULL else number[at]) * stride
    return few


cdef inline void multiply(
    const job *j, const matrix *m, const uint8_t *w, const uint8_t **x, int n, float *y
) noexcept nogil:
    """A tile times n vectors as `find_vectors` found them: y is n x 16, or FT_FEW x 16 for few."""
    if n > FT_FEW:
        j.kernel.many(w, m.k, x[0], m.vector_bytes, n, y)
    elif n > 1:
        j.kernel.few(w, m.k, <const void *const *> x, y)
    else:
        j.kernel.tile(w, m.k, x[0], y)


cdef struct desk:
    # What a thread works with in `gate_up`.
    float *h            # a chunk's hidden values
    uint8_t *panel      # prepared vectors of `group`, one after the other
    ptrdiff_t group     # -1: of none


cdef void fill_panel(const job *j, ptrdiff_t group, desk *d) noexcept nogil:
    """Collect a group's prepared vectors, unless they are there: a thread takes several chunks of a group in turn."""
    cdef ptrdiff_t route, size = j.gate_up.vector_bytes
    if d.group == group:
        return
    d.group = group
    for route in range(j.start[group], j.start[group + 1]):
        memcpy(d.panel + (route - j.start[group]) * size, j.prepared_many + j.token[route] * size, size)


cdef void gate_up_chunk(
    const job *j, ptrdiff_t group, ptrdiff_t chunk, ptrdiff_t chunk_tiles, desk *d
) noexcept nogil:
    """Rows [chunk * chunk_tiles * 16, ...) of gate and up for every token of a group."""
    cdef const uint8_t *record = j.bank + j.expert[group] * j.record_bytes
    cdef const matrix *m = &j.gate_up
    cdef const uint8_t *x[FT_FEW]
    cdef const uint8_t *w
    cdef ptrdiff_t width = j.down.k, size = chunk_tiles * TILE
    cdef ptrdiff_t first = chunk * chunk_tiles, last = min(first + chunk_tiles, m.tiles)
    cdef ptrdiff_t route = j.start[group], stop = j.start[group + 1], t, n = min(size, width - first * TILE)
    cdef float gate[FT_MANY * TILE]
    cdef float up[FT_MANY * TILE]
    cdef int found, i
    cdef float *h
    while route < stop:
        if takes_many(j, stop - j.start[group]):
            fill_panel(j, group, d)
            found = find_vectors(j, d.panel, m.vector_bytes, NULL, 0, stop - route, x)
        else:
            found = find_vectors(j, j.prepared, m.vector_bytes, j.token, route, stop, x)
        for t in range(first, last):
            w = record + m.offset + 2 * t * m.tile_bytes
            multiply(j, m, w, x, found, gate)
            multiply(j, m, w + m.tile_bytes, x, found, up)
            for i in range(found):
                finish_tile(m, record, 0, t * TILE, gate + i * TILE)
                finish_tile(m, record, 1, (m.tiles + t) * TILE, up + i * TILE)
                activate(j, gate + i * TILE, up + i * TILE, d.h + i * size + (t - first) * TILE)
        for i in range(found):
            h = d.h + i * size
            if j.rounding == ROUND_FP8:
                ft_round_fp8(h, n, h)
            prepare(j, h, first * TILE, n, width, found > FT_FEW, j.hidden + (route + i) * j.down.vector_bytes)
        route += found


cdef inline ptrdiff_t tiles_of_chunk(const job *j) noexcept nogil:
    # whole numbers and fp8 need a unit's values at once, to choose their scale
    cdef bint scaled = j.kernel.act == FT_INT8 or j.kernel.act == FT_INT15 or j.rounding == ROUND_FP8
    return max(1, j.unit // TILE) if scaled else 1


cdef inline ptrdiff_t chunks_of(const job *j) noexcept nogil:
    return (j.gate_up.tiles + tiles_of_chunk(j) - 1) // tiles_of_chunk(j)


cdef ptrdiff_t find_chunk(const job *j, ptrdiff_t pair) noexcept nogil:
    """The first chunk, counted through all groups, that begins at or after a pair of route and chunk."""
    cdef ptrdiff_t group, size, chunks = chunks_of(j)
    for group in range(j.groups):
        size = j.start[group + 1] - j.start[group]
        if pair <= size * chunks:
            return group * chunks + (pair + size - 1) // size
        pair -= size * chunks
    return j.groups * chunks


cdef void share_out(job *j, int thread, int n_threads) noexcept nogil:
    """Fill the queues of a thread: shares of equal work."""
    cdef ptrdiff_t pairs = j.routes * chunks_of(j)
    ft_queue_fill(
        &j.queues[2 * thread],
        find_chunk(j, pairs * thread // n_threads),
        find_chunk(j, pairs * (thread + 1) // n_threads),
    )
    cdef ptrdiff_t runs = runs_of(j, n_threads)
    ft_queue_fill(&j.queues[2 * thread + 1], runs * thread // n_threads, runs * (thread + 1) // n_threads)


cdef inline ptrdiff_t panel_bytes(const job *j) noexcept nogil:
    return FT_MANY * j.gate_up.vector_bytes if j.kernel.many != NULL else 0


cdef void gate_up(job *j, int thread, int n_threads) noexcept nogil:
    """Each thread takes its own chunks, then those of threads that are late."""
    cdef ptrdiff_t chunks = chunks_of(j), chunk_tiles = tiles_of_chunk(j), chunk
    cdef int other
    cdef desk d
    d.h = j.rows + thread * j.rows_stride
    d.panel = j.panels + thread * panel_bytes(j)
    d.group = -1
    for other in range(n_threads):
        chunk = ft_queue_take(&j.queues[2 * ((thread + other) % n_threads)])
        while chunk >= 0:
            gate_up_chunk(j, chunk // chunks, chunk % chunks, chunk_tiles, &d)
            chunk = ft_queue_take(&j.queues[2 * ((thread + other) % n_threads)])


cdef inline ptrdiff_t tiles_of_run(const job *j, int n_threads) noexcept nogil:
    """Tiles of down that a thread takes of each expert in turn.

    One tile of a narrow expert is a few KiB, too little to read fast: with runs instead of tiles, down reads
    at 0.97 to 1.0 of the rate of gate and up instead of 0.81 (4 bits, 2048/768, two Zen 5 cores).
    Every thread should have some, and with many tokens the memory is not what is waited for.
    """
    if j.tokens > DOWN_TILES:
        return 1
    return max(<ptrdiff_t> 1, min(<ptrdiff_t> DOWN_TILES, j.down.tiles // (8 * n_threads)))


cdef inline ptrdiff_t runs_of(const job *j, int n_threads) noexcept nogil:
    cdef ptrdiff_t n = tiles_of_run(j, n_threads)
    return (j.down.tiles + n - 1) // n


cdef void down_run(const job *j, ptrdiff_t first, ptrdiff_t last, float *sums) noexcept nogil:
    """Output tiles [first, last) of every token: routes are added in the order of their expert's number."""
    cdef const matrix *m = &j.down
    cdef const uint8_t *record
    cdef const uint8_t *x[FT_FEW]
    cdef ptrdiff_t group, route, stop, token, i, t, n = last - first, start = first * TILE
    cdef float part[FT_MANY * TILE]
    cdef int found, f
    cdef float *total
    cdef float weight
    memset(sums, 0, j.tokens * n * TILE * sizeof(float))
    for group in range(j.groups):
        record = j.bank + j.expert[group] * j.record_bytes
        for t in range(first, last):
            route, stop = j.start[group], j.start[group + 1]
            while route < stop:
                found = find_vectors(j, j.hidden, m.vector_bytes, NULL, route, stop, x)
                multiply(j, m, record + m.offset + t * m.tile_bytes, x, found, part)
                for f in range(found):
                    finish_tile(m, record, 0, t * TILE, part + f * TILE)
                    weight = j.weight[route + f]
                    total = sums + (j.token[route + f] * n + t - first) * TILE
                    for i in range(TILE):
                        total[i] += weight * part[f * TILE + i]
                route += found
    n *= TILE
    for token in range(j.tokens):
        total = sums + token * n
        if j.y_bf16:
            for i in range(min(n, m.rows - start)):
                (<uint16_t *> j.y)[token * m.rows + start + i] = ft_float_to_bf16(total[i])
        else:
            memcpy((<float *> j.y) + token * m.rows + start, total, min(n, m.rows - start) * sizeof(float))


cdef void down(job *j, int thread, int n_threads) noexcept nogil:
    """As `gate_up`, of runs of output tiles."""
    cdef ptrdiff_t run, n = tiles_of_run(j, n_threads)
    cdef int other
    for other in range(n_threads):
        run = ft_queue_take(&j.queues[2 * ((thread + other) % n_threads) + 1])
        while run >= 0:
            down_run(j, run * n, min((run + 1) * n, j.down.tiles), j.sums + thread * j.sums_stride)
            run = ft_queue_take(&j.queues[2 * ((thread + other) % n_threads) + 1])


cdef void layer(job *j, int thread, int n_threads) noexcept nogil:
    share_out(j, thread, n_threads)
    prepare_tokens(j, thread, n_threads)
    ft_barrier_wait(&j.barrier, n_threads)
    gate_up(j, thread, n_threads)
    ft_barrier_wait(&j.barrier, n_threads)
    down(j, thread, n_threads)


cdef uint8_t *first_line(uint8_t *data) noexcept nogil:
    # 64-byte alignment inside the slack
    return data + (64 - <size_t> data % 64) % 64


cdef class Block:
    """Memory that is freed when nobody holds it."""

    def __cinit__(self, size_t size):
        self.data = <uint8_t *> calloc(size, 1)
        if self.data == NULL:
            raise MemoryError(f"{size} bytes of scratch for an expert layer")

    def __dealloc__(self):
        free(self.data)


cdef class Scratch:
    """Working memory of one executor, grown as needed, used by one layer at a time.

    Who looks at `data` while it may grow calls `keep` before: memory that it leaves is not freed then.
    """

    def __cinit__(self):
        self.data = NULL
        self.size = 0

    cdef uint8_t *reserve(self, size_t size) except NULL:
        cdef Block block
        if size > self.size:
            if self.left is None:
                self.block, self.data, self.size = None, NULL, 0
            else:
                self.left.append(self.block)
            block = Block(size + 64)
            self.block, self.data, self.size = block, block.data, size
        return first_line(self.data)

    cdef void keep(self):
        if self.left is None:
            self.left = []

    @property
    def nbytes(self):
        """Bytes held now."""
        return self.size


cdef dict GATED = {"silu": SILU, "silu_limited": SILU_LIMITED, "swiglu_clamped": SWIGLU_CLAMPED}
cdef dict ROUNDINGS = {"none": ROUND_NONE, "bf16": ROUND_BF16, "fp8": ROUND_FP8}


cdef inline size_t aligned(size_t n) noexcept nogil:
    return (n + 63) & ~<size_t> 63


cdef class ExpertLayer:
    """The experts of one layer bound to a tile function.

    bank: (E, record_bytes) uint8, C-contiguous, of records laid out as `layout` says; it is borrowed and kept alive.
    layout: a `freetoken.formats.record.RecordLayout`. kernel: one of its format's tile functions.
    activation: "silu", "silu_limited" with limit or "swiglu_clamped" with alpha and limit (`reference.activate`).
    rounding: of activations before both products: "none", "bf16" (what a bf16 tile function does by itself) or "fp8"
    (`reference.round_fp8`); an int8 or int15 tile function rounds in its own way and takes "none" only.
    """

    def __cinit__(
        self, const uint8_t[:, ::1] bank, object layout, TileKernel kernel not None, str activation="silu",
        float alpha=0.0, float limit=0.0, str rounding="none",
    ):
        cdef job *j = &self.template
        if bank.shape[0] < 1 or bank.shape[1] != layout.nbytes:
            raise ValueError(f"bank is {bank.shape[0]} x {bank.shape[1]} bytes, records have {layout.nbytes}")
        if kernel.format != layout.format.kernels:
            raise ValueError(f"{kernel!r} cannot read records of {layout.format.name}")
        if activation not in GATED:
            raise ValueError(f"unknown activation {activation!r}, expected one of {', '.join(GATED)}")
        if rounding not in ROUNDINGS:
            raise ValueError(f"unknown rounding {rounding!r}, expected one of {', '.join(ROUNDINGS)}")
        if rounding != "none" and kernel.act in ("int8", "int15"):
            raise ValueError(f"{kernel!r} rounds activations to {kernel.act}, not to {rounding}")
        memset(j, 0, sizeof(job))
        self.owner = bank
        self.n_experts = bank.shape[0]
        self.hidden = layout.hidden
        j.bank = &bank[0, 0]
        j.record_bytes = bank.shape[1]
        j.block = layout.format.block
        j.line = layout.format.line_k
        j.unit = max(j.block, <ptrdiff_t> FT_FP8_GROUP) if rounding == "fp8" else j.block
        j.kernel = kernel.entry
        j.rounding = ROUNDINGS[rounding]
        j.activation = GATED[activation]
        j.alpha = alpha
        j.limit = limit
        self.describe(&j.gate_up, layout, "gate_up", layout.intermediate, layout.hidden)
        self.describe(&j.down, layout, "down", layout.hidden, layout.intermediate)

    cdef void describe(self, matrix *m, object layout, str name, ptrdiff_t rows, ptrdiff_t k):
        m.offset = layout.sections[name][0]
        m.globals_offset = layout.sections[name + "_globals"][0]
        m.bias_offset = layout.sections[name + "_bias"][0] if layout.bias else -1
        m.tile_bytes = layout.format.tile_bytes(k)
        m.tiles = (rows + TILE - 1) // TILE
        m.rows = rows
        m.k = k
        cdef job *j = &self.template
        if j.kernel.act == FT_FP32:
            m.vector_bytes = aligned(k * 4)
        elif j.kernel.act == FT_BF16:
            m.vector_bytes = aligned(k * 2)
        elif j.kernel.many == NULL:
            m.vector_bytes = aligned(digits_of(j) * k + blocks_of(j, k) * 8)
        else:
            m.vector_bytes = aligned(4 * k + blocks_of(j, k) * 4)  # for many, which is more
        # An odd number of lines: the same place of many vectors is in different sets of a cache.
        m.vector_bytes |= 64

    def run(
        self, x, const int32_t[:, ::1] ids, const float[:, ::1] weights, out, Scratch scratch not None, int n_threads,
    ):
        """Write into `out` the weighted sum of the routed experts' outputs for each token.

        x, out: (B, H) C-contiguous, both float32 or both uint16 holding bf16 bits; out is overwritten.
        ids: (B, K) int32; an id outside [0, E) is a route to nowhere. weights: (B, K) float32.
        One call at a time per Scratch; the GIL is released.
        """
        cdef job j = self.template
        cdef job *shared = &j
        cdef room r
        if not set_input(&j, self.hidden, x, ids, weights, out, n_threads):
            return
        memset(&r, 0, sizeof(room))
        while take_all(&r, scratch):
            cut_room(&r, &j, ids.shape[0] * ids.shape[1], self.n_experts, n_threads)
        sort_routes(&j, ids, weights, self.n_experts)
        with nogil, parallel(num_threads=n_threads):
            layer(shared, threadid(), ft_team_size())


cdef bint set_input(
    job *j, Py_ssize_t hidden, x, const int32_t[:, ::1] ids, const float[:, ::1] weights, out, int n_threads
) except -1:
    """Check and set input and output; False when there are no tokens."""
    cdef const float[:, ::1] x32
    cdef const uint16_t[:, ::1] x16
    cdef float[:, ::1] y32
    cdef uint16_t[:, ::1] y16
    cdef Py_ssize_t tokens = ids.shape[0], k = ids.shape[1]
    if n_threads < 1:
        raise ValueError(f"n_threads is {n_threads}, expected at least 1")
    if weights.shape[0] != tokens or weights.shape[1] != k:
        raise ValueError(f"weights are {weights.shape[0]} x {weights.shape[1]}, ids {tokens} x {k}")
    if x.shape != (tokens, hidden) or out.shape != x.shape:
        raise ValueError(f"x is {x.shape}, out {out.shape}, expected {(tokens, hidden)}")
    if tokens == 0:
        return False
    j.x_bf16 = j.y_bf16 = x.dtype.itemsize == 2
    if j.x_bf16:
        x16 = x
        y16 = out
        j.x = &x16[0, 0]
        j.y = &y16[0, 0]
    else:
        x32 = x
        y32 = out
        j.x = &x32[0, 0]
        j.y = &y32[0, 0]
    j.tokens = tokens
    return True


cdef bint take_all(room *r, Scratch scratch) except -1:
    """True twice: the first time everything is taken to be measured, the second time to be used."""
    if r.passes == 1:
        r.base = scratch.reserve(r.used)
    r.used = 0
    r.passes += 1
    return r.passes <= 2


cdef uint8_t *take(room *r, size_t nbytes) noexcept nogil:
    cdef uint8_t *at = NULL if r.base == NULL else r.base + r.used
    r.used += aligned(nbytes)
    return at


cdef void take_common(room *r, job *j, size_t routes, size_t experts) noexcept nogil:
    """What is the same for all shards."""
    j.prepared = j.prepared_many = take(r, j.tokens * j.gate_up.vector_bytes)
    if j.kernel.act == FT_INT15 and takes_many(j, routes):
        j.prepared_many = take(r, j.tokens * j.gate_up.vector_bytes)
    j.expert = <int32_t *> take(r, (experts + routes // FT_MANY) * sizeof(int32_t))
    j.start = <int32_t *> take(r, (experts + routes // FT_MANY + 1) * sizeof(int32_t))
    j.ends = <int32_t *> take(r, experts * sizeof(int32_t))
    j.token = <int32_t *> take(r, routes * sizeof(int32_t))
    j.weight = <float *> take(r, routes * sizeof(float))


cdef void take_own(room *r, job *j, size_t routes, int n_threads) noexcept nogil:
    """What a shard has for itself."""
    cdef ptrdiff_t at_once = FT_MANY if j.kernel.many != NULL else FT_FEW
    cdef size_t row = aligned(max(j.gate_up.k, at_once * max(j.unit, <ptrdiff_t> TILE)) * sizeof(float))
    j.hidden = take(r, routes * j.down.vector_bytes)
    j.sums_stride = j.tokens * tiles_of_run(j, 1) * TILE  # the most that any team takes
    j.sums = <float *> take(r, n_threads * j.sums_stride * sizeof(float))
    j.rows = <float *> take(r, n_threads * row)
    j.rows_stride = row // sizeof(float)
    j.queues = <ft_queue *> take(r, 2 * n_threads * sizeof(ft_queue))
    j.panels = take(r, n_threads * panel_bytes(j) if takes_many(j, routes) else 0)


cdef void cut_room(room *r, job *j, size_t routes, size_t experts, int n_threads) noexcept nogil:
    """All of a layer in one piece."""
    take_common(r, j, routes, experts)
    take_own(r, j, routes, n_threads)


cdef int sort_routes(
    job *j, const int32_t[:, ::1] ids, const float[:, ::1] weights, size_t experts
) except -1:
    if ids.shape[1]:
        sort_by_expert(j, &ids[0, 0], &weights[0, 0], ids.shape[0], ids.shape[1], experts)
    return 0


cdef void sort_by_expert(
    job *j, const int32_t *ids, const float *weights, ptrdiff_t tokens, ptrdiff_t k, ptrdiff_t experts
) noexcept nogil:
    """Counting sort, stable."""
    cdef ptrdiff_t r, e, n = tokens * k, groups = 0, at = 0, most
    cdef int32_t *expert = <int32_t *> j.expert
    cdef int32_t *start = <int32_t *> j.start
    cdef int32_t *token = <int32_t *> j.token
    cdef float *weight = <float *> j.weight
    cdef int32_t *ends = j.ends
    # ends[e] first counts, then says where an expert's next route goes, and then where its last one was.
    memset(ends, 0, experts * sizeof(int32_t))
    for r in range(n):
        if 0 <= ids[r] < experts:
            ends[ids[r]] += 1
    for e in range(experts):
        r = ends[e]
        ends[e] = <int32_t> at
        at += r
    j.routes = at
    most = FT_MANY if j.kernel.many != NULL else max(<ptrdiff_t> 1, at)
    for r in range(n):
        if 0 <= ids[r] < experts:
            at = ends[ids[r]]
            token[at] = <int32_t> (r // k)
            weight[at] = weights[r]
            ends[ids[r]] += 1
    at = 0
    for e in range(experts):
        while at < ends[e]:
            start[groups] = <int32_t> at
            expert[groups] = <int32_t> e
            groups += 1
            at = min(at + most, <ptrdiff_t> ends[e])
    start[groups] = <int32_t> at
    j.groups = groups
