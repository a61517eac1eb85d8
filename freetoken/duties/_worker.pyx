"""Workers: threads that do the duties of steps, in order, on a team of their own where the work is a layer of experts.

worker.h has the order of things. A `Worker` is driven by a thread inside `run`, or by a simulated device through
`poll`, `call` and `answer`.
"""
from cython.parallel cimport parallel, threadid
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.unistd cimport usleep

from freetoken.device.base import running_duty

cdef extern from "team.h" nogil:
    int ft_team_size()

cdef enum:
    IDLE_SPINS = 2000       # before a worker that has nothing to do sleeps
    NAP_US = 50
    FORGET_MS = 100

PHASES = ("idle", "bell", "empty", "run", "answer")
"""What a worker waits for: a step; the device's bell; the device, to take the last answer; its own work; nothing."""
RING = FT_RING
"""What a bell is counted up by."""
ANSWERED = FT_ANSWERED
"""Is added to a bell where the device has answered itself."""
MAX_STEPS = FT_STEPS
"""Steps that can be posted and not be done yet."""


cdef class TeamWork:
    """Work that a team of threads does without Python: subclasses fill `task`."""

    def __cinit__(self, *args, **kwargs):
        memset(&self.task, 0, sizeof(ft_task))


cdef class Line:
    """The duties of one graph that one worker does, in the order in which the graph waits for them.

    duties: `freetoken.duties.Duty` objects; their flags are kept alive.
    """

    def __cinit__(self, duties):
        cdef uint32_t[::1] words
        cdef ptrdiff_t i
        self.kept = tuple(duties)
        self.duties = <ft_duty *> calloc(max(1, len(self.kept)), sizeof(ft_duty))
        if self.duties == NULL:
            raise MemoryError(f"{len(self.kept)} duties")
        for i, duty in enumerate(self.kept):
            if duty.bell is not None:
                words = duty.bell.words
                self.duties[i].bell = &words[0]
            words = duty.answer.words
            self.duties[i].answer = &words[0]
            if isinstance(duty.work, TeamWork):
                self.duties[i].task = &(<TeamWork> duty.work).task
            self.duties[i].owner = <void *> duty

    def __dealloc__(self):
        free(self.duties)

    def __len__(self):
        return len(self.kept)


