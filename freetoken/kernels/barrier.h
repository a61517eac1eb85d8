/* A barrier for the threads inside one layer, whatever team they belong to.
 *
 * Threads meet several times within some hundred microseconds, so they spin, politely (pause). A thread that waits
 * for 2000 pauses sleeps: the one that it waits for has lost its core to somebody else, and gets this one.
 */
#ifndef FREETOKEN_BARRIER_H
#define FREETOKEN_BARRIER_H
#include "futex.h"

enum { FT_SPINS = 2000 }; /* of a pause of 40 to 140 cycles */

typedef struct {
    int arrived;
    char apart[60]; /* the counter and the phase on cache lines of their own */
    ft_event phase;
} ft_barrier;

static inline void ft_barrier_wait(ft_barrier *b, int n) {
    if (n <= 1) return;
    const int phase = ft_event_look(&b->phase);
    if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == n) {
        __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
        ft_event_signal(&b->phase);
        return;
    }
    ft_event_wait(&b->phase, phase, FT_SPINS);
}
#endif
