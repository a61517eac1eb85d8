"""Waits of a graph as host functions, for devices that cannot wait for memory themselves.

Python's bindings of CUDA cannot be used for this: what they enqueue takes the interpreter's lock, which a launch that
blocks may hold, and frees its arguments when it has run, which a graph does again and again.
"""
cimport cython
from libc.stdint cimport uint32_t, uintptr_t

cdef extern from "host_wait.h" nogil:
    ctypedef struct ft_host_wait:
        uint32_t *flag
        int take
        const int *stopped
    void ft_host_wait_run(void *data)

ctypedef int (*enqueue_function)(void *stream, void (*function)(void *) noexcept nogil, void *data) noexcept nogil


cdef extern from *:
    """
    #define ft_store(word, value) __atomic_store_n(word, value, __ATOMIC_RELEASE)
    """
    void ft_store(int *word, int value) nogil


@cython.final
cdef class Stop:
    """Ends the waits of a device."""
    cdef int stopped

    def set(self):
        """Let those that wait return, and those that begin."""
        ft_store(&self.stopped, 1)


@cython.final
cdef class HostWait:
    """A host function that returns when a word is 1, and writes 0 if it is taken with that, or when it is stopped.

    words: (n,) uint32, of which the first is looked at. It must outlive the graphs in which it is.
    """
    cdef ft_host_wait wait
    cdef uint32_t[::1] words
    cdef Stop stop

    def __cinit__(self, uint32_t[::1] words not None, bint take, Stop stop not None):
        if words.shape[0] < 1:
            raise ValueError("words is empty, expected at least 1")
        self.words, self.stop = words, stop
        self.wait.flag = &words[0]
        self.wait.take = take
        self.wait.stopped = &stop.stopped

    def enqueue(self, uintptr_t function, uintptr_t stream):
        """Put it on a stream; function: the address of `cuLaunchHostFunc`, whose result is returned."""
        cdef enqueue_function launch = <enqueue_function> <void *> function
        cdef int code
        if not function:
            raise ValueError("function is a null pointer")
        with nogil:
            code = launch(<void *> stream, ft_host_wait_run, &self.wait)
        return code
