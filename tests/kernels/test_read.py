"""Plain reads see every byte once, whatever the way, the size and the number of threads."""

import numpy as np
import pytest

from freetoken.kernels import _read


@pytest.mark.parametrize("way", _read.WAYS)
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("steps", [0, 1, 3, 1024, 1025, 3071])
def test_every_byte_is_read_once(way: str, threads: int, steps: int) -> None:
    memory = np.random.default_rng(steps).integers(0, 256, steps * _read.STEP, np.uint8)
    assert _read.read(memory, way, threads) == int(memory.view(np.uint64).sum(dtype=np.uint64))


def test_what_cannot_be_read() -> None:
    memory = np.zeros(_read.STEP, np.uint8)
    with pytest.raises(ValueError, match="unknown way 'twice', expected one of plain, prefetch, streams"):
        _read.read(memory, "twice", 1)
    with pytest.raises(ValueError, match="expected a multiple of 1024 and at least 1"):
        _read.read(memory[1:], "plain", 1)
    with pytest.raises(ValueError, match="0 threads"):
        _read.read(memory, "plain", 0)
