"""Experts to test with, banks of them, one call of the layer kernel, and a reference that rounds as the kernel does."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from numpy.typing import NDArray

from freetoken import formats
from freetoken.formats import Format, Matrix
from freetoken.formats.codes import bf16_to_fp32, fp32_to_bf16
from freetoken.formats.record import Expert, RecordLayout
from freetoken.kernels import reference
from freetoken.kernels._experts import ExpertLayer, Scratch
from freetoken.kernels._isa import TileKernel, available_levels

HIDDEN_ERROR = 4e-6
"""Bound of the fp32 error of a hidden value, relative to the largest hidden value of its route: the kernel may round
a value to the other side where one this close to a rounding boundary (a tie) stands."""


@dataclass(frozen=True)
class Activation:
    """The gated activation function and its numbers, as `ExpertLayer` takes them."""

    activation: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0


SILU = Activation()
DEEPSEEK_V4 = Activation("silu_limited", 0.0, 2.0)
"""With a limit that inputs of normal size pass."""
GPT_OSS = Activation("swiglu_clamped", 1.702, 7.0)
HALF = Activation("swiglu_clamped", 0.0, 3e38)
"""With up rows of zero: exactly gate / 2."""


STEPS = {"int8": 127, "int15": 127 * 128}
"""The largest whole number of activations of that kind."""


def table(fmt: Format) -> list[TileKernel]:
    """All tile functions of a format, whether or not this CPU can run them."""
    kernels: list[TileKernel] = importlib.import_module(f"freetoken.kernels._tile_{fmt.kernels}").kernels()
    return kernels


def kernel_params() -> list[ParameterSet]:
    """(format, tile function) of every format; those that this CPU cannot run are skipped."""
    found = []
    for name in formats.names():
        for kernel in table(formats.get(name)):
            lacking = kernel.level not in available_levels()
            skip = pytest.mark.skipif(lacking, reason=f"this CPU has no {kernel.level}")
            found.append(pytest.param(formats.get(name), kernel, id=f"{name}-{kernel.act}-{kernel.level}", marks=skip))
    return found


def way_params() -> list[ParameterSet]:
    """(format, tile function, rounding): each as it is and, but for int8 and int15, with activations rounded to fp8."""
    found = []
    for param in kernel_params():
        found.append(pytest.param(*param.values, "none", id=param.id, marks=param.marks))
        if param.values[1].act not in STEPS:
            found.append(pytest.param(*param.values, "fp8", id=f"{param.id}-fp8", marks=param.marks))
    return found


def act_of(kernel: TileKernel, rounding: str) -> str:
    """The precision of activations in force."""
    return kernel.act if rounding == "none" else rounding


def make_expert(fmt: Format, hidden: int, intermediate: int, *, bias: bool = False, seed: int = 0) -> Expert:
    """An expert of gaussian weights whose outputs are of the size of its inputs."""
    rng = np.random.default_rng([seed, hidden, intermediate])

    def matrix(n: int, k: int) -> Matrix:
        return fmt.quantize((rng.standard_normal((n, k)) * np.sqrt(2 / k)).astype(np.float32))

    def vector(n: int) -> NDArray[np.float32] | None:
        return rng.standard_normal(n).astype(np.float32) if bias else None

    return Expert(
        matrix(intermediate, hidden),
        matrix(intermediate, hidden),
        matrix(hidden, intermediate),
        vector(intermediate),
        vector(intermediate),
        vector(hidden),
    )


def make_bank(layout: RecordLayout, n_experts: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """(E, record_bytes) of different experts."""
    bank = np.empty((n_experts, layout.nbytes), np.uint8)
    for e in range(n_experts):
        expert = make_expert(layout.format, layout.hidden, layout.intermediate, bias=layout.bias, seed=seed + e)
        layout.pack(expert, bank[e])
    return bank


def make_routes(
    n_tokens: int, k: int, n_experts: int, *, seed: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """ids and weights (B, K); k different experts for each token."""
    rng = np.random.default_rng([seed, n_tokens])
    ids = np.stack([rng.permutation(n_experts)[:k] for _ in range(n_tokens)]).astype(np.int32)
    return ids, rng.uniform(0.1, 1, ids.shape).astype(np.float32)


def run(
    kernel: TileKernel,
    layout: RecordLayout,
    bank: NDArray[np.uint8],
    x: NDArray[np.generic],
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
    how: Activation = SILU,
    *,
    n_threads: int = 2,
    rounding: str = "none",
    out: NDArray[np.generic] | None = None,
    scratch: Scratch | None = None,
) -> NDArray[np.generic]:
    """One call of the kernel; the output starts as 0xff bytes (NaN), so what is not written is seen."""
    layer = ExpertLayer(bank, layout, kernel, how.activation, how.alpha, how.limit, rounding)
    if out is None:
        out = np.empty_like(x)
    out.view(np.uint8)[...] = 0xFF
    layer.run(x, ids, weights, out, scratch or Scratch(), n_threads)
    return out


def round_like(act: str, values: NDArray[np.float64], block: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Activations (..., K) as a tile function of that kind sees them; and the step where one is near a tie, else 0."""
    doubt = HIDDEN_ERROR * np.abs(values).max(axis=-1, keepdims=True, initial=0.0)
    if act == "fp32":
        return values, np.zeros_like(values)
    if act == "bf16":
        low, high = reference.round_bf16(values - doubt), reference.round_bf16(values + doubt)
        return reference.round_bf16(values), high - low
    if act == "fp8":  # magnitudes grow and shrink together: a group's scale may be in doubt, too
        away = doubt * np.sign(values)
        return reference.round_fp8(values), np.abs(
            reference.round_fp8(values + away) - reference.round_fp8(values - away)
        )
    blocks = values.reshape(*values.shape[:-1], -1, block)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    step = np.where(top > 1e-30, top / STEPS[act], 0.0)
    ratio = blocks / np.where(step > 0, step, np.inf)
    near_tie = np.abs(np.abs(ratio - np.floor(ratio)) - 0.5) * step < doubt[..., None]
    return (np.rint(ratio) * step).reshape(values.shape), (near_tie * step).reshape(values.shape)


