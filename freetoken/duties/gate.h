/* A standing team: thread 0 opens the gate, all do the same work with their numbers, and meet at its end.
 *
 * Threads that wait at the gate spin for some milliseconds, which is longer than some layers on a GPU take that leave nothing
 * to the host, and then sleep: a team that is not used costs nothing. Of a small model that seldom left something to 15 cores,
 * work took 0.20 ms when they slept after a fifth of that, and 0.09 in a later run with this.
 */
#ifndef FREETOKEN_GATE_H
#define FREETOKEN_GATE_H
#include "barrier.h"

enum { FT_GATE_SPINS = 100000 };

/* before, after: by thread 0 alone, may be NULL; work: by `threads` threads or fewer. */
typedef struct {
    void (*before)(void *context);
    void (*work)(void *context, int thread, int n);
    void (*after)(void *context);
    void *context;
    int threads;
} ft_task;

static inline void ft_task_share(const ft_task *task, int thread, int n) {
    const int team = n < task->threads ? n : task->threads;
    if (thread < team) task->work(task->context, thread, team);
}

typedef struct {
    ft_event open;
    ft_barrier end;
    const ft_task *task; /* NULL: go home */
} ft_gate;

/* By thread 0 of n. */
static inline void ft_gate_run(ft_gate *g, const ft_task *task, int n) {
    if (task->before) task->before(task->context);
    if (n > 1) {
        g->task = task;
        ft_event_signal(&g->open);
    }
    ft_task_share(task, 0, n);
    ft_barrier_wait(&g->end, n);
    if (task->after) task->after(task->context);
}

static inline void ft_gate_close(ft_gate *g) {
    g->task = NULL;
    ft_event_signal(&g->open);
}

/* By the others, until the gate is closed. */
static inline void ft_gate_help(ft_gate *g, int thread, int n) {
    for (int seen = 0;; seen++) {
        ft_event_wait(&g->open, seen, FT_GATE_SPINS);
        const ft_task *task = g->task;
        if (!task) return;
        ft_task_share(task, thread, n);
        ft_barrier_wait(&g->end, n);
    }
}
#endif
