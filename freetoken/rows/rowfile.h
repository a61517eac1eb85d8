/* Files of a table: what of them is open, and which reads they take. */
#ifndef FREETOKEN_ROWFILE_H
#define FREETOKEN_ROWFILE_H
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#ifndef O_CLOEXEC
#define O_CLOEXEC 0
#endif

typedef struct {
    char *path;
    int fd;        /* for direct reads, or for plain ones where `align` is 1 */
    int plain;     /* -1 before a plain read was wanted of a file that takes direct ones */
    int64_t align; /* of direct reads: their offsets, lengths and memory */
} ft_rowfile;

/* Have a descriptor for plain reads: of the very same file, which another may have replaced. Returns 0 or an errno. */
static inline int ft_open_plain(ft_rowfile *f) {
    struct stat ours, found;
    if (f->plain >= 0) return 0;
    const int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return errno;
    if (fstat(f->fd, &ours) || fstat(fd, &found) || ours.st_dev != found.st_dev || ours.st_ino != found.st_ino) {
        close(fd);
        return ESTALE;
    }
#ifdef POSIX_FADV_RANDOM
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM); /* the rows beside are seldom wanted */
#endif
    f->plain = fd;
    return 0;
}

static inline int64_t ft_file_bytes(int fd) {
    struct stat found;
    return fstat(fd, &found) ? -1 : (int64_t)found.st_size;
}

/* What a file asks of direct reads, by the kernel's word: bytes, 0 where it takes none, -1 where it does not say. */
static inline int64_t ft_direct_align(int fd) {
#if defined(__linux__) && defined(SYS_statx) && defined(AT_EMPTY_PATH)
    enum { DIOALIGN = 0x2000, MEMORY = 0x98, OFFSET = 0x9c }; /* Linux 6.1; headers may be older */
    uint8_t found[256] = {0};
    uint32_t mask, memory, offset;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, DIOALIGN, found)) return -1;
    memcpy(&mask, found, 4);
    memcpy(&memory, found + MEMORY, 4);
    memcpy(&offset, found + OFFSET, 4);
    if (mask & DIOALIGN) return memory > offset ? memory : offset;
#else
    (void)fd;
#endif
    return -1;
}
#endif
