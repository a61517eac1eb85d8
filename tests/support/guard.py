"""Arrays that end where an unreadable page begins, so that reading one byte past them kills the process.

Prefetch instructions do not fault and may run past the end.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """A C-contiguous copy of a non-empty array whose last byte is the last one that may be touched."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    region = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    if _libc.mprotect(start + size, page, _PROT_NONE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    copy = np.frombuffer(region, array.dtype, array.size, offset=size - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy
