"""A layer of experts cut into shards gives what the whole one gives, on any machine: shards need no nodes.

Gate, up and the activation of a row do not change by cutting, to the bit. What changes is the order in which the
products of down are added in fp32, once for each output: far less than the bound of an fp32 tile function's own sums,
which is what is allowed here. Which threads work on which shard changes nothing at all.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from freetoken import formats
from freetoken.banks import Bank, ShardedBank
from freetoken.formats import Format
from freetoken.formats.codes import bf16_to_fp32, fp32_to_bf16
from freetoken.formats.record import RecordLayout, shard_bounds
from freetoken.kernels import reference
from freetoken.kernels._experts import ExpertLayer, Scratch
from freetoken.kernels._isa import TileKernel
from freetoken.kernels._shards import ShardedLayer
from tests.support.experts import (
    GPT_OSS,
    check_close,
    make_expert,
    make_routes,
    run,
    table,
    way_params,
)

BOUND = reference.ERROR_BOUND["fp32"]
HIDDEN, EXPERTS, TOKENS = 64, 4, 9
WAYS = pytest.mark.parametrize(("fmt", "kernel", "rounding"), way_params())


def banks(fmt: Format, width: int, parts: int, step: int = 1) -> tuple[Bank, ShardedBank]:
    """The same experts, with biases, whole and cut."""
    layout = RecordLayout(fmt, HIDDEN, width, bias=True)
    whole = Bank(layout, EXPERTS)
    shards = ShardedBank(layout, EXPERTS, shard_bounds(fmt, width, parts, step), (None,) * parts)
    for e in range(EXPERTS):
        expert = make_expert(fmt, HIDDEN, width, bias=True, seed=e)
        whole.put(e, expert)
        shards.put(e, expert)
    return whole, shards


def make_layer(bank: ShardedBank, kernel: TileKernel, teams: list[int], rounding: str = "none") -> ShardedLayer:
    how = GPT_OSS
    parts = [
        ExpertLayer(b.records, b.layout, kernel, how.activation, how.alpha, how.limit, rounding) for b in bank.shards
    ]
    return ShardedLayer(parts, teams, [()] * len(teams))


def run_shards(
    layer: ShardedLayer,
    x: NDArray[np.generic],
    routes: tuple[NDArray[np.int32], NDArray[np.float32]],
    n_threads: int,
    scratch: Scratch | None = None,
) -> NDArray[np.generic]:
    out = np.empty_like(x)
    out.view(np.uint8)[...] = 0xFF
    layer.run(x, *routes, out, scratch or Scratch(), n_threads)
    return out


def inputs() -> NDArray[np.float32]:
    return np.random.default_rng(5).standard_normal((TOKENS, HIDDEN)).astype(np.float32)


def widths(fmt: Format) -> list[tuple[int, int]]:
    """(width, parts): even, uneven, as many as there are granules, and one that ends within a granule."""
    g = fmt.granule
    ragged = {2: [(88, 3)], 128: [(404, 2), (404, 4)]}.get(fmt.block, [])
    return [(2 * g, 2), (5 * g, 3), (3 * g, 3), *ragged]


@WAYS
def test_shards_give_what_the_whole_gives(fmt: Format, kernel: TileKernel, rounding: str) -> None:
    routes = make_routes(TOKENS, 2, EXPERTS)
    for width, parts in widths(fmt):
        step = reference.FP8_GROUP if rounding == "fp8" else 1
        if -(-width // step) < parts:
            width = parts * step
        whole, shards = banks(fmt, width, parts, step)
        expected = run(kernel, whole.layout, whole.records, inputs(), *routes, GPT_OSS, rounding=rounding)
        layer = make_layer(shards, kernel, list(range(parts)), rounding)
        check_close(run_shards(layer, inputs(), routes, 2), expected.astype(np.float64), BOUND)


@WAYS
def test_same_bits_for_any_team(fmt: Format, kernel: TileKernel, rounding: str) -> None:
    """Also for teams of another size than planned, and for uneven ones."""
    _, shards = banks(fmt, 5 * fmt.granule, 3)
    routes, found = make_routes(TOKENS, 2, EXPERTS), set()
    for teams in ([0, 1, 2], [2, 1, 0, 1], [0, 0, 0, 0, 1, 2]):
        layer = make_layer(shards, kernel, teams, rounding)
        for n_threads in (1, 2, len(teams), 7):
            found.add(run_shards(layer, inputs(), routes, n_threads).tobytes())
    assert len(found) == 1


@WAYS
def test_same_bits_run_to_run_and_alone(fmt: Format, kernel: TileKernel, rounding: str) -> None:
    _, shards = banks(fmt, 5 * fmt.granule, 3)
    layer, scratch, x = make_layer(shards, kernel, [0, 1, 2], rounding), Scratch(), inputs()
    ids, weights = make_routes(TOKENS, 2, EXPERTS)
    first = run_shards(layer, x, (ids, weights), 3, scratch)
    for _ in range(5):
        np.testing.assert_array_equal(run_shards(layer, x, (ids, weights), 3, scratch), first)
    for t in range(TOKENS):
        alone = run_shards(layer, x[t : t + 1], (ids[t : t + 1], weights[t : t + 1]), 3, scratch)
        np.testing.assert_array_equal(alone, first[t : t + 1])


@pytest.fixture(params=["nvfp4", "mxfp4"])
def scalar(request: pytest.FixtureRequest) -> tuple[Format, TileKernel]:
    fmt = formats.get(request.param)
    return fmt, next(k for k in table(fmt) if k.level == "scalar" and k.act == "fp32")


def test_2880_over_four_nodes(scalar: tuple[Format, TileKernel]) -> None:
    fmt, kernel = scalar
    whole, shards = banks(fmt, 2880, 4)
    if fmt.granule == 32:
        assert [b.layout.intermediate // 32 for b in shards.shards] == [23, 23, 22, 22]
    routes = make_routes(TOKENS, 2, EXPERTS)
    expected = run(kernel, whole.layout, whole.records, inputs(), *routes, GPT_OSS)
    check_close(run_shards(make_layer(shards, kernel, [0, 1, 2, 3]), inputs(), routes, 4), expected, BOUND)


def test_bf16_is_rounded_once(scalar: tuple[Format, TileKernel]) -> None:
    fmt, kernel = scalar
    _, shards = banks(fmt, 5 * fmt.granule, 3)
    layer, routes = make_layer(shards, kernel, [0, 1, 2]), make_routes(TOKENS, 2, EXPERTS)
    x = fp32_to_bf16(inputs())
    wide = run_shards(layer, bf16_to_fp32(x), routes, 3)
    np.testing.assert_array_equal(run_shards(layer, x, routes, 3), fp32_to_bf16(wide))


def test_biases_count_once(scalar: tuple[Format, TileKernel]) -> None:
    """With an input and hidden values of zero, the output is the down bias."""
    fmt, kernel = scalar
    layout = RecordLayout(fmt, HIDDEN, 3 * fmt.granule, bias=True)
    bank = ShardedBank(layout, 1, shard_bounds(fmt, layout.intermediate, 3), (None,) * 3)
    expert = make_expert(fmt, HIDDEN, layout.intermediate, bias=True)
    assert expert.gate_bias is not None and expert.up_bias is not None
    expert.gate_bias[:], expert.up_bias[:] = 0, -1  # swiglu: gate * sigmoid * (up + 1)
    bank.put(0, expert)
    routes = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    out = run_shards(make_layer(bank, kernel, [0, 1, 2]), np.zeros((1, HIDDEN), np.float32), routes, 3)
    np.testing.assert_array_equal(out[0], expert.down_bias)


def test_routes_to_nowhere_and_none_at_all(scalar: tuple[Format, TileKernel]) -> None:
    fmt, kernel = scalar
    _, shards = banks(fmt, 2 * fmt.granule, 2)
    layer, x = make_layer(shards, kernel, [0, 1]), inputs()
    nowhere = np.full((TOKENS, 2), -1, np.int32), np.ones((TOKENS, 2), np.float32)
    none = np.empty((TOKENS, 0), np.int32), np.empty((TOKENS, 0), np.float32)
    for routes in (nowhere, none):
        assert not run_shards(layer, x, routes, 2).any()
    assert run_shards(layer, x[:0], (nowhere[0][:0], nowhere[1][:0]), 2).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("teams", "cpus"), [([0, 0], 2), ([0, 2], 2), ([0, 1], 3), ([], 0)], ids=["idle", "unknown", "masks", "none"]
)
def test_refuses_teams_that_leave_a_shard_out(scalar: tuple[Format, TileKernel], teams: list[int], cpus: int) -> None:
    fmt, kernel = scalar
    _, shards = banks(fmt, 2 * fmt.granule, 2)
    parts = [ExpertLayer(bank.records, bank.layout, kernel) for bank in shards.shards]
    with pytest.raises(ValueError, match="expected a thread for each"):
        ShardedLayer(parts, teams, [()] * cpus)


def test_refuses_shards_of_different_layers(scalar: tuple[Format, TileKernel]) -> None:
    fmt, kernel = scalar
    bank = Bank(RecordLayout(fmt, HIDDEN, 32), 2)
    other = Bank(RecordLayout(fmt, 2 * HIDDEN, 32), 2)
    fewer = Bank(bank.layout, 1)
    first = ExpertLayer(bank.records, bank.layout, kernel)
    for wrong in (
        ExpertLayer(other.records, other.layout, kernel),
        ExpertLayer(fewer.records, fewer.layout, kernel),
        ExpertLayer(bank.records, bank.layout, kernel, rounding="fp8"),
    ):
        with pytest.raises(ValueError, match="shards differ in"):
            ShardedLayer([first, wrong], [0, 1], [(), ()])


def test_refuses_wrong_arguments(scalar: tuple[Format, TileKernel]) -> None:
    fmt, kernel = scalar
    _, shards = banks(fmt, 2 * fmt.granule, 2)
    layer, (ids, weights) = make_layer(shards, kernel, [0, 1]), make_routes(TOKENS, 2, EXPERTS)
    for bad, message in (
        ((inputs()[:, :-1].copy(), ids, weights, 2), "x is"),
        ((inputs(), ids, weights[:-1], 2), "weights are"),
        ((inputs(), ids, weights, 0), "n_threads is 0"),
    ):
        x, some_ids, some_weights, n_threads = bad
        with pytest.raises(ValueError, match=message):
            layer.run(x, some_ids, some_weights, np.empty_like(x), Scratch(), n_threads)
