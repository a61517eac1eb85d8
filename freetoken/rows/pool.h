/* Reads in flight by threads that each make one `pread` at a time: what `ring.h` does, where that is refused.
 *
 * Threads are started when a read finds none idle, and sleep while there is nothing to read. The caller's thread puts
 * reads in and takes answers; a read that is the only one is made by the caller itself, who would wait anyway.
 */
#ifndef FREETOKEN_POOL_H
#define FREETOKEN_POOL_H
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { FT_STACK = 128 << 10 };

typedef struct {
    int fd;
    uint8_t *to;
    size_t nbytes;
    int64_t offset, result;
} ft_job;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    pthread_t *threads;
    ft_job *jobs;      /* by tag */
    int *todo, *ready; /* tags: `most` of each at the most, in circles */
    int most, most_threads, n_threads, idle, reading, stop, made;
    unsigned todo_in, todo_out, ready_in, ready_out;
    int flying; /* put in, and not taken as answers yet */
    pid_t owner; /* a forked child has none of the threads */
} ft_pool;

static inline int64_t ft_pread(int fd, uint8_t *to, size_t nbytes, int64_t offset) {
    const ssize_t got = pread(fd, to, nbytes, offset);
    return got < 0 ? -errno : got;
}

/* With the lock held, which is let go of while reading. */
static inline void ft_pool_read(ft_pool *p) {
    const int tag = p->todo[p->todo_out++ % (unsigned)p->most];
    ft_job *const job = &p->jobs[tag];
    p->reading++;
    pthread_mutex_unlock(&p->lock);
    job->result = ft_pread(job->fd, job->to, job->nbytes, job->offset);
    pthread_mutex_lock(&p->lock);
    p->reading--;
    p->ready[p->ready_in++ % (unsigned)p->most] = tag;
}

static void *ft_pool_work(void *pool) {
    ft_pool *const p = (ft_pool *)pool;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!p->stop && p->todo_in == p->todo_out) {
            p->idle++;
            pthread_cond_wait(&p->work, &p->lock);
            p->idle--;
        }
        if (p->stop) break;
        ft_pool_read(p);
        pthread_cond_signal(&p->done);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* For tags [0, most); returns 0 or an errno. */
static inline int ft_pool_open(ft_pool *p, int most, int most_threads) {
    memset(p, 0, sizeof *p);
    p->most = most;
    p->most_threads = most_threads;
    p->threads = (pthread_t *)calloc((size_t)most_threads, sizeof(pthread_t));
    p->jobs = (ft_job *)calloc((size_t)most, sizeof(ft_job));
    p->todo = (int *)calloc((size_t)most, sizeof(int));
    p->ready = (int *)calloc((size_t)most, sizeof(int));
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->done, NULL);
    p->made = 1;
    p->owner = getpid();
    return p->threads && p->jobs && p->todo && p->ready ? 0 : ENOMEM;
}

static inline void ft_pool_close(ft_pool *p) {
    if (p->made && p->owner == getpid()) {
        pthread_mutex_lock(&p->lock);
        p->stop = 1;
        pthread_cond_broadcast(&p->work);
        pthread_mutex_unlock(&p->lock);
        for (int i = 0; i < p->n_threads; i++) pthread_join(p->threads[i], NULL);
        pthread_cond_destroy(&p->done);
        pthread_cond_destroy(&p->work);
        pthread_mutex_destroy(&p->lock);
    }
    free(p->ready);
    free(p->todo);
    free(p->jobs);
    free(p->threads);
    memset(p, 0, sizeof *p);
}

/* One more thread, which takes no signals: they are the interpreter's. Returns whether there is one more. */
static inline int ft_pool_start(ft_pool *p) {
    pthread_attr_t attributes;
    sigset_t all, before;
    if (p->n_threads == p->most_threads || pthread_attr_init(&attributes)) return 0;
    pthread_attr_setstacksize(&attributes, FT_STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&p->threads[p->n_threads], &attributes, ft_pool_work, p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    p->n_threads += !error;
    return !error;
}

static inline void ft_pool_put(ft_pool *p, int fd, uint8_t *to, size_t nbytes, int64_t offset, int tag) {
    const ft_job job = {fd, to, nbytes, offset, 0};
    pthread_mutex_lock(&p->lock);
    p->jobs[tag] = job;
    p->todo[p->todo_in++ % (unsigned)p->most] = tag;
    p->flying++;
    pthread_mutex_unlock(&p->lock);
}

/* The next answer, waited for; returns its tag. There must be a read in flight. */
static inline int ft_pool_take(ft_pool *p, int64_t *result) {
    pthread_mutex_lock(&p->lock);
    const int waiting = (int)(p->todo_in - p->todo_out);
    if (p->flying == 1 && waiting) {
        ft_pool_read(p);
    } else {
        while (p->n_threads - p->reading < waiting && ft_pool_start(p)) continue;
        for (int i = 0; i < waiting && i < p->idle; i++) pthread_cond_signal(&p->work);
        while (p->ready_in == p->ready_out) {
            if (!p->n_threads)
                ft_pool_read(p);
            else
                pthread_cond_wait(&p->done, &p->lock);
        }
    }
    const int tag = p->ready[p->ready_out++ % (unsigned)p->most];
    *result = p->jobs[tag].result;
    p->flying--;
    pthread_mutex_unlock(&p->lock);
    return tag;
}
#endif
