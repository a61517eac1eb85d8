"""The layer kernel, with every tile function that this CPU can run, against `kernels/reference.py`.

Two comparisons. The exact reference, within `reference.ERROR_BOUND` of the tile function's activation kind. And a
reference that rounds activations where the kernel does (`tests/support/experts.py`), within the fp32 bound: what is
left is fp32 arithmetic, plus, where a hidden value stands so near a rounding boundary that fp32 error may carry it
over, one step of that rounding times its column of down. Measured here: 2e-6 and less, so a wrong code, scale or
correction of a single block shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from numpy.typing import NDArray

from freetoken import formats
from freetoken.formats import Format, Matrix
from freetoken.formats.codes import bf16_to_fp32, fp32_to_bf16, pack_nibbles
from freetoken.formats.record import Expert, RecordLayout
from freetoken.kernels import _tile_nvfp4, reference
from freetoken.kernels._experts import ExpertLayer, Scratch
from freetoken.kernels._isa import ACTIVATIONS, TileKernel
from tests.support.experts import (
    DEEPSEEK_V4,
    GPT_OSS,
    HALF,
    SILU,
    Activation,
    act_of,
    check_close,
    kernel_params,
    make_bank,
    make_routes,
    run,
    run_layer_rounded,
    table,
    way_params,
)
from tests.support.guard import guarded

N_EXPERTS = 4


def for_kernels(
    only: Callable[[Format], bool] = lambda fmt: True, acts: tuple[str, ...] = ACTIVATIONS
) -> pytest.MarkDecorator:
    """Run a test with every tile function of these activation kinds, of the formats that `only` accepts."""
    found = [param for param in kernel_params() if only(param.values[0]) and param.values[1].act in acts]
    return pytest.mark.parametrize(("fmt", "kernel"), found)


KERNELS = for_kernels()
ROUNDABLE_KERNELS = for_kernels(acts=("fp32", "bf16"))
WAYS = pytest.mark.parametrize(("fmt", "kernel", "rounding"), way_params())
SCALED_KERNELS = for_kernels(lambda fmt: fmt.scale_dtype is not None)

# (H, I): one block, tails of rows (not a multiple of 16), odd numbers of lines and blocks, widths of real models.
SHAPES = [
    *[(2, 2), (10, 18), (6, 88), (88, 6), (18, 34)],  # bf16
    *[(16, 16), (48, 80), (16, 640), (2880, 16)],  # and nvfp4
    *[(4, 12), (88, 88), (132, 260)],  # fp8_block
    *[(32, 32), (96, 64), (32, 160), (2880, 32), (32, 2880), (32, 768), (64, 1408)],
]


def shapes_of(fmt: Format) -> list[tuple[int, int]]:
    return [shape for shape in SHAPES if all(width % fmt.width_step == 0 for width in shape)]


def small(fmt: Format, rounding: str = "none") -> tuple[int, int]:
    """(H, I) of about three and five blocks, more than one tile: odd in every way that the format allows. With fp8,
    which rounds in groups of 128, of two groups and three, and a rest."""
    if rounding == "fp8":
        return {2: (262, 386), 16: (272, 400), 128: (300, 404)}.get(fmt.block, (288, 416))
    return {2: (38, 22), 16: (48, 80), 128: (300, 404)}.get(fmt.block, (3 * fmt.block, 5 * fmt.block))


@dataclass(frozen=True)
class Case:
    """One layer and its input. Arrays are made once and shared by all tile functions."""

    fmt: Format
    shape: tuple[int, int]
    bias: bool
    how: Activation
    n_tokens: int

    @cached_property
    def layout(self) -> RecordLayout:
        return RecordLayout(self.fmt, *self.shape, self.bias)

    @property
    def bank(self) -> NDArray[np.uint8]:
        return bank_of(self.layout)

    @cached_property
    def x(self) -> NDArray[np.float32]:
        return np.random.default_rng(self.n_tokens).standard_normal((self.n_tokens, self.shape[0])).astype(np.float32)

    @cached_property
    def routes(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return make_routes(self.n_tokens, 2, N_EXPERTS)

    @cached_property
    def exact(self) -> NDArray[np.float64]:
        how = self.how
        return reference.run_layer(self.bank, self.layout, self.x, *self.routes, how.activation, how.alpha, how.limit)


@cache
def bank_of(layout: RecordLayout) -> NDArray[np.uint8]:
    return make_bank(layout, N_EXPERTS)


make_case = cache(Case)


@cache
def rounded(case: Case, act: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return run_layer_rounded(act, case.bank, case.layout, case.x, *case.routes, case.how)


def check_matches_reference(case: Case, out: NDArray[np.generic], act: str) -> None:
    wanted, slack = rounded(case, act)
    check_close(out, wanted, reference.ERROR_BOUND["fp32"], slack)
    if min(case.shape) >= 16:
        check_close(out.reshape(1, -1), case.exact.reshape(1, -1), reference.ERROR_BOUND[act])


# --- every tile function, every shape ---------------------------------------------------------------------------------


def shape_params(acts: tuple[str, ...] = ACTIVATIONS) -> list[ParameterSet]:
    """Tile functions with the shapes of their format and numbers of tokens: all for small shapes, two for large."""
    found = []
    for param in kernel_params():
        fmt, kernel = param.values
        if kernel.act not in acts:
            continue
        for shape in shapes_of(fmt):
            for n_tokens in (1, 2, 5, 33) if shape[0] * shape[1] < 10_000 else (1, 5):
                name = f"{param.id}-{shape[0]}x{shape[1]}-{n_tokens}"
                found.append(pytest.param(fmt, kernel, shape, n_tokens, id=name, marks=param.marks))
    return found


@pytest.mark.parametrize(("bias", "how"), [(False, SILU), (True, GPT_OSS)], ids=["silu", "gpt-oss-bias"])
@pytest.mark.parametrize(("fmt", "kernel", "shape", "n_tokens"), shape_params())
def test_matches_reference(
    fmt: Format, kernel: TileKernel, shape: tuple[int, int], n_tokens: int, bias: bool, how: Activation
) -> None:
    case = make_case(fmt, shape, bias, how, n_tokens)
    out = run(kernel, case.layout, case.bank, case.x, *case.routes, how)
    check_matches_reference(case, out, kernel.act)


@pytest.mark.parametrize(("fmt", "kernel", "shape", "n_tokens"), shape_params(("fp32", "bf16")))
def test_fp8_activations_match_the_reference(
    fmt: Format, kernel: TileKernel, shape: tuple[int, int], n_tokens: int
) -> None:
    case = make_case(fmt, shape, True, DEEPSEEK_V4, n_tokens)
    out = run(kernel, case.layout, case.bank, case.x, *case.routes, DEEPSEEK_V4, rounding="fp8")
    check_matches_reference(case, out, "fp8")


@ROUNDABLE_KERNELS
def test_rounding_to_bf16_before_any_tile(fmt: Format, kernel: TileKernel) -> None:
    case = make_case(fmt, small(fmt), True, SILU, 5)
    out = run(kernel, case.layout, case.bank, case.x, *case.routes, SILU, rounding="bf16")
    check_matches_reference(case, out, "bf16")


@pytest.mark.parametrize("how", [GPT_OSS, DEEPSEEK_V4], ids=["gpt-oss", "deepseek-v4"])
@WAYS
def test_clamps(fmt: Format, kernel: TileKernel, rounding: str, how: Activation) -> None:
    """Inputs so large that gate and up pass the limit on every side that has one."""
    case = make_case(fmt, small(fmt, rounding), True, how, 5)
    x, routes = 20 * case.x, case.routes
    expert = case.layout.unpack(case.bank[routes[0][0, 0]])
    for matrix, sides in ((expert.gate, (1,)), (expert.up, (-1, 1))):
        assert all((side * (x[:1] @ matrix.dequantize().T) > 1.5 * how.limit).any() for side in sides)
    out = run(kernel, case.layout, case.bank, x, *routes, how, rounding=rounding)
    wanted, slack = run_layer_rounded(act_of(kernel, rounding), case.bank, case.layout, x, *routes, how)
    check_close(out, wanted, reference.ERROR_BOUND["fp32"], slack)


@pytest.mark.parametrize("how", [SILU, DEEPSEEK_V4], ids=["silu", "deepseek-v4"])
@WAYS
@pytest.mark.parametrize("value", [np.nan, -np.nan])
def test_a_nan_passes_activations(
    fmt: Format, kernel: TileKernel, rounding: str, value: float, how: Activation
) -> None:
    case = make_case(fmt, small(fmt, rounding), False, how, 2)
    x = case.x.copy()
    x[1] = value
    out = run(kernel, case.layout, case.bank, x, *case.routes, how, rounding=rounding)
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


@WAYS
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_what_is_no_number_is_not_hidden(fmt: Format, kernel: TileKernel, rounding: str, value: float) -> None:
    """A token with a NaN or an infinity gives no numbers; the others do not notice."""
    case = make_case(fmt, small(fmt, rounding), False, SILU, 5)
    x = case.x.copy()
    x[2, fmt.block + 1] = value
    out = run(kernel, case.layout, case.bank, x, *case.routes, rounding=rounding)
    assert not np.isfinite(out[2]).any()
    assert rounding == "none" or np.isnan(out[2]).all()
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(
        out[others], run(kernel, case.layout, case.bank, case.x, *case.routes, rounding=rounding)[others]
    )


@ROUNDABLE_KERNELS
def test_an_infinity_becomes_nan_in_fp8(fmt: Format, kernel: TileKernel) -> None:
    """With weights that are all positive it would stay an infinity: no difference or product with zero hides it."""
    width = 2 * max(16, fmt.block)
    layout = RecordLayout(fmt, width, width)
    ones = fmt.quantize(np.ones((width, width), np.float32))
    bank = np.empty((1, layout.nbytes), np.uint8)
    layout.pack(Expert(ones, ones, ones), bank[0])
    x = np.ones((2, width), np.float32)
    x[0, 3] = np.inf
    routes = np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)
    assert np.isposinf(run(kernel, layout, bank, x, *routes)[0]).all()
    out = run(kernel, layout, bank, x, *routes, rounding="fp8")
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


@pytest.mark.parametrize("divides", [False, True])
@for_kernels(lambda fmt: fmt.name == "nvfp4")
def test_globals(fmt: Format, kernel: TileKernel, divides: bool) -> None:
    """Different globals of gate, up and down, in both directions."""
    layout = RecordLayout(fmt, *small(fmt))
    plain = layout.unpack(bank_of(layout)[0])
    values = (4.0, 0.5, 3.0) if divides else (0.25, 2.0, 0.3)
    matrices = [
        Matrix(fmt, m.codes, m.scales, float(np.float32(value)), divides)
        for m, value in zip((plain.gate, plain.up, plain.down), values, strict=True)
    ]
    bank = np.empty((1, layout.nbytes), np.uint8)
    layout.pack(Expert(*matrices), bank[0])
    x = np.random.default_rng(0).standard_normal((3, layout.hidden)).astype(np.float32)
    routes = np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32)
    wanted, slack = run_layer_rounded(kernel.act, bank, layout, x, *routes, SILU)
    check_close(run(kernel, layout, bank, x, *routes), wanted, reference.ERROR_BOUND["fp32"], slack)


# --- bits -------------------------------------------------------------------------------------------------------------


def awkward_routes(n_tokens: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Three routes a token: some go nowhere (-1 and E), some name an expert twice, the last token has none."""
    ids, weights = make_routes(n_tokens, 3, N_EXPERTS, seed=1)
    ids[0] = [2, -1, 2]
    ids[1] = [N_EXPERTS, 0, 3]
    ids[-1] = [-1, N_EXPERTS, -7]
    return ids, weights


