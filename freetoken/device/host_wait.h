/* A wait inside a graph as a host function, which the driver calls in a thread of its own. */
#ifndef FREETOKEN_HOST_WAIT_H
#define FREETOKEN_HOST_WAIT_H
#include "futex.h"
#include <stdint.h>
#include <unistd.h>

enum { FT_HOST_WAIT_SPINS = 200000, FT_HOST_WAIT_NAP_US = 50 };

typedef struct {
    uint32_t *flag;
    int take;
    const int *stopped; /* of the device: nobody will set the flag any more */
} ft_host_wait;

static void ft_host_wait_run(void *data) {
    const ft_host_wait *w = data;
    for (int i = 0; __atomic_load_n(w->flag, __ATOMIC_ACQUIRE) != 1;) {
        if (__atomic_load_n(w->stopped, __ATOMIC_ACQUIRE)) return;
        if (i < FT_HOST_WAIT_SPINS) {
            i++;
            ft_pause();
        } else {
            usleep(FT_HOST_WAIT_NAP_US);
        }
    }
    if (w->take) __atomic_store_n(w->flag, 0, __ATOMIC_RELEASE);
}
#endif