def run_layer_rounded(
    act: str,
    bank: NDArray[np.uint8],
    layout: RecordLayout,
    x: NDArray[np.float32],
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
    how: Activation,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`reference.run_layer` with x and the hidden values rounded as a kernel of activation kind `act` rounds them.

    The first (B, H) array is the output, the second what roundings near a tie may move: the sum of |down| times the
    step, over the hidden values in doubt. Everything else of a kernel is fp32 arithmetic.
    """
    rounded = round_like_fp32(act, x, layout.format.block).astype(np.float64)
    out, slack = np.zeros((2, len(ids), layout.hidden))
    for e in range(len(bank)):
        token, k = np.nonzero(ids == e)
        if not token.size:
            continue
        expert, weight = layout.unpack(bank[e]), weights[token, k, None].astype(np.float64)
        gate, up, down = (layout.format.dequantize64(m) for m in (expert.gate, expert.up, expert.down))
        g, u = rounded[token] @ gate.T, rounded[token] @ up.T
        if expert.gate_bias is not None and expert.up_bias is not None:
            g, u = g + expert.gate_bias, u + expert.up_bias
        h = reference.activate(g, u, how.activation, how.alpha, how.limit)
        h, doubt = round_like(act, h, layout.format.block)
        part = h @ down.T if expert.down_bias is None else h @ down.T + expert.down_bias
        np.add.at(out, token, part * weight)
        np.add.at(slack, token, doubt @ np.abs(down).T * np.abs(weight))
    return out, slack


def round_like_fp32(act: str, x: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    """Inputs as a tile function sees them, in the kernel's own fp32 operations, so without doubt."""
    if act == "fp32":
        return x
    if act == "bf16":
        return bf16_to_fp32(fp32_to_bf16(x))
    if act == "fp8":
        return reference.round_fp8(x.astype(np.float64)).astype(np.float32)
    blocks = x.reshape(len(x), -1, block)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    positive = top > 1e-30
    inverse = np.where(positive, np.float32(STEPS[act]) / np.where(positive, top, 1), 0).astype(np.float32)
    codes = np.rint(blocks * inverse)
    return (codes.astype(np.float64) * np.where(positive, top / np.float32(STEPS[act]), 0)).reshape(x.shape)


def check_close(
    out: NDArray[np.generic], wanted: NDArray[np.float64], bound: float, slack: NDArray[np.float64] | None = None
) -> None:
    """Assert for each token: |out - wanted| <= bound * |wanted| + |slack|, in the Euclidean norm."""
    error = np.linalg.norm(out.astype(np.float64) - wanted, axis=1)
    allowed = bound * np.linalg.norm(wanted, axis=1)
    if slack is not None:
        allowed = allowed + np.linalg.norm(slack, axis=1)
    worst = int(np.argmax(np.where(np.isnan(error), np.inf, error - allowed)))
    assert (error <= allowed).all(), f"token {worst}: error {error[worst]:.3g}, allowed {allowed[worst]:.3g}"
