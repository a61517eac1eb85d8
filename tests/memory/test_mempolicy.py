"""The kernel's memory policies by raw calls, on whatever nodes this machine has."""

import errno
import mmap
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from freetoken.memory import _mempolicy as policy

HEADERS = Path(__file__).resolve().parents[2] / "freetoken" / "memory"
PAGE = mmap.PAGESIZE
MISSING = 1000
"""A node that no machine here has; its bit is in another word of a mask than those of the first nodes."""


def pages(count: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, count * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


@pytest.fixture(autouse=True)
def _allowed() -> None:
    try:
        policy.get_mempolicy()
    except OSError as error:
        pytest.skip(f"memory policies are refused here: {error}")


def nodes_here() -> tuple[int, ...]:
    array = pages(1)
    array[:] = 1
    found = np.empty(1, np.int32)
    policy.locate_pages(np.array([array.ctypes.data], np.uintp), found)
    return (int(found[0]),)


@pytest.mark.parametrize("mode", [policy.PREFERRED, policy.INTERLEAVE])
def test_a_mapping_has_the_policy_it_was_given(mode: int) -> None:
    array, node = pages(4), nodes_here()
    policy.mbind(array.ctypes.data, 2 * PAGE, mode, node)

    assert policy.get_mempolicy(array.ctypes.data) == (mode, node)
    assert policy.get_mempolicy(array.ctypes.data + PAGE) == (mode, node)
    assert policy.get_mempolicy(array.ctypes.data + 2 * PAGE) == (policy.DEFAULT, ())
    policy.mbind(array.ctypes.data, 2 * PAGE, policy.DEFAULT)
    assert policy.get_mempolicy(array.ctypes.data) == (policy.DEFAULT, ())


def test_a_thread_has_the_policy_it_was_given() -> None:
    before = policy.get_mempolicy()
    try:
        policy.set_mempolicy(policy.INTERLEAVE, nodes_here())
        assert policy.get_mempolicy() == (policy.INTERLEAVE, nodes_here())
    finally:
        policy.set_mempolicy(*before)
    assert policy.get_mempolicy() == before


def test_pages_are_found_where_they_are_touched() -> None:
    array = pages(3)
    array[0] = array[2 * PAGE] = 1
    found = np.empty(3, np.int32)
    policy.locate_pages(np.uintp(array.ctypes.data) + np.arange(3, dtype=np.uintp) * np.uintp(PAGE), found)

    assert found[0] == found[2] == nodes_here()[0]
    assert found[1] < 0  # never touched
    policy.locate_pages(np.empty(0, np.uintp), np.empty(0, np.int32))


def test_high_nodes_reach_the_kernel() -> None:
    """A node that is missing is refused alone and ignored beside one that is there: its bit is where it belongs."""
    array, (here,) = pages(1), nodes_here()
    with pytest.raises(OSError, match="mbind") as caught:
        policy.mbind(array.ctypes.data, PAGE, policy.PREFERRED, [MISSING])
    assert caught.value.errno == errno.EINVAL
    policy.mbind(array.ctypes.data, PAGE, policy.INTERLEAVE, [here, MISSING])
    assert policy.get_mempolicy(array.ctypes.data) == (policy.INTERLEAVE, (here,))


@pytest.mark.parametrize("node", [-1, 4096])
def test_no_such_node_at_all(node: int) -> None:
    for call in (lambda: policy.mbind(pages(1).ctypes.data, PAGE, policy.BIND, [node]),
                 lambda: policy.set_mempolicy(policy.BIND, [0, node])):  # fmt: skip
        with pytest.raises(ValueError, match=f"node {node} is not from 0 to 4095"):
            call()


def test_errors_name_the_call() -> None:
    with pytest.raises(OSError, match="mbind: Invalid argument"):
        policy.mbind(pages(1).ctypes.data + 8, PAGE, policy.INTERLEAVE, nodes_here())
    with pytest.raises(OSError, match="set_mempolicy: Invalid argument"):
        policy.set_mempolicy(policy.INTERLEAVE)
    with pytest.raises(OSError, match="get_mempolicy: Bad address"):
        policy.get_mempolicy(PAGE)
    with pytest.raises(ValueError, match="2 pages, room for 1"):
        policy.locate_pages(np.empty(2, np.uintp), np.empty(1, np.int32))


PROGRAM = """
#include "mempolicy.h"
int main(void) {
    unsigned long mask[64] = {1};
    int mode, node;
    size_t page = 0;
    return FT_HAS_MEMPOLICY || ft_mbind(0, 0, 0, mask, 0) != ENOSYS || ft_set_mempolicy(0, mask) != ENOSYS ||
           ft_get_mempolicy(&mode, mask, 0) != ENOSYS || ft_locate_pages(1, &page, &node) != ENOSYS;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.skipif(
    not (HEADERS / "mempolicy.h").exists(), reason="needs the source tree; this is an installed package"
)
def test_elsewhere_than_on_linux_the_answer_is_no(tmp_path: Path) -> None:
    source = tmp_path / "main.c"
    source.write_text(PROGRAM)
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-U__linux__"]
    subprocess.run(["gcc", *flags, f"-I{HEADERS}", source, "-o", tmp_path / "main"], check=True)
    subprocess.run([tmp_path / "main"], check=True)
