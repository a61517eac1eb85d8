/* A piece of a file in memory: from the page cache if it is there, straight from the disk if not.
 *
 * What is cached is read from the cache and stays there. What is not never enters it: a model is read once, and pages
 * of it would push others out. Where a file system does not tell which is which, or takes no direct reads, reads are
 * plain ones.
 */
#ifndef FREETOKEN_WINDOW_H
#define FREETOKEN_WINDOW_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FT_BLOCK = 4096, FT_HUGE = 2 << 20, FT_ENDED = -1 };

#ifndef O_DIRECT
#define O_DIRECT 0
#endif
#ifdef POSIX_FADV_RANDOM
enum { FT_RANDOM = POSIX_FADV_RANDOM, FT_SEQUENTIAL = POSIX_FADV_SEQUENTIAL };
#else
enum { FT_RANDOM, FT_SEQUENTIAL };
#endif
#ifndef O_CLOEXEC
#define O_CLOEXEC 0
#endif

typedef struct {
    const char *path;
    int plain, direct; /* descriptors, -1 before they are opened; direct is -2 where there is none */
    int tells;         /* whether reads can be confined to what is cached */
} ft_file;

typedef struct {
    uint8_t *memory; /* `capacity` bytes, a multiple of FT_HUGE */
    int64_t capacity;
    const ft_file *file; /* whose bytes [start, stop) it holds */
    int64_t start, stop;
    int cold; /* the last read was direct */
    int huge; /* large reads were made, and huge pages asked for */
} ft_window;

static inline void ft_free_window(ft_window *w) {
    free(w->memory);
    memset(w, 0, sizeof *w);
}

/* Give a window its memory, which could be whole huge pages; returns whether there was some. */
static inline int ft_make_window(ft_window *w, int64_t capacity) {
    ft_free_window(w);
    w->memory = aligned_alloc(FT_HUGE, (size_t)capacity);
    if (!w->memory) return 0;
    w->capacity = capacity;
    w->cold = 1;
    return 1;
}

static inline void ft_close(ft_file *file) {
    if (file->plain >= 0) close(file->plain);
    if (file->direct >= 0) close(file->direct);
}

/* Whether the kernel reads ahead. It must not where only what is cached is read: all would come to be. */
static inline void ft_advise(const ft_file *file, int advice) {
#ifdef POSIX_FADV_RANDOM
    (void)posix_fadvise(file->plain, 0, 0, advice);
#else
    (void)file, (void)advice;
#endif
}

/* What of n bytes is cached, from the first on. */
static inline int64_t ft_read_cached(ft_file *file, uint8_t *out, int64_t n, int64_t offset) {
    int64_t done = 0;
#ifdef RWF_NOWAIT
    while (file->tells && done < n) {
        struct iovec part = {out + done, (size_t)(n - done)};
        const ssize_t got = preadv2(file->plain, &part, 1, offset + done, RWF_NOWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno != EAGAIN) ft_advise(file, FT_SEQUENTIAL), file->tells = 0;
        if (got <= 0) break;
        done += got;
    }
#else
    (void)out, (void)n, (void)offset;
    ft_advise(file, FT_SEQUENTIAL), file->tells = 0;
#endif
    return done;
}

static inline int64_t ft_read_direct(ft_file *file, uint8_t *out, int64_t n, int64_t offset) {
    int64_t done = 0;
    if (file->direct == -1) file->direct = O_DIRECT ? open(file->path, O_RDONLY | O_CLOEXEC | O_DIRECT) : -1;
    if (file->direct < 0) file->direct = -2;
    while (file->direct >= 0 && done < n) {
        const ssize_t got = pread(file->direct, out + done, (size_t)(n - done), offset + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            close(file->direct);
            file->direct = -2;
        }
        if (got <= 0) break;
        done += got;
        if (got % FT_BLOCK) break; /* the end of the file */
    }
    return done;
}

/* Ask for huge pages, if they are to be had: memory is in few pieces then, a request to a disk takes so many of them, and
 * reads more (2.9 to 3.5 against 1.2 GB/s, a virtual disk). Files that are cached do with the first few small pages. */
static inline void ft_read_much(ft_window *w) {
#ifdef MADV_HUGEPAGE
    if (!w->huge) madvise(w->memory, (size_t)w->capacity, MADV_HUGEPAGE);
#endif
    w->huge = 1;
}

/* Have bytes [offset, offset + n) of a file at *out, n + 2 * FT_BLOCK <= capacity. end: as far as reading ahead is of
 * use, at least offset + n. Returns 0, an errno, or FT_ENDED.
 */
static inline int ft_look(ft_window *w, ft_file *file, int64_t offset, int64_t n, int64_t end, const uint8_t **out) {
    if (w->file != file || offset < w->start || offset + n > w->stop) {
        if (file->plain < 0) {
            file->plain = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* it may have become a pipe */
            if (file->plain < 0) return errno;
            ft_advise(file, FT_RANDOM);
        }
        w->file = NULL;
        /* The kernel reads what is asked for and not cached, too late for the answer: cold files are asked for little. */
        int64_t done = 0;
        if (!w->cold || ft_read_cached(file, w->memory, n < FT_BLOCK ? n : FT_BLOCK, offset) > 0)
            done = ft_read_cached(file, w->memory, n, offset);
        w->cold = file->tells && done < n;
        w->start = offset;
        if (w->cold) {
            ft_read_much(w);
            const int64_t start = offset - offset % FT_BLOCK;
            const int64_t want = (end - start + FT_BLOCK - 1) / FT_BLOCK * FT_BLOCK;
            const int64_t got = ft_read_direct(file, w->memory, want < w->capacity ? want : w->capacity, start);
            if (start + got >= offset + n) {
                w->start = start;
                done = start + got - offset;
            } else {
                done = 0;
            }
        }
        while (done < n) {
            const ssize_t got = pread(file->plain, w->memory + done, (size_t)(n - done), offset + done);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) return errno;
            if (!got) return FT_ENDED;
            done += got;
        }
        w->stop = offset + done;
        w->file = file;
    }
    *out = w->memory + (offset - w->start);
    return 0;
}
#endif
