/* Waiting for a word of memory to change: politely spinning, and asleep. */
#ifndef FREETOKEN_FUTEX_H
#define FREETOKEN_FUTEX_H
#include <limits.h>
#include <sched.h>
#include <stddef.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

static inline void ft_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep if the word still is `seen`, until it is woken or so many milliseconds are over (0: never); may return sooner. */
static inline void ft_sleep(int *word, int seen, int ms) {
#if defined(__linux__) && defined(SYS_futex)
    const struct timespec limit = {ms / 1000, ms % 1000 * 1000000L};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, ms ? &limit : NULL, NULL, 0);
#else
    (void)word, (void)seen, (void)ms;
    sched_yield();
#endif
}

static inline void ft_wake(int *word) {
#if defined(__linux__) && defined(SYS_futex)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

/* Something that happens again and again. A waiter looks at the count, then at whether there is work, and waits for
 * another count: what happens in between is not missed. */
typedef struct {
    int count;
    int sleepers;
    char apart[56];
} ft_event;

static inline int ft_event_look(const ft_event *e) { return __atomic_load_n(&e->count, __ATOMIC_SEQ_CST); }

static inline void ft_event_signal(ft_event *e) {
    /* A sleeper counts itself and then looks at the count; here it is the other way round, so one sees the other. */
    __atomic_add_fetch(&e->count, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&e->sleepers, __ATOMIC_SEQ_CST)) ft_wake(&e->count);
}

/* Return once the count is not `seen` any more: after up to `spins` pauses, then asleep. */
static inline void ft_event_wait(ft_event *e, int seen, int spins) {
    for (int i = 0; i < spins; i++) {
        if (__atomic_load_n(&e->count, __ATOMIC_ACQUIRE) != seen) return;
        ft_pause();
    }
    __atomic_add_fetch(&e->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&e->count, __ATOMIC_SEQ_CST) == seen) ft_sleep(&e->count, seen, 0);
    __atomic_sub_fetch(&e->sleepers, 1, __ATOMIC_RELAXED);
}

/* The same asleep, for some milliseconds at most. Whether it happened. */
static inline int ft_event_wait_for(ft_event *e, int seen, int ms) {
    __atomic_add_fetch(&e->sleepers, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&e->count, __ATOMIC_SEQ_CST) == seen) ft_sleep(&e->count, seen, ms);
    __atomic_sub_fetch(&e->sleepers, 1, __ATOMIC_RELAXED);
    return __atomic_load_n(&e->count, __ATOMIC_SEQ_CST) != seen;
}
#endif
