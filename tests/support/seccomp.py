"""Makes the kernel refuse calls to a thread, as container runtimes do memory policies by default to all."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Sequence

CALLS = {"x86_64": (237, 238, 239, 256, 279), "aarch64": (235, 236, 237, 238, 239)}
"""mbind, set_mempolicy, get_mempolicy, migrate_pages and move_pages."""
RING_SETUP, RING_ENTER = 425, 426
"""io_uring_setup and io_uring_enter, of both."""

_NO_NEW_PRIVS, _SECCOMP, _FILTER_MODE = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def refuse_policies(number: int = errno.EPERM) -> None:
    """As `refuse_calls`, those in `CALLS`."""
    refuse_calls(CALLS[platform.machine()], number)


def refuse_calls(calls: Sequence[int], number: int) -> None:
    """From here on, in this thread and for good: these calls fail with an errno. Raises OSError if that cannot be."""
    program = [(_LOAD, 0, 0, 0)]  # the number of the call
    program += [(_JUMP_IF_EQUAL, len(calls) - n, 0, call) for n, call in enumerate(calls)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | number)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVS, 1, 0, 0, 0), (_SECCOMP, _FILTER_MODE, head, 0, 0)):
        if libc.prctl(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)):
            raise OSError(ctypes.get_errno(), "prctl")
