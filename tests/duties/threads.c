/* Real threads around worker.h, gate.h and what they stand on: a launching thread, a device, a worker with a team, somebody
 * who cancels, and a watchdog that takes over. Built with ThreadSanitizer by test_races.py.
 *
 * Prints how often what happened; ends with 1 on wrong data and never ends on a lost wake-up. */
#include "gate.h"
#include "worker.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 4, TEAM = 3, VALUES = 48 };

typedef struct {
    int layer;
    ft_task task;
} layer_task;

static ft_worker worker;
static ft_duty duties[LAYERS];
static layer_task tasks[LAYERS];
static struct { uint32_t bell; char apart[60]; uint32_t answer; char also[60]; } flags[LAYERS];
static unsigned input[LAYERS], output[LAYERS][VALUES];
static uint64_t launched, finished;
static int stuck, ended, wrong, dawdle, slow, written, asleep;
static unsigned compared, taken_over, cancelled;
static int steps;

static uint64_t get(uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static void set(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static unsigned roll(unsigned *seed) { return *seed = *seed * 1664525u + 1013904223u, *seed >> 16; }

static void before(void *context) {
    slow = __atomic_exchange_n(&dawdle, 0, __ATOMIC_ACQ_REL);
    written = 0;
}

/* Slow work has touched everything when somebody may take over: what is late for real may not have, but its step is
 * skipped and nothing is launched until it is back. */
static void work(void *context, int thread, int n) {
    const int layer = ((layer_task *)context)->layer;
    const int sleeps = slow;
    for (int i = thread; i < VALUES; i += n) output[layer][i] = input[layer] * 3 + i;
    if (!sleeps) return;
    __atomic_add_fetch(&written, 1, __ATOMIC_ACQ_REL);
    if (thread) return;
    while (__atomic_load_n(&written, __ATOMIC_ACQUIRE) < n) usleep(1);
    __atomic_store_n(&asleep, 1, __ATOMIC_RELEASE);
    usleep(3000);
    __atomic_store_n(&asleep, 0, __ATOMIC_RELEASE);
}

static void *help(void *at) {
    void **gate_and_number = at;
    ft_gate_help(gate_and_number[0], (int)(intptr_t)gate_and_number[1], TEAM);
    return NULL;
}

/* As Worker.drive. */
static void *drive(void *unused) {
    ft_gate gate = {0};
    pthread_t team[TEAM];
    void *arguments[TEAM][2];
    int replaced = 0;
    for (int i = 1; i < TEAM; i++) {
        arguments[i][0] = &gate, arguments[i][1] = (void *)(intptr_t)i;
        pthread_create(&team[i], NULL, help, arguments[i]);
    }
    for (;;) {
        const int seen = ft_event_look(&worker.wake);
        ft_turn turn;
        const int phase = ft_worker_poll(&worker, &turn);
        if (phase == FT_RUN) {
            ft_gate_run(&gate, turn.duty->task, TEAM);
            if (!ft_worker_answer(&worker, turn.state, 0)) {
                replaced = 1;
                break;
            }
        } else if (ft_worker_stopping(&worker)) {
            break;
        } else if (phase == FT_IDLE) {
            ft_event_wait(&worker.wake, seen, 50);
        } else {
            usleep(1);
        }
    }
    ft_gate_close(&gate);
    for (int i = 1; i < TEAM; i++) pthread_join(team[i], NULL);
    if (replaced) __atomic_sub_fetch(&stuck, 1, __ATOMIC_ACQ_REL);
    return unused;
}

/* A stream on which the same graph runs again and again. */
static void *device(void *unused) {
    unsigned seed = 1;
    for (uint64_t step = 1; step <= (uint64_t)steps; step++) {
        while (get(&launched) < step) usleep(1);
        for (int l = 0; l < LAYERS; l++) {
            const uint32_t bell = __atomic_load_n(&flags[l].bell, __ATOMIC_RELAXED) & ~1u;
            if (roll(&seed) % 8 == 0) { /* nothing for the host */
                __atomic_store_n(&flags[l].bell, bell + FT_RING + FT_ANSWERED, __ATOMIC_RELEASE);
                continue;
            }
            input[l] = roll(&seed);
            __atomic_store_n(&flags[l].bell, bell + FT_RING, __ATOMIC_RELEASE);
            while (!__atomic_load_n(&flags[l].answer, __ATOMIC_ACQUIRE)) usleep(1);
            if (__atomic_load_n(&worker.skip, __ATOMIC_ACQUIRE) < step) {
                compared++;
                for (int i = 0; i < VALUES; i++) wrong |= output[l][i] != input[l] * 3 + i;
            }
            __atomic_store_n(&flags[l].answer, 0, __ATOMIC_RELEASE);
        }
        set(&finished, step);
    }
    return unused;
}

static void *upset(void *unused) {
    unsigned seed = 7;
    while (!__atomic_load_n(&ended, __ATOMIC_ACQUIRE)) {
        usleep(roll(&seed) % 10000);
        if (roll(&seed) % 4 == 0) {
            ft_worker_skip(&worker, get(&launched));
            cancelled++;
        } else if (!__atomic_load_n(&stuck, __ATOMIC_ACQUIRE)) {
            __atomic_store_n(&dawdle, 1, __ATOMIC_RELEASE);
            for (int i = 0; i < 100 && !__atomic_load_n(&asleep, __ATOMIC_ACQUIRE); i++) usleep(20);
            const uint64_t state = ft_worker_state(&worker);
            ft_worker_skip(&worker, get(&launched) + 1); /* one may be posted just now */
            if (__atomic_load_n(&asleep, __ATOMIC_ACQUIRE) && (state & FT_PHASE) == FT_RUN) {
                __atomic_add_fetch(&stuck, 1, __ATOMIC_ACQ_REL);
                if (ft_worker_answer(&worker, state, 1)) {
                    pthread_t driver;
                    pthread_create(&driver, NULL, drive, NULL);
                    pthread_detach(driver);
                    taken_over++;
                } else {
                    __atomic_sub_fetch(&stuck, 1, __ATOMIC_ACQ_REL);
                }
            }
        }
    }
    return unused;
}

int main(int argc, char **argv) {
    pthread_t on_device, driver, upsetter;
    steps = argc > 1 ? atoi(argv[1]) : 1000;
    for (int l = 0; l < LAYERS; l++) {
        tasks[l] = (layer_task){l, {before, work, NULL, &tasks[l], TEAM}};
        duties[l] = (ft_duty){&flags[l].bell, &flags[l].answer, &tasks[l].task};
    }
    pthread_create(&driver, NULL, drive, NULL);
    pthread_detach(driver);
    pthread_create(&on_device, NULL, device, NULL);
    pthread_create(&upsetter, NULL, upset, NULL);
    unsigned seed = 3;
    for (uint64_t step = 1; step <= (uint64_t)steps; step++) {
        /* two in flight; after a takeover none until the late work is back */
        while (step - get(&finished) > 2 || ft_worker_posted(&worker) - ft_worker_done(&worker) >= 2 ||
               __atomic_load_n(&stuck, __ATOMIC_ACQUIRE))
            usleep(1);
        if (roll(&seed) % 16 == 0) usleep(200); /* the worker goes to sleep */
        if (!ft_worker_post(&worker, duties, LAYERS, (uint32_t)(FT_RING * step), step)) return 2;
        set(&launched, step);
    }
    while (get(&finished) < (uint64_t)steps) usleep(10);
    __atomic_store_n(&ended, 1, __ATOMIC_RELEASE);
    pthread_join(upsetter, NULL);
    pthread_join(on_device, NULL);
    while (__atomic_load_n(&stuck, __ATOMIC_ACQUIRE) || ft_worker_done(&worker) < (uint64_t)steps) usleep(100);
    ft_worker_stop(&worker);
    usleep(20000);
    for (int l = 0; l < LAYERS; l++) wrong |= (int)__atomic_load_n(&flags[l].answer, __ATOMIC_ACQUIRE);
    printf("{\"compared\": %u, \"taken_over\": %u, \"cancelled\": %u, \"wrong\": %d}\n", compared, taken_over, cancelled, wrong);
    return wrong;
}
