from collections.abc import Iterator

import numpy as np
import pytest
import torch

from freetoken import formats
from freetoken.formats import Format, Matrix
from freetoken.formats.record import Expert, RecordLayout
from freetoken.gpu.gemv import TritonGemv
from freetoken.gpu.units import Units
from tests.support.experts import make_routes
from tests.support.gpu import ACTIVATIONS, FAR, HALF, Experts, check_rows, make_units, widths


def run(experts, how, x, ids):  # type: ignore[no-untyped-def]
    """Hidden values and outputs of each route; what is not written is NaN."""
    layout, units = experts.layout, make_units(ids, experts)
    h = torch.full((ids.size, layout.intermediate), torch.nan, device=x.device)
    y = torch.full((ids.size, layout.hidden), torch.nan, device=x.device)
    gemv = TritonGemv(layout, how)
    gemv.gate_up(x, units, ids.shape[1], h, FAR)
    gemv.down(h, units, y, FAR)
    return h, y


def extreme_experts(fmt: Format, device: torch.device) -> Iterator[tuple[Experts, float]]:
    """One expert with all codes and scales that are numbers, up all zero; and the size of x with which fp32 holds gate.

    The rows of gate have different scales, the blocks of a row the same.
    """
    k, n = max(fmt.width_step, 64), 64
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (n, k * fmt.bits // 8)).astype(np.uint8)
    codes[:, :256] = np.arange(256, dtype=np.uint8)[: codes.shape[1]]
    if fmt.code_alarm:
        wide = codes.view(np.uint16) if fmt.bits == 16 else codes
        wide[(wide & fmt.code_alarm) == fmt.code_alarm] &= (
            0xFFFF - fmt.code_alarm if fmt.bits == 16 else 0xFF - fmt.code_alarm
        )
    if fmt.bits == 16:  # of bf16 a range that fp32 sums
        codes.view(np.uint16)[...] = codes.view(np.uint16) & 0x87FF | 0x3800
    for scales, size in _extreme_scales(fmt, n):
        wide_scales = None if scales is None else np.repeat(scales[:, None], fmt.n_blocks(k), axis=1)
        gate = Matrix(fmt, codes, wide_scales)
        up = Matrix(fmt, np.full_like(codes, 0x88 if fmt.name == "q4_0" else 0), wide_scales)
        layout = RecordLayout(fmt, k, n)
        down = fmt.quantize(np.zeros((k, n), np.float32))
        bank = np.empty((1, layout.nbytes), np.uint8)
        layout.pack(Expert(gate, up, down), bank[0])
        yield Experts.of(layout, bank, device), size


def _extreme_scales(fmt: Format, n: int):  # type: ignore[no-untyped-def]
    if fmt.scale_dtype is None:
        yield None, 1.0
    elif fmt.name in ("mxfp4", "ds_fp4"):  # 2**-127 to 2**127
        for first in range(0, 255, n):
            rows = np.minimum(np.arange(first, first + n), 254).astype(np.uint8)
            yield rows, 2.0**30 if first < 128 else 2.0**-30
    elif fmt.name == "nvfp4":
        for first in (0, 64):
            yield np.minimum(np.arange(first, first + n), 0x7E).astype(np.uint8), 1.0
    elif fmt.scale_dtype is np.uint16:  # fp16: subnormal, normal, the largest, negative
        yield np.resize(np.array([1, 0x3FF, 0x400, 0x3C01, 0x7BFF, 0x8001, 0xFBFF], np.uint16), n), 1.0
    else:
        yield np.resize(np.float32([2.0**-100, 1.2345, 2.0**80]), n).view(np.uint32), 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", formats.names())
def test_agrees_with_the_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    fmt = formats.get(name)
    how = list(ACTIVATIONS.values())[len(name) % 3]
    experts = Experts.random(RecordLayout(fmt, *widths(fmt), bias=dtype != torch.float16), 3, device)
    ids, _ = make_routes(5, 2, 3)
    ids[3] = -1, 3
    ids[4] = 0
    x = torch.randn(5, experts.layout.hidden, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x[3] = torch.nan

    h, y = run(experts, how, x, ids)

    check_rows(h, experts.hidden(x, ids, how), 1e-5)
    check_rows(y, experts.output(h.double().cpu().numpy(), ids), 1e-5)


@pytest.mark.parametrize("name", formats.names())
def test_extreme_codes_are_exact(name: str, device: torch.device) -> None:
    for experts, size in extreme_experts(formats.get(name), device):
        x = torch.randn(1, experts.layout.hidden, generator=torch.Generator().manual_seed(1)) * size
        ids = np.zeros((1, 1), np.int32)

        h, _ = run(experts, HALF, x.to(device), ids)

        wanted = experts.hidden(x, ids, HALF)
        parts = np.abs(experts.hidden(x.abs(), ids, HALF)) + np.abs(wanted)
        assert (np.abs(h.double().cpu().numpy() - wanted) <= 1e-5 * parts.max(axis=0)).all()


def test_more_routes_than_columns(device: torch.device) -> None:
    """An expert in several units."""
    experts = Experts.random(RecordLayout(formats.get("nvfp4"), 32, 16), 2, device)
    ids = np.zeros((19, 1), np.int32)
    x = torch.randn(19, 32, generator=torch.Generator().manual_seed(0)).to(device)

    h, _ = run(experts, HALF, x, ids)

    check_rows(h, experts.hidden(x, ids, HALF), 1e-5)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    gemv = TritonGemv(RecordLayout(formats.get("mxfp4"), 64, 32), HALF)
    units = Units(torch.zeros(1, dtype=torch.int64), torch.full((1, 8), -1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"x is \(1, 32\) with strides \(32, 1\), expected contiguous rows of 64"):
        gemv.gate_up(torch.zeros(1, 32), units, 1, torch.zeros(1, 32))
    with pytest.raises(TypeError, match=r"h is torch\.bfloat16, expected torch\.float32"):
        gemv.down(torch.zeros(1, 32, dtype=torch.bfloat16), units, torch.zeros(1, 64))
