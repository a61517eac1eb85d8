/* Reads in flight by io_uring, through raw system calls: two rings that this process and the kernel share.
 *
 * One thread at a time. No more reads are put in than there are entries, and the kernel's answers have twice the room,
 * so none is ever dropped. Errors are returned as errnos; structures are those of <linux/io_uring.h>, which systems
 * that packages are built on may be too old to have.
 */
#ifndef FREETOKEN_RING_H
#define FREETOKEN_RING_H
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

typedef struct {
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, address;
    uint32_t nbytes, rw_flags;
    uint64_t tag, rest[3];
} ft_sqe;
typedef struct {
    uint64_t tag;
    int32_t result;
    uint32_t flags;
} ft_cqe;
typedef struct {
    uint32_t sq_entries, cq_entries, flags, cpu, idle, features, workers, reserved[3];
    uint32_t sq_head, sq_tail, sq_mask, sq_size, sq_flags, sq_dropped, sq_array, sq_rest[3];
    uint32_t cq_head, cq_tail, cq_mask, cq_size, cq_overflow, cq_cqes, cq_rest[4];
} ft_ring_params;
_Static_assert(sizeof(ft_sqe) == 64 && sizeof(ft_cqe) == 16 && sizeof(ft_ring_params) == 120, "the kernel's layout");

/* Linux 5.6 has reads without a vector, and says so by the feature that came with them. */
enum { FT_SETUP = 425, FT_ENTER = 426, FT_OP_READ = 22, FT_GETEVENTS = 1, FT_SINGLE_MMAP = 1, FT_SINCE_5_6 = 8 };
#define FT_SQES_OFFSET 0x10000000

typedef struct {
    int fd; /* -1: there is none */
    uint8_t *rings;
    ft_sqe *sqes;
    ft_cqe *cqes;
    size_t rings_bytes, sqes_bytes;
    uint32_t *sq_tail, *sq_array, *cq_head, *cq_tail;
    uint32_t sq_mask, cq_mask;
    uint32_t queued; /* put in, and not taken by the kernel yet */
    uint32_t flying; /* taken by the kernel, and not answered yet */
} ft_ring;

static inline void ft_ring_close(ft_ring *r) {
    if (r->sqes) munmap(r->sqes, r->sqes_bytes);
    if (r->rings) munmap(r->rings, r->rings_bytes);
    if (r->fd >= 0) close(r->fd);
    memset(r, 0, sizeof *r);
    r->fd = -1;
}

/* Returns 0, or why there can be none: EPERM or ENOSYS in many containers. */
static inline int ft_ring_open(ft_ring *r, unsigned entries) {
    memset(r, 0, sizeof *r);
    r->fd = -1;
#if defined(__linux__) && defined(MAP_POPULATE)
    ft_ring_params p = {0};
    r->fd = (int)syscall(FT_SETUP, entries, &p);
    if (r->fd < 0) return errno;
    if (!(p.features & FT_SINGLE_MMAP) || !(p.features & FT_SINCE_5_6)) {
        ft_ring_close(r);
        return ENOSYS;
    }
    const size_t sq = p.sq_array + p.sq_entries * sizeof(uint32_t), cq = p.cq_cqes + p.cq_entries * sizeof(ft_cqe);
    r->rings_bytes = sq > cq ? sq : cq;
    r->sqes_bytes = p.sq_entries * sizeof(ft_sqe);
    void *rings = mmap(NULL, r->rings_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd, 0);
    void *sqes = mmap(NULL, r->sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd, FT_SQES_OFFSET);
    const int error = errno;
    r->rings = rings == MAP_FAILED ? NULL : (uint8_t *)rings;
    r->sqes = sqes == MAP_FAILED ? NULL : (ft_sqe *)sqes;
    if (!r->rings || !r->sqes) {
        ft_ring_close(r);
        return error;
    }
    r->cqes = (ft_cqe *)(r->rings + p.cq_cqes);
    r->sq_tail = (uint32_t *)(r->rings + p.sq_tail);
    r->sq_array = (uint32_t *)(r->rings + p.sq_array);
    r->cq_head = (uint32_t *)(r->rings + p.cq_head);
    r->cq_tail = (uint32_t *)(r->rings + p.cq_tail);
    r->sq_mask = *(uint32_t *)(r->rings + p.sq_mask);
    r->cq_mask = *(uint32_t *)(r->rings + p.cq_mask);
    return 0;
#else
    (void)entries;
    return ENOSYS;
#endif
}

static inline void ft_ring_put(ft_ring *r, int fd, uint8_t *to, uint32_t nbytes, int64_t offset, int tag) {
    const uint32_t tail = *r->sq_tail, at = tail & r->sq_mask;
    ft_sqe *const e = &r->sqes[at];
    memset(e, 0, sizeof *e);
    e->opcode = FT_OP_READ;
    e->fd = fd;
    e->address = (uint64_t)(uintptr_t)to;
    e->nbytes = nbytes;
    e->offset = (uint64_t)offset;
    e->tag = (uint64_t)tag;
    r->sq_array[at] = at;
    __atomic_store_n(r->sq_tail, tail + 1, __ATOMIC_RELEASE);
    r->queued++;
}

/* Take back the last read that was put in and that the kernel did not take; returns its tag, or -1. */
static inline int ft_ring_take_back(ft_ring *r) {
    if (!r->queued) return -1;
    const uint32_t tail = *r->sq_tail - 1;
    __atomic_store_n(r->sq_tail, tail, __ATOMIC_RELEASE);
    r->queued--;
    return (int)r->sqes[tail & r->sq_mask].tag;
}

/* Hand over what was put in and, if it was all taken, wait for so many answers; returns 0 or an errno. */
static inline int ft_ring_enter(ft_ring *r, unsigned answers) {
#ifdef __linux__
    const long taken = syscall(FT_ENTER, r->fd, r->queued, answers, answers ? FT_GETEVENTS : 0, NULL, (size_t)0);
    if (taken < 0) return errno;
    r->queued -= (uint32_t)taken;
    r->flying += (uint32_t)taken;
    return 0;
#else
    (void)r, (void)answers;
    return ENOSYS;
#endif
}

/* The next answer, if there is one; returns its tag, or -1. result: bytes read, or a negative errno. */
static inline int ft_ring_take(ft_ring *r, int64_t *result) {
    const uint32_t head = *r->cq_head;
    if (head == __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE)) return -1;
    const ft_cqe *const answer = &r->cqes[head & r->cq_mask];
    const int tag = (int)answer->tag;
    *result = answer->result;
    __atomic_store_n(r->cq_head, head + 1, __ATOMIC_RELEASE);
    r->flying--;
    return tag;
}
#endif
