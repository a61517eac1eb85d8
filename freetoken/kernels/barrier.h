/* A barrier for the threads inside one layer, whatever team they belong to.
 *
 * Threads meet several times within some hundred microseconds, so they spin, politely (pause); a thread that waits
 * long gives its core away (sched_yield), so that a team larger than its cores still makes progress.
 */
#ifndef FREETOKEN_BARRIER_H
#define FREETOKEN_BARRIER_H
#include <sched.h>

typedef struct {
    int arrived;
    char apart[60]; /* the counter and the phase on cache lines of their own */
    int phase;
    char end[60];
} ft_barrier;

static inline void ft_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void ft_barrier_wait(ft_barrier *b, int n) {
    if (n <= 1) return;
    int phase = __atomic_load_n(&b->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == n) {
        __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&b->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&b->phase, __ATOMIC_ACQUIRE) == phase; spins++) {
        if (spins < 2000)
            ft_pause();
        else
            sched_yield();
    }
}
#endif
