"""Reads rows of files in as few aligned reads as their places allow, many in flight, without the GIL.

A table is a run of bytes that lies in parts of files. Rows that are asked for are sorted, those that are the same
become one and neighbours share a read; each read has a slot of memory, from which rows are copied to where they belong.
`DiskRowTable` (table.py) checks what it hands over and says in words what went wrong.
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EBUSY, EINTR, EINVAL, ENOMEM, ENOSYS, EOPNOTSUPP, EPERM
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strdup

cdef extern from "ring.h" nogil:
    ctypedef struct ft_ring:
        int fd
        unsigned queued
        unsigned flying
    int ft_ring_open(ft_ring *r, unsigned entries)
    void ft_ring_close(ft_ring *r)
    void ft_ring_put(ft_ring *r, int fd, uint8_t *to, unsigned nbytes, int64_t offset, int tag)
    int ft_ring_take_back(ft_ring *r)
    int ft_ring_enter(ft_ring *r, unsigned answers)
    int ft_ring_take(ft_ring *r, int64_t *result)

cdef extern from "pool.h" nogil:
    ctypedef struct ft_pool:
        int flying
        int n_threads
    int ft_pool_open(ft_pool *p, int most, int most_threads)
    void ft_pool_close(ft_pool *p)
    void ft_pool_put(ft_pool *p, int fd, uint8_t *to, size_t nbytes, int64_t offset, int tag)
    int ft_pool_take(ft_pool *p, int64_t *result)
    int64_t ft_pread(int fd, uint8_t *to, size_t nbytes, int64_t offset)

cdef extern from "rowfile.h" nogil:
    ctypedef struct ft_rowfile:
        char *path
        int fd
        int plain
        int64_t align
    int ft_open_plain(ft_rowfile *f)
    int64_t ft_file_bytes(int fd)
    int64_t ft_direct_align(int fd)

cdef extern from *:
    """
    #include <time.h>
    static inline int ft_load(const int *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
    static inline void ft_store(int *flag, int value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
    static inline void ft_nap(void) { nanosleep(&(struct timespec){0, 50000}, NULL); }
    """
    int ft_load(const int *flag) nogil
    void ft_store(int *flag, int value) nogil
    void ft_nap() nogil

cdef extern from "<stdlib.h>" nogil:
    void *aligned_alloc(size_t alignment, size_t nbytes)

cdef extern from "<unistd.h>" nogil:
    int close(int fd)

cdef enum:
    MAX_THREADS = 64
    MAX_ENTRIES = 1 << 19    # ids that are sorted at once: 16 MiB
    BUCKETS = 4096           # into which more ids than that are counted
    PAGE = 4096
    # Bytes between rows that are read, not skipped: a virtual disk took as long for 4 KiB as for 512 bytes, and 1.1 to
    # 1.4 times as long for 8 KiB, 16 and 256 in flight.
    GAP = 4096
    AGAIN = 1000             # times that a read is made again because the system had no room for it
    SIGNALS = 1024           # reads between two looks for signals

BAD_ID, CHANGED, ENDED, FAILED, STOPPED = range(1, 6)
cdef enum:
    C_BAD_ID = 1
    C_CHANGED
    C_ENDED
    C_FAILED
    C_STOPPED

cdef struct Part:            # bytes [first, stop) of the table are those from `offset` on of a file
    int file
    int64_t first
    int64_t stop
    int64_t offset

cdef struct Entry:
    int64_t row
    int64_t at               # its number among the ids

cdef struct Slot:            # a read: rows of entries [first, last), what of them is in bytes [lo, hi) of the table
    uint8_t *memory
    int file
    int direct
    int by_ring
    int again
    int64_t first
    int64_t last
    int64_t lo
    int64_t hi
    int64_t delta            # from the table's bytes to the file's
    int64_t start            # in the file
    int64_t need             # bytes that must come
    int64_t want             # bytes that are asked for
    int64_t done

cdef struct Failure:
    int kind
    int error
    int file
    int64_t row
    int64_t found
    int64_t expected


def direct_align(int fd):
    """What direct reads of a file must be aligned to, as the kernel says: bytes, 0 for none, -1 if it does not say."""
    return ft_direct_align(fd)


cdef inline int64_t down(int64_t value, int64_t align) noexcept nogil:
    return value - value % align


cdef inline int64_t up(int64_t value, int64_t align) noexcept nogil:
    return down(value + align - 1, align)


cdef Entry *sort_entries(Entry *entries, Entry *spare, int64_t n) noexcept nogil:
    """By row, a byte at a time, and in their own order where rows are the same. Returns which of both holds them."""
    cdef int64_t counts[256]
    cdef int64_t i, total, count, largest = 0
    cdef int shift = 0, digit
    cdef Entry *other
    for i in range(n):
        largest = max(largest, entries[i].row)
    while shift < 64 and largest >> shift:
        memset(counts, 0, sizeof(counts))
        for i in range(n):
            counts[(entries[i].row >> shift) & 255] += 1
        total = 0
        for digit in range(256):
            count = counts[digit]
            counts[digit] = total
            total += count
        for i in range(n):
            digit = (entries[i].row >> shift) & 255
            spare[counts[digit]] = entries[i]
            counts[digit] += 1
        other = entries
        entries = spare
        spare = other
        shift += 8
    return entries


@cython.final
cdef class Reader:
    """The files of a table, and slots for `depth` reads in flight; for one thread at a time, but for `stop`.

    files: (path, descriptor, alignment) of each, which it closes; alignment 1 means that reads are plain. parts:
    (file, first, stop, offset) in the order of the table's bytes, without gaps. slot_bytes: for each read, at least
    a row and two alignments. change: None, or what sees each answer of the system and may put another in its place, a
    callable (way, direct, offset, nbytes, result) -> result, of ways "ring", "pool" and "call"; for tests.
    """
    cdef ft_rowfile *files
    cdef Part *parts
    cdef Slot *slots
    cdef int *free_slots
    cdef uint8_t *memory
    cdef Entry *entries
    cdef Entry *spare
    cdef Entry *sorted
    cdef int64_t *counts
    cdef ft_ring ring
    cdef ft_pool pool
    cdef Failure failure
    cdef object raised
    cdef readonly object change
    cdef int n_files, n_free, depth, ring_dead, stopped, part
    cdef readonly int ring_error     # why there is no ring, 0 if there is
    cdef readonly int direct_error   # why direct reads were given up, 0 if they were not
    cdef readonly int64_t n_reads
    cdef int64_t slot_bytes, room, row_bytes, rows, entry, n_entries, in_row

    def __cinit__(
        self, list files, list parts, int64_t rows, int64_t row_bytes, int depth, int64_t slot_bytes, int64_t align,
        change=None,
    ):
        cdef int i
        cdef Part *part
        self.ring.fd = -1
        self.rows, self.row_bytes, self.depth, self.slot_bytes = rows, row_bytes, depth, slot_bytes
        self.change = change
        self.files = <ft_rowfile *> calloc(max(len(files), 1), sizeof(ft_rowfile))
        self.parts = <Part *> calloc(max(len(parts), 1), sizeof(Part))
        self.slots = <Slot *> calloc(depth, sizeof(Slot))
        self.free_slots = <int *> calloc(depth, sizeof(int))
        self.memory = <uint8_t *> aligned_alloc(align, up(depth * slot_bytes, align))
        if not self.files or not self.parts or not self.slots or not self.free_slots or not self.memory:
            raise MemoryError(f"{depth * slot_bytes} bytes to read rows into")
        if ft_pool_open(&self.pool, depth, min(depth, <int> MAX_THREADS)):
            raise MemoryError("a pool of threads")
        for i, (path, fd, file_align) in enumerate(files):
            self.files[i].path = strdup(path)
            self.files[i].fd, self.files[i].align = fd, file_align
            self.files[i].plain = fd if file_align == 1 else -1
            if not self.files[i].path:
                raise MemoryError("the name of a file")
        self.n_files = len(files)  # from here on they are closed here
        for i, (file, first, stop, offset) in enumerate(parts):
            part = &self.parts[i]
            part.file, part.first, part.stop, part.offset = file, first, stop, offset
        for i in range(depth):
            self.slots[i].memory = self.memory + i * slot_bytes
            self.free_slots[i] = depth - 1 - i
        self.n_free = depth
        self.ring_error = ft_ring_open(&self.ring, depth)

    def __dealloc__(self):
        cdef int i
        ft_ring_close(&self.ring)
        ft_pool_close(&self.pool)
        for i in range(self.n_files):
            if self.files[i].plain >= 0 and self.files[i].plain != self.files[i].fd:
                close(self.files[i].plain)
            close(self.files[i].fd)
            free(self.files[i].path)
        free(self.files)
        free(self.parts)
        free(self.slots)
        free(self.free_slots)
        free(self.memory)
        free(self.entries)
        free(self.spare)
        free(self.counts)

    @property
    def held_bytes(self):
        """Bytes that it may come to hold for reads and for ids, beyond the stacks of threads."""
        return self.depth * self.slot_bytes + 2 * self.room * <int64_t> sizeof(Entry)

    @property
    def n_threads(self):
        """Threads of the pool that were started."""
        return self.pool.n_threads

    @property
    def stopping(self):
        """Whether `stop` was called."""
        return ft_load(&self.stopped) != 0

    def stop(self):
        """Have the reading that goes on in another thread, and all later ones, end as STOPPED. Waits for nothing."""
        ft_store(&self.stopped, 1)

    def gather(self, const int64_t[::1] ids, uint8_t[::1] out):
        """Write the rows of `ids` (n,) into `out` (n * row_bytes,), in their order.

        Returns None, or what went wrong: (kind, errno, file, row, found, expected). Where kind is BAD_ID, `row` is the
        id and `found` its place; where ENDED, the file has `found` bytes and `expected` are needed; where FAILED, byte
        `found` could not be read, and bytes up to `expected` were asked for.
        """
        cdef int64_t n = ids.shape[0]
        assert out.shape[0] == n * self.row_bytes, "room for all rows"
        memset(&self.failure, 0, sizeof(Failure))
        if n:
            self.make_room(n)
            with nogil:
                self.read_all(&ids[0], n, &out[0])
        if self.raised is not None:
            raised, self.raised = self.raised, None
            raise raised
        failed = self.failure
        if not failed.kind:
            return None
        return failed.kind, failed.error, failed.file, failed.row, failed.found, failed.expected

    cdef int make_room(self, int64_t n) except -1:
        """For n ids, or as many of them as are sorted at once."""
        cdef int64_t room = 64
        n = min(n, <int64_t> MAX_ENTRIES)
        while room < n:
            room *= 2
        if self.room < room:
            free(self.entries)
            free(self.spare)
            self.room = 0
            self.entries = <Entry *> malloc(room * sizeof(Entry))
            self.spare = <Entry *> malloc(room * sizeof(Entry))
            if not self.entries or not self.spare:
                raise MemoryError(f"{2 * room * <int64_t> sizeof(Entry)} bytes to sort ids in")
            self.room = room
        if not self.counts:
            self.counts = <int64_t *> malloc(BUCKETS * sizeof(int64_t))
            if not self.counts:
                raise MemoryError("counts of ids")
        return 0

    cdef void read_all(self, const int64_t *ids, int64_t n, uint8_t *out) noexcept nogil:
        """All of them at once, or, where they are too many to be sorted, those of so many rows and of the next ones."""
        cdef int64_t i, lo = 0, hi, count, seen = 0, first
        cdef bint many = False
        if n <= MAX_ENTRIES:
            # They may lie in memory that others write: what is checked is a copy.
            for i in range(n):
                self.entries[i].row, self.entries[i].at = ids[i], i
            for i in range(n):
                if not 0 <= self.entries[i].row < self.rows:
                    self.fail_id(self.entries[i].row, i)
                    return
            self.read_entries(n, out)
            return
        for i in range(n):
            if not 0 <= ids[i] < self.rows:
                self.fail_id(ids[i], i)
                return
        while lo < self.rows and not self.failure.kind:
            hi = self.find_stop(ids, n, lo, &many)
            count = 0
            for i in range(n):
                if lo <= ids[i] < hi:
                    seen += 1
                    if count < (1 if many else <int64_t> MAX_ENTRIES):
                        self.entries[count].row, self.entries[count].at = lo if many else ids[i], i
                        count += 1
            if count:
                first = self.entries[0].at
                self.read_entries(count, out)
                if many and not self.failure.kind:
                    for i in range(n):
                        if ids[i] == lo and i != first:
                            memcpy(out + i * self.row_bytes, out + first * self.row_bytes, self.row_bytes)
            lo = hi
        if seen != n and not self.failure.kind:
            self.failure.kind, self.failure.found, self.failure.expected = C_CHANGED, seen, n

    cdef int64_t find_stop(self, const int64_t *ids, int64_t n, int64_t lo, bint *many) noexcept nogil:
        """A row up to which, from `lo` on, ids are not too many to sort; many: or the next one, and they are."""
        cdef int64_t width = self.rows - lo, step, total, i
        cdef int bucket
        many[0] = False
        while True:
            step = (width + BUCKETS - 1) // BUCKETS
            memset(self.counts, 0, BUCKETS * sizeof(int64_t))
            for i in range(n):
                if lo <= ids[i] < lo + width:
                    self.counts[(ids[i] - lo) // step] += 1
            total = 0
            for bucket in range(BUCKETS):
                total += self.counts[bucket]
                if total > MAX_ENTRIES:
                    break
            else:
                return lo + width
            if bucket:
                return lo + bucket * step
            if step == 1:
                many[0] = True
                return lo + 1
            width = step

    cdef void fail_id(self, int64_t row, int64_t at) noexcept nogil:
        self.failure.kind, self.failure.row, self.failure.found = C_BAD_ID, row, at

    cdef void read_entries(self, int64_t n, uint8_t *out) noexcept nogil:
        """Read the rows of the first n entries, in whatever order they are."""
        cdef int64_t result = 0
        cdef int tag, seen = 0
        self.sorted = sort_entries(self.entries, self.spare, n)
        self.n_entries, self.entry, self.in_row, self.part = n, 0, 0, 0
        while True:
            if ft_load(&self.stopped) and not self.failure.kind:
                self.failure.kind, self.failure.row = C_STOPPED, self.sorted[min(self.entry, n - 1)].row
            while not self.failure.kind and self.n_free and self.entry < n:
                tag = self.free_slots[self.n_free - 1]
                self.plan(&self.slots[tag])
                self.n_free -= 1
                self.put(tag)
            if self.n_free == self.depth:
                return
            tag = self.take(&result)
            self.answer(tag, result, out)
            seen += 1
            if seen % SIGNALS == 0:
                self.look_for_signals()

    cdef void plan(self, Slot *slot) noexcept nogil:
        """Take the next read: from the next entry on, as far as rows follow closely and the slot reaches."""
        cdef int64_t first_byte = self.sorted[self.entry].row * self.row_bytes + self.in_row
        cdef int64_t end = first_byte - self.in_row + self.row_bytes, next_byte, next_end, align
        cdef Part *part
        cdef ft_rowfile *file
        while self.parts[self.part].stop <= first_byte:
            self.part += 1
        part = &self.parts[self.part]
        file = &self.files[part.file]
        align = file.align
        slot.file, slot.direct, slot.again, slot.done = part.file, align > 1, 0, 0
        slot.first, slot.lo, slot.delta = self.entry, first_byte, part.offset - part.first
        slot.start = down(first_byte + slot.delta, align)
        while True:
            slot.last = self.entry + 1
            while slot.last < self.n_entries and self.sorted[slot.last].row == self.sorted[self.entry].row:
                slot.last += 1
            slot.hi = min(end, part.stop)
            if end > part.stop:  # the rest of the row is in the next part
                self.in_row = part.stop - (end - self.row_bytes)
                break
            self.entry, self.in_row = slot.last, 0
            if self.entry == self.n_entries:
                break
            next_byte = self.sorted[self.entry].row * self.row_bytes
            end = next_byte + self.row_bytes
            next_end = min(end, part.stop)
            if (
                next_byte >= part.stop
                or down(next_byte + slot.delta, align) > up(slot.hi + slot.delta, align) + GAP
                or up(next_end + slot.delta, align) - slot.start > self.slot_bytes
            ):
                break
        slot.need = slot.hi + slot.delta - slot.start
        slot.want = up(slot.need, align)

    cdef void put(self, int tag) noexcept nogil:
        """Ask for what is missing of a read."""
        cdef Slot *slot = &self.slots[tag]
        cdef ft_rowfile *file = &self.files[slot.file]
        cdef int fd = file.fd if slot.direct else file.plain
        cdef int64_t nbytes = slot.want - slot.done, offset = slot.start + slot.done
        slot.by_ring = not self.ring_error
        self.n_reads += 1
        if slot.by_ring:
            ft_ring_put(&self.ring, fd, slot.memory + slot.done, <unsigned> nbytes, offset, tag)
        else:
            ft_pool_put(&self.pool, fd, slot.memory + slot.done, nbytes, offset, tag)

    cdef int take(self, int64_t *result) noexcept nogil:
        """The next answer, and whose it is. A ring that is refused hands over to the pool what it did not take."""
        cdef int tag, error, tries = 0
        while True:
            if self.ring.fd >= 0:
                tag = ft_ring_take(&self.ring, result)
                if tag >= 0:
                    return tag
            if not self.ring.queued and not self.ring.flying:
                return ft_pool_take(&self.pool, result)
            if self.ring_dead:  # what the kernel has taken it still answers
                ft_nap()
                continue
            error = ft_ring_enter(&self.ring, 1)
            if error == EINTR:
                self.look_for_signals()
            elif error and (error in (EAGAIN, EBUSY)) and tries < AGAIN:
                tries += 1
                ft_nap()
            elif error:
                self.ring_error, self.ring_dead = error, 1
                while True:
                    tag = ft_ring_take_back(&self.ring)
                    if tag < 0:
                        break
                    self.n_reads -= 1
                    self.put(tag)

    cdef void answer(self, int tag, int64_t result, uint8_t *out) noexcept nogil:
        """Go on with a read: its rows are there, or the rest is asked for, plainly if it was direct, or it failed."""
        cdef Slot *slot = &self.slots[tag]
        cdef ft_rowfile *file = &self.files[slot.file]
        cdef int refused
        if self.change is not None:
            result = self.change_answer(tag, slot.by_ring, result)
        if self.failure.kind:
            self.release(tag)
            return
        if result == -EINTR or result == -EAGAIN:
            slot.again += 1
            if slot.again < AGAIN:
                self.put(tag)
                return
        if slot.by_ring and result < 0:
            # The ring may be what fails here. A call tells.
            refused = <int> -result
            result = ft_pread(
                file.fd if slot.direct else file.plain,
                slot.memory + slot.done, slot.want - slot.done, slot.start + slot.done,
            )
            if self.change is not None:
                result = self.change_answer(tag, -1, result)
            if result >= 0 and refused in (EINVAL, EOPNOTSUPP, ENOSYS, EPERM):
                self.ring_error = refused
        if result > 0:
            slot.done += result
            slot.again = 0
        if slot.done >= slot.need:
            self.copy(slot, out)
            self.release(tag)
        elif slot.direct:
            refused = ft_open_plain(file)
            if refused:
                self.fail(tag, C_FAILED, refused)
                return
            if result == -EINVAL or result == -EOPNOTSUPP:
                self.direct_error = <int> -result
                file.align = 1
            slot.direct, slot.want = 0, slot.need
            self.put(tag)
        elif result > 0:
            self.put(tag)
        elif result == 0:
            self.fail(tag, C_ENDED, 0)
        else:
            self.fail(tag, C_FAILED, <int> -result)

    cdef void copy(self, const Slot *slot, uint8_t *out) noexcept nogil:
        """From a slot to where rows belong."""
        cdef const uint8_t *memory = slot.memory - slot.start + slot.delta
        cdef int64_t i, row, lo, hi
        for i in range(slot.first, slot.last):
            row = self.sorted[i].row * self.row_bytes
            lo, hi = max(row, slot.lo), min(row + self.row_bytes, slot.hi)
            memcpy(out + self.sorted[i].at * self.row_bytes + (lo - row), memory + lo, hi - lo)

    cdef void release(self, int tag) noexcept nogil:
        self.free_slots[self.n_free] = tag
        self.n_free += 1

    cdef void fail(self, int tag, int kind, int error) noexcept nogil:
        """Say which row could not be read, the first of a read that did not come."""
        cdef Slot *slot = &self.slots[tag]
        cdef int64_t i = slot.first, reached = slot.start + slot.done - slot.delta
        while i < slot.last - 1 and min((self.sorted[i].row + 1) * self.row_bytes, slot.hi) <= reached:
            i += 1
        self.failure.kind, self.failure.error, self.failure.file = kind, error, slot.file
        self.failure.row = self.sorted[i].row
        self.failure.found, self.failure.expected = slot.start + slot.done, slot.start + slot.need
        if kind == C_ENDED:
            self.failure.found = ft_file_bytes(self.files[slot.file].fd)
        self.release(tag)

    cdef void look_for_signals(self) noexcept nogil:
        """Ctrl-C ends a long reading; only the main thread sees it."""
        with gil:
            try:
                PyErr_CheckSignals()
            except BaseException as error:
                self.keep(error)

    cdef int64_t change_answer(self, int tag, int by_ring, int64_t result) noexcept nogil:
        """by_ring: -1 for a call."""
        cdef Slot *slot = &self.slots[tag]
        with gil:
            try:
                way = "call" if by_ring < 0 else "ring" if by_ring else "pool"
                result = self.change(way, bool(slot.direct), slot.start + slot.done, slot.want - slot.done, result)
            except BaseException as error:
                self.keep(error)
        return result

    cdef int keep(self, error) except -1:
        self.raised = error
        self.failure.kind = self.failure.kind or C_STOPPED
        return 0


def read_spans(int fd, const int64_t[::1] offsets, const int64_t[::1] lengths, int depth):
    """Make reads with `depth` of them in flight and do nothing with what they bring: what a drive gives at most.

    offsets, lengths: (n,), multiples of what direct reads of the file need. Raises OSError where there is no ring, or
    where a read fails or ends early.
    """
    cdef ft_ring ring
    cdef int64_t n = offsets.shape[0], asked = 0, answered = 0, room = PAGE, result = 0, i
    cdef int error = ft_ring_open(&ring, depth), tag
    cdef uint8_t *memory = NULL
    cdef int64_t *numbers = <int64_t *> calloc(depth, sizeof(int64_t))
    assert lengths.shape[0] == n, "a length for each offset"
    for i in range(n):
        room = max(room, up(lengths[i], PAGE))
    memory = <uint8_t *> aligned_alloc(PAGE, depth * room)
    if not memory or not numbers:
        error = error or ENOMEM
    with nogil:
        while asked < min(n, <int64_t> depth) and not error:
            ft_ring_put(&ring, fd, memory + asked * room, <unsigned> lengths[asked], offsets[asked], <int> asked)
            numbers[asked] = asked
            asked += 1
        while answered < n and not error:
            error = ft_ring_enter(&ring, 1)
            if error == EINTR:
                error = 0
            while not error:
                tag = ft_ring_take(&ring, &result)
                if tag < 0:
                    break
                answered += 1
                if result != lengths[numbers[tag]]:
                    error = <int> -result if result < 0 else EINVAL
                elif asked < n:
                    ft_ring_put(&ring, fd, memory + tag * room, <unsigned> lengths[asked], offsets[asked], tag)
                    numbers[tag] = asked
                    asked += 1
        while ring.flying:  # the kernel still writes
            if ft_ring_take(&ring, &result) < 0:
                ft_nap()
    ft_ring_close(&ring)
    free(memory)
    free(numbers)
    if error:
        raise OSError(error, "a plain read")
