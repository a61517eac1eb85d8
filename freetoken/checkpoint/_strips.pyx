"""Reads rows of files strip by strip into memory that stays in the cache, and writes them as tiles, without the GIL."""
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free

cdef extern from "tiling.h" nogil:
    enum:
        FT_ROWS
    ctypedef struct ft_tiling:
        ptrdiff_t codes
        ptrdiff_t block_codes
        ptrdiff_t code_step
        ptrdiff_t scale_bytes
        ptrdiff_t scale_step
        int halves
        int code_width
        uint32_t code_bits
        uint32_t scale_bits[2]
    int ft_has_byte(const uint8_t *values, ptrdiff_t n, uint32_t bits)
    int ft_write_tile(const ft_tiling *t, const uint8_t *const *codes, const uint8_t *const *scales, uint8_t *tile)

cdef extern from "window.h" nogil:
    enum:
        FT_BLOCK
        FT_HUGE
        FT_ENDED
    ctypedef struct ft_file:
        const char *path
        int plain
        int direct
        int tells
    ctypedef struct ft_window:
        uint8_t *memory
        int64_t capacity
        const ft_file *file
        int64_t start
        int64_t stop
    int ft_make_window(ft_window *w, int64_t capacity)
    void ft_free_window(ft_window *w)
    void ft_close(ft_file *file)
    int ft_look(ft_window *w, ft_file *file, int64_t offset, int64_t n, int64_t end, const uint8_t **out)

cdef enum:
    STRIP_BYTES = 1 << 18    # read from the page cache at once: with its tiles this stays in the second level cache
    WINDOW_BYTES = 4 << 20   # read from the disk at once

ENDED = FT_ENDED

cdef struct Rows:
    ft_file *file            # NULL: they are in memory
    const uint8_t *memory    # NULL as well: they lie with the codes
    int64_t offset
    int64_t row_bytes
    int64_t at               # where in a row those bytes begin that are wanted
    int64_t end              # as far as the file is wanted without a gap: reading ahead is of use

cdef struct Piece:
    Rows codes
    Rows scales
    ft_tiling tiling
    int64_t rows
    int64_t step
    uint8_t *out
    int64_t tile_step


cdef int look(ft_window *window, const Rows *rows, int64_t first, int64_t n, const uint8_t **out) noexcept nogil:
    """Rows [first, first + n) of a file or of memory."""
    cdef int64_t start = rows.offset + first * rows.row_bytes
    if not rows.file:
        out[0] = rows.memory + start
        return 0
    return ft_look(window, rows.file, start, n * rows.row_bytes, rows.end, out)