cdef class Worker:
    """Does the duties of posted steps, one after the other.

    name: for errors and threads. n_threads: of the team that does `TeamWork`. patience: pauses of some 50 ns before it
    naps between looks at a flag that it waits for. on_failure: is called with (duty, step, error) when the work of a
    duty raises, before the answer; it must not raise.
    """

    def __cinit__(self, str name, int n_threads=1, int patience=200_000, on_failure=None):
        if n_threads < 1:
            raise ValueError(f"n_threads is {n_threads}, expected at least 1")
        memset(&self.w, 0, sizeof(ft_worker))
        self.name = name
        self.n_threads = n_threads
        self.patience = patience
        self.on_failure = on_failure
        self.lines = [None] * FT_STEPS
        self.stuck = 0

    def post(self, Line line not None, unsigned int bell, unsigned long long number):
        """Give it a step, before the graph is launched; bell: the value that its bells have then.

        Raises `RuntimeError` when `MAX_STEPS` steps are not done yet, and after `stop`.
        """
        cdef uint64_t at = self.w.posted % FT_STEPS
        if self.stopping():
            raise RuntimeError(f"{self.name} was stopped, step {number} cannot be posted")
        if self.w.posted - self.done == FT_STEPS:
            raise RuntimeError(f"{self.name}: {FT_STEPS} steps are not done yet, step {number} cannot be posted")
        self.lines[at] = line
        self.held = True
        ft_worker_post(&self.w, line.duties, <int> len(line.kept), bell, number)

    def skip(self, unsigned long long number):
        """From now on, answer steps up to this one without their work."""
        ft_worker_skip(&self.w, number)

    def drop(self, unsigned long long number):
        """From now on, answer steps up to this one without waiting for anything: the device does not go on."""
        ft_worker_drop(&self.w, number)

    def stop(self):
        """Take no more steps, and let the thread in `run` return when all that were posted are answered."""
        ft_worker_stop(&self.w)

    def run(self):
        """Drive it until `stop`, or until another thread has taken over: the body of a thread."""
        cdef ft_gate gate
        cdef ft_gate *g = &gate
        memset(g, 0, sizeof(ft_gate))
        if self.n_threads == 1:
            with nogil:
                self.drive(g, 1)
            return
        with nogil, parallel(num_threads=self.n_threads):
            if threadid() == 0:
                self.drive(g, ft_team_size())
                ft_gate_close(g)
            else:
                ft_gate_help(g, threadid(), ft_team_size())

    cdef void drive(self, ft_gate *gate, int n) noexcept nogil:
        cdef ft_turn turn
        cdef uint64_t moves = 0
        cdef int seen, phase, waited = 0
        while True:
            seen = ft_event_look(&self.w.wake)
            phase = ft_worker_poll(&self.w, &turn)
            if phase == FT_RUN:
                self.work(&turn, gate, n)
                if not ft_worker_answer(&self.w, turn.state, 0):
                    with gil:
                        self.stuck -= 1
                    return
            elif phase == FT_IDLE:
                if self.stopping():
                    return
                self.rest(seen)
            elif moves != self.w.moves:
                moves, waited = self.w.moves, 0
            elif waited < self.patience:
                waited += 1
                ft_pause()
            else:
                usleep(NAP_US)

    cdef void rest(self, int seen) noexcept nogil:
        """Wait for the next step: spin, sleep, and after a while let go of the last one."""
        cdef int waited = 0
        while waited < IDLE_SPINS:
            if ft_event_look(&self.w.wake) != seen:
                return
            waited += 1
            ft_pause()
        if self.held:
            # not at once: the GIL may be somebody's for milliseconds, in which a step may come
            if not ft_event_wait_for(&self.w.wake, seen, FORGET_MS):
                with gil:
                    self.forget()
        else:
            ft_event_wait(&self.w.wake, seen, 0)

    cdef void forget(self) noexcept:
        """Let go of what was done, which may hold what owns this worker."""
        if self.w.done == self.w.posted:
            self.held = False
            self.lines = [None] * FT_STEPS

    cdef void work(self, const ft_turn *turn, ft_gate *gate, int n) noexcept nogil:
        if turn.duty.task != NULL:
            ft_gate_run(gate, <const ft_task *> turn.duty.task, n)
        else:
            with gil:
                self.call(<object> <void *> turn.duty.owner, turn.number)

    def poll(self):
        """Go as far as it can: what it waits for now, one of `PHASES`, and its turn.

        The turn is (duty, step, state) when that is its work, else None.

        The work is then done by `call`, and `answer` ends it.
        """
        cdef ft_turn turn
        cdef int phase = ft_worker_poll(&self.w, &turn)
        if phase == FT_RUN:
            return PHASES[phase], (<object> <void *> turn.duty.owner, turn.number, turn.state)
        return PHASES[phase], None

    def call(self, duty, unsigned long long number):
        """The work of a duty, in this thread alone. An error goes to `on_failure`."""
        cdef ft_gate gate
        cdef const ft_task *task
        try:
            if isinstance(duty.work, TeamWork):
                task = &(<TeamWork> duty.work).task
                memset(&gate, 0, sizeof(ft_gate))
                with nogil:
                    ft_gate_run(&gate, task, 1)
            else:
                with running_duty():
                    duty.work()
        except BaseException as error:
            if self.on_failure is not None:
                self.on_failure(duty, number, error)

    def answer(self, unsigned long long state, bint takeover=False):
        """Answer the duty whose work is running: the turn's `state`, by its driver or, taking over, in its place.

        False: another one has done so. A driver must not touch the worker again then.
        """
        cdef bint first = ft_worker_answer(&self.w, state, takeover)
        if first and takeover:
            self.stuck += 1
        elif not first and not takeover:
            self.stuck -= 1
        return first

    cdef bint stopping(self) noexcept nogil:
        return ft_worker_stopping(&self.w)

    @property
    def state(self):
        """Driver, turn and phase in one number, for `answer`."""
        return ft_worker_state(&self.w)

    @property
    def driver(self):
        """The number of the driver in charge: how often one was replaced."""
        return ft_worker_state(&self.w) // FT_DRIVER

    @property
    def phase(self):
        """What it waits for, one of `PHASES`."""
        return PHASES[ft_worker_state(&self.w) & FT_PHASE]

    @property
    def duty(self):
        """The duty that it is at, None when idle. A look from outside: it may have moved on."""
        line = self.lines[self.done % FT_STEPS]
        at = self.w.at
        return None if self.phase == "idle" or line is None or not 0 <= at < len(line) else line.kept[at]

    @property
    def number(self):
        """The number of the step that it is at, or was last. A look from outside."""
        return self.w.ring[self.done % FT_STEPS].number

    @property
    def posted(self):
        """Steps so far."""
        return ft_worker_posted(&self.w)

    @property
    def done(self):
        """Steps whose duties are all answered."""
        return ft_worker_done(&self.w)

    @property
    def stopped(self):
        """Whether `stop` was called."""
        return bool(self.stopping())

    @property
    def moves(self):
        """Changes every time that it gets on."""
        return ft_worker_moves(&self.w)
