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

#define FT_MAX_CPUS 8192

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* The key of the mask that this thread was last given, and the mask that it began with. A runtime may replace its
 * threads between two regions, so each asks for itself. */
static __thread uint64_t ft_bound_to;
static __thread uint64_t ft_born_with[FT_MAX_CPUS / 64];

/* Keep the calling thread on those CPUs of a mask that it began with. Where these are none (a user pinned it elsewhere,
 * by OMP_PROC_BIND or by the mask of the thread that started it), it is left as it began. */
static inline void ft_bind_thread(const uint64_t *mask, ptrdiff_t words, uint64_t key) {
    uint64_t wanted[FT_MAX_CPUS / 64] = {0}, any = 0;
    if (ft_bound_to == key) return;
    if (!ft_bound_to && syscall(SYS_sched_getaffinity, 0L, sizeof ft_born_with, ft_born_with) < 0) return;
    ft_bound_to = key;
    for (ptrdiff_t i = 0; i < words; i++) any |= wanted[i] = mask[i] & ft_born_with[i];
    syscall(SYS_sched_setaffinity, 0L, sizeof wanted, any ? wanted : ft_born_with);
}
#else
static inline void ft_bind_thread(const uint64_t *mask, ptrdiff_t words, uint64_t key) {}
#endif
#endif
