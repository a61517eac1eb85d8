"""Large reads straight into memory: from the page cache if all is there, else past it.

What is read once would push other files out of it. `window.h` does the same for rows that become tiles.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.safetensors import TensorInfo, read_exactly

BLOCK = 4096
"""Direct reads take whole blocks: a multiple of the sector of every disk, and at most a page."""


def read_direct(info: TensorInfo, offset: int, out: NDArray[np.uint8]) -> None:
    """Fill `out` (n,) uint8 from byte `offset` of a tensor's file on.

    The file's whole blocks go from the disk into `out` without a copy between, if `out` lies in memory as it does in
    the file, modulo a block. The ends, everything else, and whatever a file system refuses or breaks off, are read
    plainly. Raises `CheckpointError` as `read_exactly` does.
    """
    if _read_cached(info.file, offset, out):
        return
    start = min(-offset % BLOCK, out.nbytes)
    stop = max(start, out.nbytes - (offset + out.nbytes) % BLOCK)
    done = start
    if (out.ctypes.data - offset) % BLOCK == 0:
        done += _read_blocks(info.file, offset + start, out[start:stop])
    for part in (slice(0, start), slice(done, out.nbytes)):
        if part.start < part.stop:
            read_exactly(info, offset + part.start, out[part])


def _read_cached(file: Path, offset: int, out: NDArray[np.uint8]) -> bool:
    """Whether all of it was there."""
    flag = getattr(os, "RWF_NOWAIT", 0)
    if not flag or not out.nbytes:
        return False
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # as below
        return False
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # what is asked for here must not be read ahead
        last = out[-BLOCK:]
        if os.preadv(fd, [last.data], offset + out.nbytes - last.nbytes, flag) < last.nbytes:
            return False  # asking for the whole at once would bring it into the cache
        done = 0
        while done < out.nbytes:
            got = os.preadv(fd, [out[done:].data], offset + done, flag)
            if not got:
                return False
            done += got
    except OSError:  # not there, or this file system does not tell
        return False
    finally:
        os.close(fd)
    return True


def _read_blocks(file: Path, offset: int, out: NDArray[np.uint8]) -> int:
    """Bytes read: fewer than asked for where direct reads are not to be had or end early."""
    flag, done = getattr(os, "O_DIRECT", 0), 0
    if not flag or not out.nbytes:
        return 0
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | flag)
    except OSError:  # a plain read comes next, and names the file if it fails as well
        return 0
    try:
        while done < out.nbytes:
            got = os.preadv(fd, [out[done:].data], offset + done)
            done += got
            if not got or got % BLOCK:  # the next would not begin on a block
                break
    except OSError:
        pass
    finally:
        os.close(fd)
    return done
