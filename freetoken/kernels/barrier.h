/* A barrier for the threads inside one layer, whatever team they belong to.
 *
 * Threads meet several times within some hundred microseconds, so they spin, politely (pause). A thread that waits
 * for 2000 pauses sleeps: the one that it waits for has lost its core to somebody else, and gets this one.
 */
#ifndef FREETOKEN_BARRIER_H
#define FREETOKEN_BARRIER_H
#include <limits.h>
#include <sched.h>
#include <stddef.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { FT_SPINS = 2000 }; /* of a pause of 40 to 140 cycles */

typedef struct {
    int arrived;
    char apart[60]; /* the counter and the phase on cache lines of their own */
    int phase;
    int sleepers;
    char end[56];
} ft_barrier;

static inline void ft_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep while the phase is this one. */
static inline void ft_barrier_sleep(ft_barrier *b, int phase) {
#if defined(__linux__) && defined(SYS_futex)
    syscall(SYS_futex, &b->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
#else
    (void)b, (void)phase;
    sched_yield();
#endif
}

static inline void ft_barrier_wake(ft_barrier *b) {
#if defined(__linux__) && defined(SYS_futex)
    syscall(SYS_futex, &b->phase, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)b;
#endif
}

static inline void ft_barrier_wait(ft_barrier *b, int n) {
    if (n <= 1) return;
    const int phase = __atomic_load_n(&b->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == n) {
        __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
        /* A sleeper counts itself and then looks at the phase; here it is the other way round, so one sees the other. */
        __atomic_store_n(&b->phase, phase + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&b->sleepers, __ATOMIC_SEQ_CST)) ft_barrier_wake(b);
        return;
    }
    for (int spins = 0; spins < FT_SPINS; spins++) {
        if (__atomic_load_n(&b->phase, __ATOMIC_ACQUIRE) != phase) return;
        ft_pause();
    }
    __atomic_add_fetch(&b->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&b->phase, __ATOMIC_SEQ_CST) == phase) ft_barrier_sleep(b, phase);
    __atomic_sub_fetch(&b->sleepers, 1, __ATOMIC_RELAXED);
}
#endif
