/* The size of the OpenMP team that is running, or 1 in a build without OpenMP. */
#ifndef FREETOKEN_TEAM_H
#define FREETOKEN_TEAM_H
#ifdef _OPENMP
#include <omp.h>
static inline int ft_team_size(void) { return omp_get_num_threads(); }
#else
static inline int ft_team_size(void) { return 1; }
#endif
#endif
