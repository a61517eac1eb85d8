/* Pieces of a thread's share of a phase, taken one by one by that thread, and by others once they are done with theirs.
 *
 * Shares are equal, but cores are not: a foreign thread, another core's clock or a busier memory channel makes one late,
 * and all wait for it at the barrier. Taking a piece costs one atomic addition; a piece is two tiles or more.
 */
#ifndef FREETOKEN_QUEUE_H
#define FREETOKEN_QUEUE_H
#include <stddef.h>

typedef struct {
    ptrdiff_t next, end;
    char apart[48]; /* a cache line for each */
} ft_queue;

static inline void ft_queue_fill(ft_queue *q, ptrdiff_t start, ptrdiff_t end) {
    q->end = end;
    __atomic_store_n(&q->next, start, __ATOMIC_RELAXED);
}

/* The next piece, or -1. Whoever fills the queue does so before a barrier that all takers pass. */
static inline ptrdiff_t ft_queue_take(ft_queue *q) {
    if (__atomic_load_n(&q->next, __ATOMIC_RELAXED) >= q->end) return -1;
    const ptrdiff_t piece = __atomic_fetch_add(&q->next, 1, __ATOMIC_RELAXED);
    return piece < q->end ? piece : -1;
}
#endif
