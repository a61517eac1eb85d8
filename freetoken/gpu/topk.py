"""The largest values of rows, such as a router's choice of experts: one kernel of a warp a row, where torch has two.

Numbers are compared as integers, which finds NaN, infinities and zeros of both signs without rounding anything, and
what is found are places: values are copied. The index is a part of what is compared where both fit into 32 bits, for
which a warp has an instruction that finds the largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_VALUES = 1024
"""Of a row."""
MOST = 16
"""Of them, at most so many are found."""
_NUMBERS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}
"""Of each dtype, integers of its size and the bits of infinity."""


def is_known(x: torch.Tensor, k: int) -> bool:
    """Whether `topk` takes it; of a fake tensor, too. Where is said by `runs_on`."""
    return x.dim() > 0 and x.dtype in _NUMBERS and 1 <= k <= min(x.shape[-1], MOST) and x.shape[-1] <= MOST_VALUES


def runs_on(device: torch.device) -> bool:
    """Whether kernels were compiled for it, or for Triton's interpreter."""
    return device.type == "cuda" or not isinstance(_find, triton.JITFunction)


@torch.library.custom_op("freetoken::topk", mutates_args=())
def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of x (..., N), largest first, and their int64 indices, both (..., k) and contiguous.

    As torch.topk finds them: NaN is larger than all, values have the bits that they have in x. Among equals, such as 0
    and -0 or two NaN, the lower index comes first. x: any strides. May be captured in a graph.
    """
    if not is_known(x, k):
        raise ValueError(
            f"the {k} largest of x {tuple(x.shape)} {x.dtype}, expected 1 to {MOST} of at most {MOST_VALUES} values, "
            f"{', '.join(map(str, _NUMBERS))}: use torch.topk"
        )
    shape = *x.shape[:-1], k
    values, indices = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    rows = x.reshape(-1, x.shape[-1])
    n = rows.shape[1]
    integers, infinity = _NUMBERS[x.dtype]
    if len(rows):
        _find[(len(rows),)](
            rows.view(integers), values.view(integers), indices, rows.stride(0), rows.stride(1), n,
            K=k, INFINITY=infinity, PACKED=integers == torch.int16, MOST_VALUES=MOST_VALUES,
            PADDED=triton.next_power_of_2(n), PADDED_K=triton.next_power_of_2(k), num_warps=1,
        )  # fmt: skip
    return values, indices


@topk.register_fake
def _(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = *x.shape[:-1], k
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@triton.jit
def _find(
    x, values, indices, row_step, step, n,
    K: tl.constexpr, INFINITY: tl.constexpr, PACKED: tl.constexpr, MOST_VALUES: tl.constexpr,
    PADDED: tl.constexpr, PADDED_K: tl.constexpr,
):  # fmt: skip
    """Row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    x += row * row_step
    i = tl.arange(0, PADDED)
    bits = tl.load(x + i * step, mask=i < n, other=0).to(tl.int32)
    none: tl.constexpr = -0x80000000
    magnitude = bits & (0x7FFF if PACKED else 0x7FFFFFFF)
    order = tl.where(bits < 0, -magnitude, magnitude)
    order = tl.where(magnitude > INFINITY, INFINITY + 1, order)
    if PACKED:
        order = order * MOST_VALUES + (MOST_VALUES - 1 - i)
    order = tl.where(i < n, order, none)

    slot = tl.arange(0, PADDED_K)
    found = tl.zeros((PADDED_K,), tl.int32)
    for turn in tl.static_range(K):
        largest = tl.max(order, 0)
        if PACKED:
            at = MOST_VALUES - 1 - (largest & (MOST_VALUES - 1))
        else:
            at = tl.min(tl.where(order == largest, i, PADDED), 0)
        found = tl.where(slot == turn, at, found)
        order = tl.where(i == at, none, order)
    inside = slot < K
    tl.store(values + row * K + slot, tl.load(x + found * step, mask=inside), mask=inside)
    tl.store(indices + row * K + slot, found.to(tl.int64), mask=inside)
