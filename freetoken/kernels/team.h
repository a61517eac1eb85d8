/* The OpenMP team that is running: its size (1 in a build without OpenMP), and keeping its threads on a node's CPUs. */
#ifndef FREETOKEN_TEAM_H
#define FREETOKEN_TEAM_H
#include <stddef.h>
#include <stdint.h>

#ifdef _OPENMP
#include <omp.h>
static inline int ft_team_size(void) { return omp_get_num_threads(); }
#else
static inline int ft_team_size(void) { return 1; }
#endif

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* The key of the mask that this thread was last given. A runtime may replace its threads between two regions, so each
 * asks for itself; a mask that the system refuses is not asked for again. */
static __thread uint64_t ft_bound_to;

static inline void ft_bind_thread(const uint64_t *mask, size_t bytes, uint64_t key) {
    if (ft_bound_to == key) return;
    ft_bound_to = key;
    syscall(SYS_sched_setaffinity, 0L, bytes, mask);
}
#else
static inline void ft_bind_thread(const uint64_t *mask, size_t bytes, uint64_t key) {}
#endif
#endif