cdef int write_piece(
    ft_window *windows, const Piece *piece, const uint8_t *zeros, int *of_scales, int *suspicious
) noexcept nogil:
    """All tiles of a piece: 0, or an errno or FT_ENDED, of its codes or its scales."""
    cdef const uint8_t *codes = NULL
    cdef const uint8_t *scales = NULL
    cdef const uint8_t *code_rows[FT_ROWS]
    cdef const uint8_t *scale_rows[FT_ROWS]
    cdef int64_t group = FT_ROWS * piece.step, first = 0, start, strip, n, i, g, row
    cdef int64_t of_strip = max(STRIP_BYTES // (group * piece.codes.row_bytes), 1) * group
    cdef int error, r, matrix
    while first < piece.rows:
        strip = min(of_strip, piece.rows - first)
        # What is left of the last direct read is used before the next one.
        start = piece.codes.offset + first * piece.codes.row_bytes
        if windows[0].file == piece.codes.file and windows[0].start <= start:
            n = (windows[0].stop - piece.codes.offset) // piece.codes.row_bytes - first
            if n >= group:
                strip = min(strip, n - n % group)
        error = look(&windows[0], &piece.codes, first, strip, &codes)
        if error:
            return error
        if not piece.scales.file and not piece.scales.memory:
            scales = codes
        else:
            error = look(&windows[1], &piece.scales, first, strip, &scales)
            if error:
                of_scales[0] = 1
                return error
        for i in range((strip + group - 1) // group):
            g = i * group
            for matrix in range(piece.step):
                for r in range(FT_ROWS):
                    row = g + r * piece.step + matrix
                    if row < strip:
                        code_rows[r] = codes + row * piece.codes.row_bytes + piece.codes.at
                        scale_rows[r] = scales + row * piece.scales.row_bytes + piece.scales.at
                    else:
                        code_rows[r] = scale_rows[r] = zeros
                suspicious[0] |= ft_write_tile(
                    &piece.tiling,
                    code_rows,
                    scale_rows,
                    piece.out + ((first + g) // FT_ROWS + matrix) * piece.tile_step,
                )
        first += strip
    return 0


cdef void find_ends(Piece *pieces, int n) noexcept nogil:
    """Set how far each file is wanted: where rows end, others may begin, of a piece further on or further back.

    Codes are followed by codes and scales by scales: each kind has a window of its own.
    """
    cdef Rows *rows
    cdef Rows *other
    cdef int i, j
    cdef bint changed = True
    for i in range(2 * n):
        rows = &pieces[i // 2].codes if i % 2 == 0 else &pieces[i // 2].scales
        rows.end = rows.offset + pieces[i // 2].rows * rows.row_bytes
    while changed:
        changed = False
        for i in range(2 * n - 1, -1, -1):  # pieces are in the order of the file: what follows is known already
            rows = &pieces[i // 2].codes if i % 2 == 0 else &pieces[i // 2].scales
            for j in range(i % 2, 2 * n, 2):
                other = &pieces[j // 2].codes if j % 2 == 0 else &pieces[j // 2].scales
                if rows.file and other.file == rows.file and other.offset == rows.end and other.end > rows.end:
                    rows.end = other.end
                    changed = True


cdef int read_rows(Rows *rows, source, ft_file *files, dict paths) except -1:
    """Take over what a `strips.Rows` says."""
    cdef const uint8_t[::1] memory
    rows.offset, rows.row_bytes, rows.at = source.offset, source.row_bytes, source.at
    if source.path is None:
        if source.memory is not None:
            memory = source.memory
            rows.memory = &memory[0]
        return 0
    rows.file = &files[paths.setdefault(source.path, len(paths))]
    rows.file.path = source.path
    rows.file.plain = rows.file.direct = -1
    rows.file.tells = 1
    return 0


cpdef int64_t window_bytes(int64_t strip_bytes) noexcept:
    """Bytes of each of a reader's two windows, if its strips have so many: whole huge pages."""
    return ((max(<int64_t> WINDOW_BYTES, strip_bytes) + 2 * FT_BLOCK) // FT_HUGE + 1) * FT_HUGE


@cython.final
cdef class Reader:
    """Two windows into files, of codes and of scales, for one thread at a time."""
    cdef ft_window windows[2]
    cdef uint8_t *zeros
    cdef int64_t zero_bytes

    def __dealloc__(self):
        ft_free_window(&self.windows[0])
        ft_free_window(&self.windows[1])
        free(self.zeros)

    cdef int make_room(self, int64_t row_bytes, int64_t strip_bytes) except -1:
        """For rows and strips of so many bytes."""
        cdef int64_t capacity = window_bytes(strip_bytes)
        cdef int i
        for i in range(2):
            self.windows[i].file = NULL
            if self.windows[i].capacity < capacity and not ft_make_window(&self.windows[i], capacity):
                raise MemoryError(f"{capacity} bytes to read a file into")
        if self.zero_bytes < row_bytes:
            free(self.zeros)
            self.zero_bytes = 0
            self.zeros = <uint8_t *> calloc(1, row_bytes)
            if not self.zeros:
                raise MemoryError(f"{row_bytes} bytes")
            self.zero_bytes = row_bytes
        return 0

    def has_byte(self, path, list spans, tuple alarms):
        """Whether bytes of a file, of [offset, end) of each span, have all bits of one of `alarms`.

        Returns (span, error, found): the span that could not be read, -1 if all were, and an errno or ENDED.
        """
        cdef ft_file file
        cdef const uint8_t *data = NULL
        cdef int64_t offset, end, n
        cdef int error = 0, number = 0, found = 0, i
        cdef uint32_t bits[2]
        cdef int n_bits = len(alarms)
        for i in range(n_bits):
            bits[i] = alarms[i]
        self.make_room(0, 0)
        file.path, file.plain, file.direct, file.tells = path, -1, -1, 1
        try:
            for number, (offset, end) in enumerate(spans):
                with nogil:
                    while offset < end and not error:
                        n = min(end - offset, <int64_t> STRIP_BYTES)
                        error = ft_look(&self.windows[0], &file, offset, n, end, &data)
                        if not error:
                            for i in range(n_bits):
                                found |= ft_has_byte(data, n, bits[i])
                        offset += n
                if error:
                    return number, error, False
        finally:
            ft_close(&file)
        return -1, 0, bool(found)

    def write(self, list pieces, uint8_t[::1] out):
        """Write the tiles of all pieces into `out`; see `strips.Piece`.

        Returns (piece, error, of scales, suspicious): the piece that could not be read, -1 if all were; an errno or
        ENDED; whether it was its scales that could not; and whether codes or scales have bits that no number has.
        """
        cdef int n = len(pieces), i, error = 0, of_scales = 0, suspicious = 0
        cdef int64_t widest, row_bytes = 0, strip_bytes = 0
        cdef dict paths = {}
        cdef Piece *all_pieces = <Piece *> calloc(n, sizeof(Piece))
        cdef ft_file *files = <ft_file *> calloc(2 * n, sizeof(ft_file))
        cdef Piece *piece
        cdef ft_tiling *tiling
        try:
            if not all_pieces or not files:
                raise MemoryError("a list of pieces")
            for i in range(n):
                source = pieces[i]
                piece = &all_pieces[i]
                tiling = &piece.tiling
                read_rows(&piece.codes, source.codes, files, paths)
                read_rows(&piece.scales, source.scales, files, paths)
                (tiling.codes, tiling.block_codes, tiling.code_step, tiling.scale_bytes, tiling.scale_step,
                 tiling.halves, tiling.code_width, tiling.code_bits, tiling.scale_bits[0], tiling.scale_bits[1]
                 ) = source.tiling
                piece.rows, piece.step, piece.tile_step = source.rows, source.step, source.tile_step
                piece.out = &out[0] + <int64_t> source.out
                assert source.out + source.out_bytes <= out.shape[0], "tiles end outside their record"
                widest = max(piece.codes.row_bytes, piece.scales.row_bytes)
                row_bytes, strip_bytes = max(row_bytes, widest), max(strip_bytes, FT_ROWS * piece.step * widest)
            strip_bytes = max(strip_bytes, <int64_t> STRIP_BYTES)
            self.make_room(row_bytes, strip_bytes)
            with nogil:
                find_ends(all_pieces, n)
                for i in range(n):
                    error = write_piece(self.windows, &all_pieces[i], self.zeros, &of_scales, &suspicious)
                    if error:
                        break
            return (i if error else -1), error, bool(of_scales), bool(suspicious)
        finally:
            if files:
                for i in range(len(paths)):
                    ft_close(&files[i])
            free(files)
            free(all_pieces)
