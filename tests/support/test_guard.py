"""The guard page does what the kernels' tests rely on."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.support.guard import guarded

TOUCH = """
import ctypes, numpy as np
from tests.support.guard import guarded
array = guarded(np.arange(5, dtype=np.int32))
end = array.ctypes.data + array.nbytes
ctypes.string_at(end - 1, 1)
{touch}
"""


@pytest.mark.parametrize("shape", [(1,), (3, 5), (4096,), (1025, 4)])
def test_copy_ends_at_a_page(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    copy = guarded(array)
    np.testing.assert_array_equal(copy, array)
    assert (copy.ctypes.data + copy.nbytes) % 4096 == 0
    assert copy.flags.c_contiguous
    assert copy.flags.writeable


@pytest.mark.parametrize(
    ("touch", "killed"),
    [("", False), ("ctypes.string_at(end, 1)", True), ("ctypes.memset(end, 0, 1)", True)],
    ids=["inside", "read", "write"],
)
def test_touching_the_next_byte_kills(touch: str, killed: bool) -> None:
    code = TOUCH.format(touch=touch)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == (-signal.SIGSEGV if killed else 0), done.stderr.decode()
