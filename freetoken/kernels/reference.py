"""The slow NumPy twin of the layer kernel, in float64: what every tile function is compared with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from freetoken.formats.codes import bf16_to_fp32, fp32_to_bf16
from freetoken.formats.record import Expert, RecordLayout

ERROR_BOUND = {"fp32": 4e-6, "bf16": 8e-3, "int8": 2e-2, "int15": 1.6e-4, "fp8": 1.5e-1}
"""Largest error of a layer's output against this reference on the same activations, relative to the norm of the
output, for widths of 16 and more. fp32: rounding of sums of a few thousand products in one to four chains (2**-24 times
about the square root of their number; the largest seen is 3.2e-6, one chain of 2880). bf16: two roundings of
activations (2**-9 each at most; 3e-3 to 5e-3 seen, 7e-3 at a width of 16). int8: two roundings to 127 steps per block
of 16 or 32 (1.6e-2 seen). int15: the same to 16256 steps (9.5e-5 seen). fp8: two roundings to four significant bits
(2**-4 each at most; 5e-2 is the middle of what was seen, 7e-2 the most at widths of hundreds, 1.2e-1 at a width of
16)."""


def activate(
    gate: NDArray[np.float64], up: NDArray[np.float64], activation: str, alpha: float, limit: float
) -> NDArray[np.float64]:
    """The gated activation: "silu" is silu(gate) * up; "silu_limited" is DeepSeek-V4's, the same of gate up to limit
    and up within it; "swiglu_clamped" is gpt-oss's, with alpha and limit.
    """
    with np.errstate(over="ignore"):
        out: NDArray[np.float64]
        if activation == "silu":
            out = gate / (1 + np.exp(-gate)) * up
        else:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            if activation == "silu_limited":
                out = gate / (1 + np.exp(-gate)) * up
            else:
                out = gate / (1 + np.exp(-alpha * gate)) * (up + 1)
    return out


def run_expert(
    expert: Expert,
    x: NDArray[np.float64],
    activation: str = "silu",
    alpha: float = 0.0,
    limit: float = 0.0,
    rounding: str = "none",
) -> NDArray[np.float64]:
    """(B, H) float64 through one expert, unweighted; rounding as `ExpertLayer` takes it, of x and the hidden values."""
    to_precision = _ROUND[rounding]
    x = to_precision(x)
    gate = x @ expert.gate.format.dequantize64(expert.gate).T
    up = x @ expert.up.format.dequantize64(expert.up).T
    if expert.gate_bias is not None and expert.up_bias is not None:
        gate, up = gate + expert.gate_bias, up + expert.up_bias
    hidden = to_precision(activate(gate, up, activation, alpha, limit))
    out = hidden @ expert.down.format.dequantize64(expert.down).T
    return out if expert.down_bias is None else out + expert.down_bias


def run_layer(
    bank: NDArray[np.uint8],
    layout: RecordLayout,
    x: NDArray[np.float32] | NDArray[np.uint16],
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
    activation: str = "silu",
    alpha: float = 0.0,
    limit: float = 0.0,
) -> NDArray[np.float64]:
    """(B, H) float64: what `ExpertLayer.run` writes, from the same bank (E, record_bytes) and arguments."""
    values = (bf16_to_fp32(x.view(np.uint16)) if x.dtype == np.uint16 else x).astype(np.float64)
    out = np.zeros((len(ids), layout.hidden))
    for e in range(len(bank)):
        token, k = np.nonzero(ids == e)
        if token.size:
            expert = layout.unpack(bank[e])
            part = run_expert(expert, values[token], activation, alpha, limit)
            np.add.at(out, token, part * weights[token, k, None].astype(np.float64))
    return out


def round_bf16(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values rounded to bf16, as float64."""
    return bf16_to_fp32(fp32_to_bf16(values.astype(np.float32))).astype(np.float64)


FP8_GROUP = 128
"""Activations that share a scale when they are rounded to fp8."""


def round_fp8(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values (..., K) to the nearest e4m3 times a scale, as DeepSeek's act_quant does with scale_fmt ue8m0.

    Each 128 along K (the last group may be shorter) have a scale: the least power of two with which the largest
    magnitude, taken as 1e-4 at least, is within 448. A group that holds a NaN or an infinity becomes NaN. Source: the
    inference code that comes with DeepSeek-V4's weights.
    """
    *rows, width = values.shape
    n_groups = -(-width // FP8_GROUP)
    groups = np.pad(values, [(0, 0)] * len(rows) + [(0, n_groups * FP8_GROUP - width)])
    groups = groups.reshape(*rows, n_groups, FP8_GROUP)
    top = np.abs(groups).max(axis=-1, keepdims=True)
    fraction, exponent = np.frexp(np.maximum(top, 1e-4) / 448)
    scale = np.ldexp(np.where(np.isfinite(top), 1.0, np.nan), exponent - (fraction == 0.5))
    with np.errstate(invalid="ignore"):
        scaled = groups / scale
    step = np.ldexp(1.0, np.maximum(np.frexp(scaled)[1] - 1, -6) - 3)
    out: NDArray[np.float64] = np.rint(scaled / step) * step * scale
    return out.reshape(*rows, n_groups * FP8_GROUP)[..., :width]


_ROUND: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "none": lambda values: values,
    "bf16": round_bf16,
    "fp8": round_fp8,
}
