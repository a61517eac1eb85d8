"""The slow NumPy twin of the layer kernel, in float64: what every tile function is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.formats.codes import bf16_to_fp32, fp32_to_bf16
from freetoken.formats.record import Expert, RecordLayout

ERROR_BOUND = {"fp32": 4e-6, "bf16": 8e-3, "int8": 2e-2}
"""Largest error of a layer's output against this reference on the same activations, relative to the norm of the
output, for widths of 16 and more. fp32: rounding of sums of a few thousand products in one to four chains (2**-24 times
about the square root of their number; the largest seen is 3.2e-6, one chain of 2880). bf16: two roundings of
activations (2**-9 each at most; 3e-3 to 5e-3 seen, 7e-3 at a width of 16). int8: two roundings to 127 steps per block
of 16 or 32 (1.6e-2 seen)."""


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
    expert: Expert, x: NDArray[np.float64], activation: str = "silu", alpha: float = 0.0, limit: float = 0.0
) -> NDArray[np.float64]:
    """(B, H) float64 through one expert, unweighted."""
    gate = x @ expert.gate.format.dequantize64(expert.gate).T
    up = x @ expert.up.format.dequantize64(expert.up).T
    if expert.gate_bias is not None and expert.up_bias is not None:
        gate, up = gate + expert.gate_bias, up + expert.up_bias
    out = activate(gate, up, activation, alpha, limit) @ expert.down.format.dequantize64(expert.down).T
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
