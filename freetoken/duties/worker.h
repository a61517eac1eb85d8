/* What a worker does of a step, as a machine without threads: each call of ft_worker_poll goes as far as it can and
 * says what it waits for. A thread calls it again and again (_worker.pyx), a simulated device does at simulated times.
 *
 *     idle -> bell    a step was posted; its duties are done in their order
 *     bell -> empty   the device has rung: what the duty needs is there
 *     empty -> run    the device has taken the last answer
 *     run -> bell     the work is done and the answer written; idle after the last duty
 *
 * Two kinds of words in memory that the device reaches:
 *     bell     counted up by the device, by FT_RING with each step; an odd value says that the device has answered
 *              itself, there is nothing to do
 *     answer   a mailbox: the worker writes 1 where it is 0, the device waits for 1 and writes 0
 * An answer is a constant because a graph's waits are; so it is written only once the last one was taken, and none is
 * lost when two steps are in flight. A duty without a bell may begin once its step is posted and the last answer taken.
 *
 * A step that is to be skipped (`skip`) is answered without work, and its graph runs to its end. The bells are still waited
 * for: only they say which answers the device gives itself. An answer on top of those would stay where it is, for a later
 * step to take too early, and until then keep the worker from the steps after it (found by tests/duties/test_proofs.py).
 * A step whose bells will not be rung, because its graph was never launched or the device does not go on, is dropped
 * (`drop`): all that is left is answered at once, and flags are put back before the next launch.
 *
 * One thread drives a worker. If it is stuck in its work, another takes over with ft_worker_answer, and the late one finds
 * that it has been replaced: the state says which driver is at which turn.
 */
#ifndef FREETOKEN_WORKER_H
#define FREETOKEN_WORKER_H
#include "futex.h"
#include <stdint.h>

enum { FT_RING = 2, FT_ANSWERED = 1, FT_STEPS = 8 };
enum { FT_IDLE, FT_BELL, FT_EMPTY, FT_RUN, FT_ANSWER };
#define FT_PHASE 7ull           /* of a state; above it is the turn, which counts */
#define FT_TURN 8ull
#define FT_DRIVER (1ull << 48)  /* and above that the driver */

typedef struct {
    uint32_t *bell; /* NULL: there is none */
    uint32_t *answer;
    const void *task;  /* for the driver: what the work is */
    const void *owner; /* and whose it is */
} ft_duty;

typedef struct {
    const ft_duty *duties;
    int n;
    uint32_t bell; /* the bells' value in this step */
    uint64_t number;
} ft_step;

/* What a driver has to do now. Another one may take over as soon as it knows, so it asks the worker nothing more. */
typedef struct {
    const ft_duty *duty;
    uint64_t number; /* of the step */
    uint64_t state;  /* for ft_worker_answer */
} ft_turn;

typedef struct {
    ft_event wake;
    uint64_t posted; /* steps, since the beginning; step i is in ring[i % FT_STEPS] */
    uint64_t skip;   /* steps with this number or less are answered only */
    uint64_t drop;   /* and these without waiting for anything */
    int stop;
    ft_step ring[FT_STEPS];
    char apart[64];
    uint64_t state;
    int at;         /* the duty */
    uint64_t done;  /* steps */
    uint64_t moves; /* how often the state changed */
} ft_worker;

/* From the launching thread, before the launch. 0: the ring is full. */
static inline int ft_worker_post(ft_worker *w, const ft_duty *duties, int n, uint32_t bell, uint64_t number) {
    const uint64_t posted = w->posted;
    if (posted - __atomic_load_n(&w->done, __ATOMIC_ACQUIRE) >= FT_STEPS) return 0;
    w->ring[posted % FT_STEPS] = (ft_step){duties, n, bell, number};
    __atomic_store_n(&w->posted, posted + 1, __ATOMIC_SEQ_CST);
    ft_event_signal(&w->wake);
    return 1;
}

