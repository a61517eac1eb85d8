"""Workers and their duties, as compiled code sees them."""
from libc.stdint cimport uint32_t, uint64_t


cdef extern from "worker.h" nogil:
    enum:
        FT_RING
        FT_ANSWERED
        FT_STEPS
        FT_IDLE
        FT_BELL
        FT_EMPTY
        FT_RUN
    uint64_t FT_PHASE
    uint64_t FT_DRIVER
    ctypedef struct ft_event:
        pass
    int ft_event_look(const ft_event *e)
    void ft_event_wait(ft_event *e, int seen, int spins)
    int ft_event_wait_for(ft_event *e, int seen, int ms)
    void ft_pause()
    ctypedef struct ft_duty:
        uint32_t *bell
        uint32_t *answer
        const void *task
        const void *owner
    ctypedef struct ft_turn:
        const ft_duty *duty
        uint64_t number
        uint64_t state
    ctypedef struct ft_step:
        uint64_t number
    ctypedef struct ft_worker:
        ft_event wake
        uint64_t posted
        ft_step *ring
        int at
        uint64_t done
        uint64_t moves
    int ft_worker_post(ft_worker *w, const ft_duty *duties, int n, uint32_t bell, uint64_t number)
    void ft_worker_skip(ft_worker *w, uint64_t number)
    void ft_worker_drop(ft_worker *w, uint64_t number)
    void ft_worker_stop(ft_worker *w)
    int ft_worker_stopping(const ft_worker *w)
    uint64_t ft_worker_posted(const ft_worker *w)
    uint64_t ft_worker_done(const ft_worker *w)
    uint64_t ft_worker_moves(const ft_worker *w)
    uint64_t ft_worker_state(const ft_worker *w)
    int ft_worker_poll(ft_worker *w, ft_turn *turn)
    int ft_worker_answer(ft_worker *w, uint64_t state, int takeover)


cdef extern from "gate.h" nogil:
    ctypedef struct ft_task:
        void (*before)(void *context) noexcept nogil
        void (*work)(void *context, int thread, int n) noexcept nogil
        void (*after)(void *context) noexcept nogil
        void *context
        int threads
    ctypedef struct ft_gate:
        pass
    void ft_gate_run(ft_gate *g, const ft_task *task, int n)
    void ft_gate_close(ft_gate *g)
    void ft_gate_help(ft_gate *g, int thread, int n)


cdef class TeamWork:
    """Work that a team of threads does without Python: subclasses fill `task`."""
    cdef ft_task task


cdef class Line:
    cdef ft_duty *duties
    cdef readonly tuple kept


cdef class Worker:
    cdef ft_worker w
    cdef readonly str name
    cdef readonly int n_threads
    cdef int patience
    cdef list lines         # of posted steps, as in the ring
    cdef bint held          # some of them may be there
    cdef public object on_failure
    cdef readonly int stuck     # drivers that were replaced and are still at their work
    cdef void drive(self, ft_gate *gate, int n) noexcept nogil
    cdef void work(self, const ft_turn *turn, ft_gate *gate, int n) noexcept nogil
    cdef void rest(self, int seen) noexcept nogil
    cdef void forget(self) noexcept
    cdef bint stopping(self) noexcept nogil
