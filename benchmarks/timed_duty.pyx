# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A duty as an expert layer is one, done without Python: it takes a given time and says how long it took."""
from libc.stdint cimport int64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from freetoken.duties._worker cimport TeamWork

ctypedef struct Job:
    const int64_t *question
    int64_t *answer
    const int64_t *lasts_ns
    int64_t *took_ns
    ptrdiff_t n
    ptrdiff_t done


cdef int64_t now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec * 1000000000 + t.tv_nsec


cdef void work(void *context, int thread, int n) noexcept nogil:
    cdef Job *job = <Job *> context
    cdef int64_t begin = now()
    job.answer[0] = job.question[0] * 31 + 7
    while now() - begin < job.lasts_ns[job.done % job.n]:
        pass
    job.took_ns[job.done % job.n] = now() - begin
    job.done += 1


cdef class TimedDuty(TeamWork):
    """question, answer: (1,) int64, in memory of the device. lasts_ns, took_ns: (n,) int64, of each time it is done."""
    cdef Job job
    cdef tuple kept

    def __cinit__(self, const int64_t[::1] question, int64_t[::1] answer, const int64_t[::1] lasts_ns,
                  int64_t[::1] took_ns):
        self.kept = question, answer, lasts_ns, took_ns
        self.job = Job(&question[0], &answer[0], &lasts_ns[0], &took_ns[0], lasts_ns.shape[0], 0)
        self.task.before = NULL
        self.task.work = work
        self.task.context = &self.job
        self.task.threads = 1

    @property
    def done(self):
        """How often."""
        return self.job.done
