/* Memory policy by raw system calls, without libnuma. Each returns 0 or an errno: ENOSYS where the system, or this
 * architecture's table of calls, has none. Policies and flags are those of <linux/mempolicy.h>.
 */
#ifndef FREETOKEN_MEMPOLICY_H
#define FREETOKEN_MEMPOLICY_H
#include <errno.h>
#include <stddef.h>

#define FT_MPOL_F_ADDR 2
/* Node masks have this many bits, four times what any kernel can be built for: a kernel refuses one that is too short
 * to answer in, and takes a longer one. */
#define FT_MASK_BITS 4096
#define FT_WORD_BITS (8 * (int)sizeof(unsigned long))
typedef struct {
    unsigned long words[FT_MASK_BITS / 32]; /* of 32 or 64 bits: enough of either */
} ft_node_mask;

#ifdef __linux__
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifndef MAP_HUGETLB
#define MAP_HUGETLB 0
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; an older kernel refuses it */
#endif

#if defined(SYS_mbind) && defined(SYS_get_mempolicy) && defined(SYS_set_mempolicy) && defined(SYS_move_pages)
#define FT_HAS_MEMPOLICY 1
/* The kernel takes one bit less than it is told. */
#define FT_MASK_ARGUMENT(mask) (mask), (unsigned long)((mask) ? FT_MASK_BITS + 1 : 0)

static inline int ft_mbind(size_t address, size_t nbytes, int mode, const unsigned long *mask, unsigned flags) {
    return syscall(SYS_mbind, address, nbytes, (long)mode, FT_MASK_ARGUMENT(mask), (long)flags) ? errno : 0;
}
static inline int ft_set_mempolicy(int mode, const unsigned long *mask) {
    return syscall(SYS_set_mempolicy, (long)mode, FT_MASK_ARGUMENT(mask)) ? errno : 0;
}
/* address 0: of the calling thread */
static inline int ft_get_mempolicy(int *mode, unsigned long *mask, size_t address) {
    return syscall(SYS_get_mempolicy, mode, FT_MASK_ARGUMENT(mask), address, address ? (long)FT_MPOL_F_ADDR : 0L) ? errno
                                                                                                                 : 0;
}
/* A query: where each page of this process lies, a negative errno for one that lies nowhere. */
static inline int ft_locate_pages(size_t count, const size_t *pages, int *nodes) {
    return syscall(SYS_move_pages, 0L, (unsigned long)count, pages, (void *)0, nodes, 0L) ? errno : 0;
}
#else
#define FT_HAS_MEMPOLICY 0
static inline int ft_mbind(size_t address, size_t nbytes, int mode, const unsigned long *mask, unsigned flags) {
    return ENOSYS;
}
static inline int ft_set_mempolicy(int mode, const unsigned long *mask) { return ENOSYS; }
static inline int ft_get_mempolicy(int *mode, unsigned long *mask, size_t address) { return ENOSYS; }
static inline int ft_locate_pages(size_t count, const size_t *pages, int *nodes) { return ENOSYS; }
#endif
#endif