@WAYS
def test_same_bits_for_any_number_of_threads(fmt: Format, kernel: TileKernel, rounding: str) -> None:
    case = make_case(fmt, small(fmt, rounding), True, SILU, 7)
    routes, scratch = awkward_routes(7), Scratch()
    alone = run(kernel, case.layout, case.bank, case.x, *routes, n_threads=1, rounding=rounding)
    for n_threads in (2, 3, 5, 8):
        out = run(
            kernel, case.layout, case.bank, case.x, *routes, n_threads=n_threads, scratch=scratch, rounding=rounding
        )
        np.testing.assert_array_equal(out, alone, err_msg=f"{n_threads} threads")


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize(("fmt", "kernel"), kernel_params())
def test_same_bits_for_runs_of_output_tiles(fmt: Format, kernel: TileKernel, n_tokens: int) -> None:
    """A wide output is shared out in runs of tiles, whose length depends on threads and tokens."""
    case = make_case(fmt, (2880, 32), True, SILU, n_tokens)
    alone, *others = (
        run(kernel, case.layout, case.bank, case.x, *case.routes, n_threads=n_threads) for n_threads in (1, 2, 7)
    )
    for out in others:
        np.testing.assert_array_equal(out, alone)


@WAYS
def test_same_bits_alone_and_in_a_batch(fmt: Format, kernel: TileKernel, rounding: str) -> None:
    case = make_case(fmt, small(fmt, rounding), True, SILU, 7)
    ids, weights = awkward_routes(7)
    scratch = Scratch()
    batch = run(kernel, case.layout, case.bank, case.x, ids, weights, scratch=scratch, rounding=rounding)
    for b in range(7):
        part = slice(b, b + 1)
        alone = run(
            kernel, case.layout, case.bank, case.x[part], ids[part], weights[part], scratch=scratch, rounding=rounding
        )
        np.testing.assert_array_equal(alone, batch[part])