static inline void ft_raise(uint64_t *word, uint64_t number) {
    uint64_t now = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    while (now < number && !__atomic_compare_exchange_n(word, &now, number, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}

/* From any thread. Neither goes back. */
static inline void ft_worker_skip(ft_worker *w, uint64_t number) {
    ft_raise(&w->skip, number);
    ft_event_signal(&w->wake);
}

static inline void ft_worker_drop(ft_worker *w, uint64_t number) {
    ft_raise(&w->drop, number);
    ft_worker_skip(w, number);
}

static inline void ft_worker_stop(ft_worker *w) {
    __atomic_store_n(&w->stop, 1, __ATOMIC_SEQ_CST);
    ft_event_signal(&w->wake);
}

/* Looks, from any thread. */
static inline int ft_worker_stopping(const ft_worker *w) { return __atomic_load_n(&w->stop, __ATOMIC_ACQUIRE); }
static inline uint64_t ft_worker_posted(const ft_worker *w) { return __atomic_load_n(&w->posted, __ATOMIC_ACQUIRE); }
static inline uint64_t ft_worker_done(const ft_worker *w) { return __atomic_load_n(&w->done, __ATOMIC_ACQUIRE); }
static inline uint64_t ft_worker_moves(const ft_worker *w) { return __atomic_load_n(&w->moves, __ATOMIC_RELAXED); }
static inline uint64_t ft_worker_state(const ft_worker *w) { return __atomic_load_n(&w->state, __ATOMIC_ACQUIRE); }

static inline void ft_worker_enter(ft_worker *w, int phase) {
    const uint64_t state = __atomic_load_n(&w->state, __ATOMIC_RELAXED) & ~FT_PHASE;
    __atomic_store_n(&w->moves, w->moves + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&w->state, (state | (uint64_t)phase) + (phase == FT_RUN ? FT_TURN : 0), __ATOMIC_RELEASE);
}

/* To the next duty, or to the end of the step. */
static inline void ft_worker_next(ft_worker *w) {
    __atomic_store_n(&w->at, w->at + 1, __ATOMIC_RELAXED);
    if (w->at < w->ring[w->done % FT_STEPS].n) {
        ft_worker_enter(w, FT_BELL);
    } else {
        ft_worker_enter(w, FT_IDLE);
        __atomic_store_n(&w->done, w->done + 1, __ATOMIC_RELEASE);
    }
}

/* By the driver. Returns the phase that it cannot leave now: FT_IDLE, FT_BELL, FT_EMPTY, or FT_RUN: do the work of the turn,
 * then call ft_worker_answer. */
static inline int ft_worker_poll(ft_worker *w, ft_turn *turn) {
    *turn = (ft_turn){NULL, 0, 0};
    for (;;) {
        const int phase = (int)(ft_worker_state(w) & FT_PHASE);
        if (phase == FT_IDLE) {
            if (__atomic_load_n(&w->posted, __ATOMIC_ACQUIRE) == w->done) return FT_IDLE;
            __atomic_store_n(&w->at, -1, __ATOMIC_RELAXED);
            ft_worker_next(w);
            continue;
        }
        if (phase == FT_RUN) return FT_RUN;
        const ft_step *step = &w->ring[w->done % FT_STEPS];
        const ft_duty *duty = &step->duties[w->at];
        const int dropped = __atomic_load_n(&w->drop, __ATOMIC_ACQUIRE) >= step->number;
        if (phase == FT_BELL && !dropped) {
            if (duty->bell) {
                const uint32_t bell = __atomic_load_n(duty->bell, __ATOMIC_ACQUIRE);
                const int32_t ahead = (int32_t)((bell & ~(uint32_t)FT_ANSWERED) - step->bell);
                if (ahead < 0) return FT_BELL;
                if (ahead > 0 || bell & FT_ANSWERED) { /* a device that is ahead did not wait for this answer */
                    ft_worker_next(w);
                    continue;
                }
            }
            ft_worker_enter(w, FT_EMPTY);
            continue;
        }
        if (!dropped) {
            if (__atomic_load_n(duty->answer, __ATOMIC_ACQUIRE)) return FT_EMPTY;
            if (__atomic_load_n(&w->skip, __ATOMIC_ACQUIRE) < step->number) {
                const uint64_t state = ft_worker_state(w);
                *turn = (ft_turn){duty, step->number, (state & ~FT_PHASE) + FT_TURN + FT_RUN};
                ft_worker_enter(w, FT_RUN);
                return FT_RUN;
            }
        }
        __atomic_store_n(duty->answer, 1, __ATOMIC_RELEASE);
        ft_worker_next(w);
    }
}

/* By a driver whose work is done, with the state of its turn; or, with takeover, by another thread that saw this state for
 * too long, and then is the driver. Whoever comes first answers; 0 for the other: a late driver must not touch the worker
 * again, and who would take over finds that the work has returned. */
static inline int ft_worker_answer(ft_worker *w, uint64_t state, int takeover) {
    const uint64_t after = state - FT_RUN + FT_ANSWER + (takeover ? FT_DRIVER : 0);
    if ((state & FT_PHASE) != FT_RUN ||
        !__atomic_compare_exchange_n(&w->state, &state, after, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return 0;
    __atomic_store_n(w->ring[w->done % FT_STEPS].duties[w->at].answer, 1, __ATOMIC_RELEASE);
    ft_worker_next(w);
    return 1;
}
#endif
