"""Plain reads see every byte once, whatever the way, the size and the number of threads; bare loops every tile."""

import numpy as np
import pytest

from freetoken import formats
from freetoken.formats.record import RecordLayout
from freetoken.kernels import _read, _tile_bf16, _tile_nvfp4
from tests.support.experts import make_bank


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


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("hidden", "width", "experts"), [(256, 40, 3), (4096, 528, 2)])
def test_every_tile_is_multiplied_once(hidden: int, width: int, experts: int, threads: int) -> None:
    """The second shape is of more than a piece of 1 MiB a record."""
    fmt = formats.get("bf16")
    layout = RecordLayout(fmt, hidden, width)
    bank, (scalar, *_) = make_bank(layout, experts), _tile_bf16.kernels()
    x = np.random.default_rng(0).standard_normal(hidden).astype(np.float32)
    found = _read.multiply(bank, layout.sections["gate_up"], fmt, hidden, scalar, x.view(np.uint8), threads)
    wanted, size = 0.0, 0.0
    for record in bank:
        expert = layout.unpack(record)
        for matrix in (expert.gate, expert.up):
            products = matrix.dequantize().astype(np.float64) * x
            wanted, size = wanted + products.sum(), size + np.abs(products).sum()
    assert abs(found - wanted) <= 1e-6 * size
    assert abs(wanted) > 1e-4 * size


def test_what_cannot_be_multiplied() -> None:
    fmt = formats.get("nvfp4")
    layout = RecordLayout(fmt, 64, 32)
    bank, kernel, vector = make_bank(layout, 2), _tile_nvfp4.kernels()[0], np.zeros(256, np.uint8)
    whole = layout.sections["gate_up"]
    assert _read.multiply(bank, whole, fmt, 64, kernel, vector, 1) == 0
    with pytest.raises(ValueError, match="cannot read tiles of nvfp4"):
        _read.multiply(bank, whole, fmt, 64, _tile_bf16.kernels()[0], vector, 1)
    for section in ((0, whole[1] - 1), (layout.nbytes, whole[1]), (-64, whole[1]), (0, 0)):
        with pytest.raises(ValueError, match="expected whole tiles of 576"):
            _read.multiply(bank, section, fmt, 64, kernel, vector, 1)
    with pytest.raises(ValueError, match="a vector of 255 bytes, 1 threads: expected 256 and at least 1"):
        _read.multiply(bank, whole, fmt, 64, kernel, vector[1:], 1)
    with pytest.raises(ValueError, match="0 threads"):
        _read.multiply(bank, whole, fmt, 64, kernel, vector, 0)