MANY_WAYS = pytest.mark.parametrize(
    ("fmt", "kernel", "rounding"), [param for param in way_params() if param.values[1].many]
)


@pytest.mark.parametrize("shape", ["wide", "odd"])
@pytest.mark.parametrize("how", [SILU, HALF], ids=["silu", "half"])
@MANY_WAYS
def test_same_bits_however_many_tokens_an_expert_has(
    fmt: Format, kernel: TileKernel, rounding: str, how: Activation, shape: str
) -> None:
    """From few to more than one call of a tile function takes; with HALF some tokens are so tiny that sums are
    subnormal.
    """
    case = make_case(fmt, {"wide": (288, 32 * fmt.width_step), "odd": small(fmt, rounding)}[shape], True, how, 135)
    x = case.x.copy()
    if how is HALF:
        x[::3] *= np.float32(2.0**-122)
    ids = np.full((135, 2), -1, np.int32)
    ids[:, 0] = 1
    ids[::2, 1] = 3
    ids[3, 1] = 1
    weights = case.routes[1]
    scratch = Scratch()

    def of(part: slice | list[int], n_threads: int = 1) -> NDArray[np.generic]:
        return run(
            kernel, case.layout, case.bank, x[part], ids[part], weights[part], how, rounding=rounding, scratch=scratch,
            n_threads=n_threads,
        )  # fmt: skip

    alone = np.concatenate([of(slice(b, b + 1)) for b in range(135)])
    for tokens in (5, 13, 17, 64, 65, 69, 135):
        np.testing.assert_array_equal(of(slice(tokens), 3), alone[:tokens], err_msg=f"{tokens} tokens")
    late = list(range(130, 9, -3))
    np.testing.assert_array_equal(of(late), alone[late])
    assert np.isfinite(alone).all() and alone.any(axis=1).all()


@WAYS
def test_routes_to_nowhere_and_twice_to_one_expert(fmt: Format, kernel: TileKernel, rounding: str) -> None:
    case = make_case(fmt, small(fmt, rounding), True, SILU, 7)
    ids, weights = awkward_routes(7)
    out = run(kernel, case.layout, case.bank, case.x, ids, weights, rounding=rounding)
    wanted, slack = run_layer_rounded(act_of(kernel, rounding), case.bank, case.layout, case.x, ids, weights, SILU)
    check_close(out, wanted, reference.ERROR_BOUND["fp32"], slack)
    np.testing.assert_array_equal(out[-1], np.zeros_like(out[-1]))


@WAYS
def test_no_routes_at_all(fmt: Format, kernel: TileKernel, rounding: str) -> None:
    case = make_case(fmt, small(fmt, rounding), True, SILU, 2)
    none = np.empty((2, 0), np.int32), np.empty((2, 0), np.float32)
    assert not run(kernel, case.layout, case.bank, case.x, *none, rounding=rounding).any()
    empty = np.empty((0, 2), np.int32), np.empty((0, 2), np.float32)
    assert run(kernel, case.layout, case.bank, case.x[:0], *empty, rounding=rounding).shape == (0, case.layout.hidden)


@WAYS
def test_bf16_in_and_out(fmt: Format, kernel: TileKernel, rounding: str) -> None:
    """uint16 arrays hold bf16 bits: the same arithmetic as on the widened input, rounded once at the end."""
    case = make_case(fmt, small(fmt, rounding), True, SILU, 5)
    x = fp32_to_bf16(case.x)
    wide = run(kernel, case.layout, case.bank, bf16_to_fp32(x), *case.routes, rounding=rounding)
    out = run(kernel, case.layout, case.bank, x, *case.routes, rounding=rounding)
    assert out.dtype == np.uint16
    np.testing.assert_array_equal(out, fp32_to_bf16(wide))


@WAYS
def test_zero_activations_give_exact_zeros(fmt: Format, kernel: TileKernel, rounding: str) -> None:
    case = make_case(fmt, small(fmt, rounding), False, SILU, 2)
    assert not run(kernel, case.layout, case.bank, np.zeros_like(case.x), *case.routes, rounding=rounding).any()


# --- edge codes -------------------------------------------------------------------------------------------------------
#
# An expert whose hidden values are known exactly: gate is the identity on the first I inputs, up is zero and the
# activation halves, so h = x / 2. With x = integers of at most 127 times a power of two, of which one in each block is
# 127, bf16 and int8 (scale: that power of two) hold x and h exactly, sums of products with small codes are exact in
# fp32, and a block's scale is one correctly rounded product: down's rows must equal the float64 reference rounded to
# fp32, in every tile function.


ONE = {
    "bf16": (0x3F80, None),
    "ds_fp4": (2, 127),
    "fp8_block": (0x38, 0x3F800000),
    "mxfp4": (2, 127),
    "nvfp4": (2, 0x38),
    "q4_0": (9, 0x3C00),
    "q8_0": (1, 0x3C00),
}
ZERO = {"q4_0": 8}
"""Code and scale of exactly 1 in each format, with a global scale of 1; and the code of 0 where that is not 0."""


def identity(fmt: Format, n: int, k: int) -> Matrix:
    """Ones on the diagonal, exactly (quantize would choose other scales, which need not divide)."""
    code, scale = ONE[fmt.name]
    codes = np.where(np.eye(n, k), code, ZERO.get(fmt.name, 0)).astype(np.uint16 if fmt.bits == 16 else np.uint8)
    packed = pack_nibbles(codes) if fmt.bits == 4 else codes.view(np.uint8)
    return Matrix(fmt, packed, None if scale is None else np.full((n, fmt.n_blocks(k)), scale, fmt.scale_dtype))


def run_down(
    kernel: TileKernel, down: Matrix, exponent: int, all_of: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Outputs (H,) of the layer with that down matrix (H, I), H >= I, and the reference's, for x of 2**exponent.

    all_of: the number that each x is times that, in place of any numbers.
    """
    fmt, (hidden, inner) = down.format, down.shape
    gate, up = identity(fmt, inner, hidden), fmt.quantize(np.zeros((inner, hidden), np.float32))
    np.testing.assert_array_equal(gate.dequantize(), np.eye(inner, hidden))
    layout = RecordLayout(fmt, hidden, inner)
    bank = np.empty((1, layout.nbytes), np.uint8)
    layout.pack(Expert(gate, up, down), bank[0])
    whole = np.random.default_rng(7).integers(-127, 128, (1, hidden))
    whole[:, :: fmt.block] = 127
    whole = whole if all_of is None else np.full_like(whole, all_of)
    x = np.ldexp(whole.astype(np.float32), exponent)
    routes = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    out = run(kernel, layout, bank, x, *routes, HALF)
    wanted = reference.run_layer(bank, layout, x, *routes, HALF.activation, HALF.alpha, HALF.limit)
    np.testing.assert_array_equal(wanted[0], layout.format.dequantize64(down) @ x[0, :inner].astype(np.float64) / 2)
    return out[0], wanted[0]


def stock_fp8(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """(..., K) through DeepSeek's act_quant with scale_fmt ue8m0, in torch, with torch's cast to e4m3."""
    width = x.shape[-1]
    groups = torch.nn.functional.pad(torch.from_numpy(x), (0, -width % 128)).unflatten(-1, (-1, 128))
    ratio = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) * torch.tensor(1 / 448)
    scale = torch.exp2(torch.ceil(torch.log2(ratio.double()))).float()
    codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)[..., :width].numpy()


def wide(rng: np.random.Generator, width: int) -> NDArray[np.float64]:
    """(width,) of all sizes below the first of each 128: a scale of fewer values would keep more of the small ones."""
    values = rng.standard_normal(width) * np.exp2(rng.integers(-18, -6, width))
    values[::128] = 1.5 + rng.random(len(values[::128]))
    return values


def fp8_inputs(width: int) -> NDArray[np.float32]:
    """(B, width): from below the floor of the scale to 2**100; largest magnitudes at a scale's edge and next to it,
    with steps and ties of e4m3 below, subnormals too; zeros of both signs; a group of zeros.
    """
    rng = np.random.default_rng(2)
    rows = [np.ldexp(wide(rng, width), e) for e in (-100, -40, -24, -20, -16, -14, -7, 0, 3, 100)]
    steps = np.concatenate([np.arange(16, 32) * 2.0**e for e in (-10, -9, 0, 3)] + [np.arange(18) / 1024])
    for edge in (
        448,
        np.nextafter(np.float32(448), np.float32(0)),
        np.nextafter(np.float32(448), np.float32(999)),
        256,
    ):
        for e in (-20, 0, 11):
            row = np.resize(np.concatenate([steps, -steps, [0.0, -0.0]]), width)
            row[::128] = edge
            rows.append(np.ldexp(row, e))
    rows[7][:128] = 0
    return np.stack(rows).astype(np.float32)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 5])
@ROUNDABLE_KERNELS
def test_fp8_rounds_to_the_bit_as_deepseek_does(fmt: Format, kernel: TileKernel, n_threads: int) -> None:
    """Gate and down are the identity and the activation halves: the output is x, rounded, moved by the bias of gate,
    halved and rounded again. Expert 0 has no bias, which would hide what is tiny.
    """
    width = {2: 346, 16: 352, 128: 348}.get(fmt.block, 352)
    layout = RecordLayout(fmt, width, width, True)
    same, nothing = identity(fmt, width, width), fmt.quantize(np.zeros((width, width), np.float32))
    zeros = np.zeros(width, np.float32)
    biases = np.stack([zeros, wide(np.random.default_rng(4), width).astype(np.float32)])
    bank = np.empty((2, layout.nbytes), np.uint8)
    for record, bias in zip(bank, biases, strict=True):
        layout.pack(Expert(same, nothing, same, bias, zeros, zeros), record)
    x = np.repeat(fp8_inputs(width), 2, axis=0)
    ids = np.arange(len(x), dtype=np.int32)[:, None] % 2
    out = run(kernel, layout, bank, x, ids, np.ones_like(ids, np.float32), HALF, n_threads=n_threads, rounding="fp8")
    np.testing.assert_array_equal(out, stock_fp8((stock_fp8(x) + biases[ids[:, 0]]) / 2))


def random_nibbles(n: int, k: int) -> NDArray[np.uint8]:
    """Codes (n, k / 2) uint8; every nibble value, the negative zero too."""
    return pack_nibbles(np.random.default_rng(3).integers(0, 16, (n, k)).astype(np.uint8))


@for_kernels(lambda fmt: fmt.scale_dtype is not None and fmt.name != "fp8_block")
@pytest.mark.parametrize("all_of", [127, -127])
@pytest.mark.parametrize("byte", [0x00, 0x77, 0x7F, 0x80, 0xFF])
def test_the_largest_sums_of_whole_numbers(fmt: Format, kernel: TileKernel, byte: int, all_of: int) -> None:
    """All codes and all activations alike, as large as they get, of either sign: no sum leaves its 16 or 32 bits."""
    width = 4 * fmt.block
    codes = np.full((width, width * fmt.bits // 8), byte, np.uint8)
    scales = np.full((width, fmt.n_blocks(width)), ONE[fmt.name][1], fmt.scale_dtype)
    out, wanted = run_down(kernel, Matrix(fmt, codes, scales), 0, all_of)
    np.testing.assert_array_equal(out, wanted.astype(np.float32))


@for_kernels(lambda fmt: fmt.kernels == "mxfp4")
def test_every_e8m0_scale(fmt: Format, kernel: TileKernel) -> None:
    """From code 0, 2**-127, itself subnormal, to 254, 2**127; x = 2**-14 keeps all products in fp32's range."""
    scales = np.minimum(np.arange(256), 254).astype(np.uint8).reshape(256, 1)
    out, wanted = run_down(kernel, Matrix(fmt, random_nibbles(256, 32), scales), -14)
    np.testing.assert_array_equal(out, wanted.astype(np.float32))
    assert out[0] != 0 and np.isfinite(out).all()


@for_kernels(lambda fmt: fmt.name == "nvfp4")
def test_every_e4m3_scale(fmt: Format, kernel: TileKernel) -> None:
    """Subnormals 1 to 7, both zeros, negative codes and the largest, 0x7e; all but the NaNs."""
    codes = np.arange(256)
    scales = np.where(codes & 0x7F == 0x7F, codes - 1, codes).astype(np.uint8).reshape(256, 1)
    out, wanted = run_down(kernel, Matrix(fmt, random_nibbles(256, 16), scales), 0)
    np.testing.assert_array_equal(out, wanted.astype(np.float32))


def fp16_scales() -> NDArray[np.uint16]:
    """(96, 1) bits: subnormals, zeros, negatives, the largest and others; no NaN or infinity."""
    edges = [0, 1, 2, 3, 0x1FF, 0x3FF, 0x400, 0x401, 0x3C00, 0x7BFF]
    others = np.random.default_rng(6).integers(0, 0x7C00, 76)
    return np.array([*edges, *[0x8000 | e for e in edges], *others], np.uint16).reshape(96, 1)


@for_kernels(lambda fmt: fmt.name == "fp8_block")
@pytest.mark.parametrize("scale", [1.0, -0.1, 2.0**-126, 2.0**-149, 3e30])
def test_every_e4m3_weight(fmt: Format, kernel: TileKernel, scale: float) -> None:
    """One weight a row, so that sums are exact: every code but the NaNs, in every place of ragged blocks."""
    row, inner = np.arange(512), 128 + 20
    codes = np.zeros((512, inner), np.uint8)
    codes[row, row * 37 % inner] = np.where(row & 0x7F == 0x7F, row - 1, row)
    scales = np.full((512, 2), scale, np.float32)
    out, wanted = run_down(kernel, Matrix(fmt, codes, scales.view(np.uint32)), 0)
    np.testing.assert_array_equal(out, wanted.astype(np.float32))
    assert np.count_nonzero(wanted) > 400


@for_kernels(lambda fmt: fmt.name == "q4_0")
def test_every_q4_0_code_with_fp16_scales(fmt: Format, kernel: TileKernel) -> None:
    out, wanted = run_down(kernel, Matrix(fmt, random_nibbles(96, 32), fp16_scales()), 0)
    np.testing.assert_array_equal(out, wanted.astype(np.float32))


@for_kernels(lambda fmt: fmt.name == "q8_0")
def test_fp16_scales_and_the_lowest_int8(fmt: Format, kernel: TileKernel) -> None:
    """Code -128, which ggml never writes but a file may hold."""
    rng = np.random.default_rng(5)
    scales = fp16_scales()
    codes = rng.integers(-128, 128, (96, 32)).astype(np.int8)
    codes[::3] = -128
    codes[1::3, ::2] = -128
    out, wanted = run_down(kernel, Matrix(fmt, codes.view(np.uint8), scales), 0)
    np.testing.assert_array_equal(out, wanted.astype(np.float32))


@for_kernels(lambda fmt: fmt.name == "bf16")
def test_bf16_subnormal_weights(fmt: Format, kernel: TileKernel) -> None:
    """Exact in fp32 tiles; the bf16 tile counts a subnormal weight as zero, because VDPBF16PS does."""
    bits = np.zeros((32, 2), np.uint16)
    bits[:, 0] = [0x0001, 0x0002, 0x0040, 0x007F, 0x8001, 0x807F, 0x0080, 0x8080, 0x0081, 0x7C00, 0xFC00, *range(21)]
    out, wanted = run_down(kernel, Matrix(fmt, bits.view(np.uint8)), 0)
    if kernel.act == "bf16":
        wanted[((bits & 0x7F80) == 0).all(axis=1)] = 0
    np.testing.assert_array_equal(out, wanted.astype(np.float32))


@SCALED_KERNELS
def test_all_zero_blocks(fmt: Format, kernel: TileKernel) -> None:
    """A block of zero codes adds nothing, whatever its scale is, next to one that does."""
    block = fmt.block
    rng = np.random.default_rng(9)
    hidden = 2 * max(16, block)
    weights = np.zeros((hidden, 2 * block), np.float32)
    weights[:, block:] = rng.integers(-6, 7, (hidden, block)) // 2
    down = fmt.quantize(weights)
    assert down.scales is not None
    largest = {"ds_fp4": 254, "fp8_block": 0x7F7FFFFF, "mxfp4": 254, "nvfp4": 0x7E, "q4_0": 0x7BFF, "q8_0": 0x7BFF}[
        fmt.name
    ]
    for scale in (0, 1, largest):
        scales = down.scales.copy()
        scales[:, 0] = scale
        out, wanted = run_down(kernel, Matrix(fmt, down.codes, scales, down.global_scale, down.divides), 0)
        np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
        assert np.isfinite(out).all()
    nothing, _ = run_down(kernel, fmt.quantize(np.zeros((hidden, block), np.float32)), 0)
    assert not nothing.any()


@SCALED_KERNELS
def test_mixed_edge_scales_in_one_row(fmt: Format, kernel: TileKernel) -> None:
    """Several blocks with very different scales: rounding stays within fp32's of the sum of magnitudes."""
    rng = np.random.default_rng(11)
    hidden, inner = 7 * max(32, fmt.block), 6 * fmt.block
    edges = {
        "ds_fp4": [0, 1, 64, 126, 127, 254],
        "fp8_block": [0, 1, 0x00800000, 0x3F800001, 0xBF800000, 0x71800000],
        "mxfp4": [0, 1, 64, 126, 127, 254],
        "nvfp4": [0, 1, 7, 0x87, 0x38, 0x7E],
        "q4_0": [0, 1, 0x3FF, 0xBC00],
        "q8_0": [0, 1, 0x3FF, 0xBC00],
    }
    scales = rng.choice(edges[fmt.name], (hidden, 6)).astype(fmt.scale_dtype)
    codes = rng.integers(0, 256, (hidden, inner * fmt.bits // 8)).astype(np.uint8)
    if fmt.name == "fp8_block":
        codes[codes & 0x7F == 0x7F] = 0
    down = Matrix(fmt, codes, scales)
    out, wanted = run_down(kernel, down, -14)
    magnitude = np.abs(fmt.dequantize64(down)).sum(axis=1) * np.ldexp(64, -14)
    assert (np.abs(out - wanted) <= 2.0**-22 * magnitude + 2.0**-149).all()


# --- reading past the end ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EndingLayout(RecordLayout):
    """A record whose last bytes are the last tile of gate_up or of down, so that a guard page can follow at once."""

    last: str = "down"

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        plain = RecordLayout(self.format, self.hidden, self.intermediate, self.bias).sections
        found, offset = {}, 0
        for name in [*(name for name in plain if name != self.last), self.last]:
            found[name] = offset, plain[name][1]
            offset += -(-plain[name][1] // 64) * 64
        return found

    @property
    def nbytes(self) -> int:
        return sum(self.sections[self.last])


@cache
def pair_of(layout: RecordLayout) -> NDArray[np.uint8]:
    return make_bank(layout, 2)


@cache
def ending_bank(layout: EndingLayout) -> NDArray[np.uint8]:
    """The same two experts, section by section: packing relies on the order that records have."""
    plain = RecordLayout(layout.format, layout.hidden, layout.intermediate, layout.bias)
    bank = np.zeros((2, layout.nbytes), np.uint8)
    for name, (offset, size) in plain.sections.items():
        at = layout.sections[name][0]
        bank[:, at : at + size] = pair_of(plain)[:, offset : offset + size]
    return bank


@cache
def ending_case(fmt: Format, shape: tuple[int, int], n_tokens: int, dtype: type, act: str) -> tuple[Any, ...]:
    """Input in that dtype, routes, and what must come of them, wherever in a record its sections lie."""
    layout = RecordLayout(fmt, *shape, bias=True)
    routes = make_routes(n_tokens, 2, 2)
    x = np.random.default_rng(0).standard_normal((n_tokens, shape[0])).astype(np.float32)
    given = x if dtype == np.float32 else fp32_to_bf16(x)
    seen = x if dtype == np.float32 else bf16_to_fp32(given)
    return given, routes, *run_layer_rounded(act, pair_of(layout), layout, seen, *routes, GPT_OSS)


def guard_params() -> list[ParameterSet]:
    found = []
    for param in way_params():
        fmt, kernel, rounding = param.values
        for shape in ((fmt.block, fmt.block), (10, 18), (6, 88), (4, 88), (2880, 32), small(fmt, rounding)):
            if not any(width % fmt.width_step for width in shape):
                name = f"{param.id}-{shape[0]}x{shape[1]}"
                found.append(pytest.param(fmt, kernel, rounding, shape, id=name, marks=param.marks))
    return found


@pytest.mark.parametrize("last", ["gate_up", "down", "down_bias"])
@pytest.mark.parametrize(("fmt", "kernel", "rounding", "shape"), guard_params())
def test_reads_and_writes_nothing_past_the_end(
    fmt: Format, kernel: TileKernel, rounding: str, shape: tuple[int, int], last: str
) -> None:
    """An access past the end of any argument kills the process (prefetches may pass it)."""
    layout = EndingLayout(fmt, *shape, bias=True, last=last)
    bank = guarded(ending_bank(layout))
    for n_tokens, dtype in ((1, np.float32), (3, np.float32), (3, np.uint16), (17, np.float32)):
        given, routes, wanted, slack = ending_case(fmt, shape, n_tokens, dtype, act_of(kernel, rounding))
        out = guarded(np.empty_like(given))
        run(kernel, layout, bank, guarded(given), *map(guarded, routes), GPT_OSS, out=out, rounding=rounding)
        if dtype == np.float32:
            check_close(out, wanted, reference.ERROR_BOUND["fp32"], slack)
        else:
            check_close(bf16_to_fp32(out), wanted, 2.0**-8, slack)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Case:
    return make_case(formats.get("bf16"), (10, 18), False, SILU, 2)


def scalar(case: Case) -> TileKernel:
    return table(case.fmt)[0]


def test_refuses_a_bank_that_does_not_fit_the_layout(plain: Case) -> None:
    with pytest.raises(ValueError, match="records have"):
        ExpertLayer(plain.bank[:, :-64].copy(), plain.layout, scalar(plain))
    with pytest.raises(ValueError, match="records have"):
        ExpertLayer(plain.bank[:0], plain.layout, scalar(plain))


def test_refuses_an_unknown_activation(plain: Case) -> None:
    with pytest.raises(
        ValueError, match="unknown activation 'gelu', expected one of silu, silu_limited, swiglu_clamped"
    ):
        ExpertLayer(plain.bank, plain.layout, scalar(plain), "gelu")


def test_refuses_an_unknown_rounding(plain: Case) -> None:
    with pytest.raises(ValueError, match="unknown rounding 'fp4', expected one of none, bf16, fp8"):
        ExpertLayer(plain.bank, plain.layout, scalar(plain), rounding="fp4")


@pytest.mark.parametrize("rounding", ["bf16", "fp8"])
def test_refuses_to_round_before_an_int8_tile(rounding: str) -> None:
    layout = RecordLayout(formats.get("mxfp4"), 32, 32)
    kernel = next(kernel for kernel in table(layout.format) if kernel.act == "int8")
    with pytest.raises(ValueError, match=f"rounds activations to int8, not to {rounding}"):
        ExpertLayer(bank_of(layout), layout, kernel, rounding=rounding)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_threads": 0}, "n_threads is 0"),
        ({"weights": np.ones((2, 3), np.float32)}, "weights are 2 x 3, ids 2 x 2"),
        ({"x": np.ones((2, 12), np.float32)}, r"x is \(2, 12\)"),
        ({"out": np.ones((1, 10), np.float32)}, r"out \(1, 10\)"),
        ({"x": np.ones((2, 10), np.float64)}, "mismatch"),
        ({"x": np.ones((2, 10), np.float16)}, "buffer"),
        ({"out": np.ones((2, 10), np.uint16)}, "mismatch"),
        ({"ids": np.zeros((2, 2), np.int64)}, "mismatch"),
        ({"x": np.ones((10, 2), np.float32).T}, "contiguous"),
    ],
)
def test_refuses_wrong_arguments(plain: Case, change: dict[str, Any], message: str) -> None:
    ids, weights = plain.routes
    arguments = {"x": plain.x, "ids": ids, "weights": weights, "out": np.empty_like(plain.x), "n_threads": 1} | change
    layer = ExpertLayer(plain.bank, plain.layout, scalar(plain))
    with pytest.raises(ValueError, match=message):
        layer.run(scratch=Scratch(), **arguments)


def test_read_only_inputs_are_accepted(plain: Case) -> None:
    bank, x, (ids, weights) = plain.bank.copy(), plain.x.copy(), plain.routes
    for array in (bank, x):
        array.setflags(write=False)
    out = run(scalar(plain), plain.layout, bank, x, ids, weights)
    np.testing.assert_array_equal(out, run(scalar(plain), plain.layout, plain.bank, plain.x, ids, weights))


def test_scratch_grows_and_is_kept(plain: Case) -> None:
    scratch = Scratch()
    assert scratch.nbytes == 0
    run(scalar(plain), plain.layout, plain.bank, plain.x, *plain.routes, scratch=scratch)
    held = scratch.nbytes
    assert held > 0
    run(scalar(plain), plain.layout, plain.bank, plain.x[:1], *(r[:1] for r in plain.routes), scratch=scratch)
    assert scratch.nbytes == held


def test_a_tile_of_another_format_is_refused() -> None:
    """Its bytes would be read as something else."""
    layout = RecordLayout(formats.get("mxfp4"), 32, 32)
    bank = np.zeros((1, layout.nbytes), np.uint8)
    other = _tile_nvfp4.kernels()[0]
    with pytest.raises(ValueError, match="cannot read records of mxfp4"):
        ExpertLayer(bank, layout, other)
