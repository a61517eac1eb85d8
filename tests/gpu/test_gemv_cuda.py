"""Units' products in CUDA C, on a twin of the device in C++ and, where there is one, on the device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from freetoken import formats
from freetoken.device.cuda import CudaDevice
from freetoken.errors import UnsupportedError
from freetoken.executor import Activation
from freetoken.formats.codes import E2M1, E4M3, E8M0, pack_nibbles
from freetoken.formats.record import Expert, RecordLayout, shard_bounds
from freetoken.gpu.gemv_cuda import DEFAULT, CudaGemv, Shape
from freetoken.gpu.units import Units
from freetoken.kernels import reference
from tests.support.cuda_twin import COMPILER, TwinDevice
from tests.support.experts import make_bank, make_expert
from tests.support.guard import guarded

SILU = Activation()
GPT_OSS = Activation("swiglu_clamped", 1.702, 7.0)
DEEPSEEK_V4 = Activation("silu_limited", limit=2.0)
BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 4e-3}
"""Largest error of a route's output, relative to its norm."""
SMALL = Shape(warps=4, depth=3, tiles=2, resident=2, own=0)
OWN = Shape(warps=5, depth=2, tiles=2, resident=3, own=8, down_depth=4, units=1)
"""Blocks prepare vectors themselves."""


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> TwinDevice:
    if COMPILER is None:
        pytest.skip("needs g++")
    return TwinDevice(tmp_path_factory.mktemp("twin"))


@pytest.fixture(params=["twin", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device, and where tensors are for it."""
    if request.param == "twin":
        yield request.getfixturevalue("twin"), torch.device("cpu")
        return
    device = CudaDevice()
    yield device, device.torch_device
    device.close()


class Case:
    """Experts on a device, and routes that use them."""

    def __init__(self, machine: tuple[Any, torch.device], layout: RecordLayout, records: NDArray[np.uint8]) -> None:
        self.device, self.place = machine
        self.layout = layout
        # each ends where memory does, so that a byte too far kills the process
        self.records = [torch.from_numpy(guarded(record)).to(self.place) for record in records]

    def units(self, *routes: list[int] | None, expert: list[int] | None = None) -> Units:
        """A unit for each list of routes, of the experts in turn or as given; None is no unit."""
        owner = iter(range(len(self.records)) if expert is None else expert)
        address, route = np.zeros(len(routes), np.int64), np.full((len(routes), 8), -1, np.int32)
        for i, mine in enumerate(routes):
            if mine is not None:
                address[i] = self.records[next(owner)].data_ptr()
                route[i, : len(mine)] = mine
        return Units(torch.from_numpy(address).to(self.place), torch.from_numpy(route).to(self.place))

    def run(
        self, gemv: CudaGemv, x: torch.Tensor, units: Units, k: int, offset: int = 0
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What both products wrote, in rows that were NaN before."""
        h = torch.full((len(x) * k, gemv.layout.intermediate), float("nan"), device=self.place)
        y = torch.full((len(x) * k, gemv.layout.hidden), float("nan"), device=self.place)
        gemv.gate_up(x.to(self.place), units, k, h, offset)
        gemv.down(h, units, y, offset)
        return h.cpu().double().numpy(), y.cpu().double().numpy()


def check(y: NDArray[np.float64], wanted: dict[int, NDArray[np.float64]], bound: float) -> None:
    """Rows are what is wanted, and others were not written."""
    for row in range(len(y)):
        if row in wanted:
            error = np.linalg.norm(y[row] - wanted[row]) / np.linalg.norm(wanted[row])
            assert error <= bound, f"route {row}: {error}"
        else:
            assert np.isnan(y[row]).all(), f"route {row} was written"


def expect(layout: RecordLayout, record: NDArray[np.uint8], x: torch.Tensor, how: Activation) -> NDArray[np.float64]:
    return reference.run_expert(layout.unpack(record), x.double().numpy()[None], how.kind, how.alpha, how.limit)[0]


WIDTHS = [(name, h, i) for name in formats.names() if name != "ds_fp4" for h, i in ((192, 160), (320, 96))]
WIDTHS += [("bf16", 144, 88), ("fp8_block", 144, 88), ("fp8_block", 264, 300), ("bf16", 34, 22), ("nvfp4", 48, 16)]
WIDTHS += [("ds_fp4", 96, 64)]


CASES = [
    (*widths, dtype, shape) for widths in WIDTHS for dtype, shape in ((torch.bfloat16, OWN), (torch.float32, SMALL))
]
CASES += [(*widths, torch.bfloat16, SMALL) for widths in WIDTHS[::4]]
CASES += [(*widths, torch.float32, OWN) for widths in WIDTHS[1::4]]


@pytest.mark.parametrize(("name", "hidden", "intermediate", "dtype", "shape"), CASES)
def test_units_are_as_the_reference(
    machine: Any, name: str, hidden: int, intermediate: int, dtype: torch.dtype, shape: Shape
) -> None:
    bias, how = (True, GPT_OSS) if hidden % 64 == 0 else (False, DEEPSEEK_V4)
    layout = RecordLayout(formats.get(name), hidden, intermediate, bias)
    records = make_bank(layout, 3)
    case = Case(machine, layout, records)
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(hidden)).to(dtype)
    routes = [0, 2, 5, 6, 8], None, [3], [1, 7]
    units = case.units(*routes)

    _, y = case.run(CudaGemv(case.device, layout, how, dtype, shape), x, units, 2)

    owner = {route: e for e, mine in enumerate(mine for mine in routes if mine) for route in mine}
    check(y, {r: expect(layout, records[e], x[r // 2], how) for r, e in owner.items()}, BOUND[dtype])


@pytest.mark.parametrize("shape", [replace(DEFAULT, own=0), DEFAULT], ids=["prepared", "own"])
@pytest.mark.parametrize(("name", "hidden", "intermediate"), [("mxfp4", 2880, 640), ("nvfp4", 640, 2880)])
def test_widths_of_models(machine: Any, name: str, hidden: int, intermediate: int, shape: Shape) -> None:
    layout = RecordLayout(formats.get(name), hidden, intermediate, True)
    records = make_bank(layout, 1)
    case = Case(machine, layout, records)
    x = torch.randn(2, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()

    _, y = case.run(CudaGemv(case.device, layout, GPT_OSS, shape=shape), x, case.units([0, 1]), 1)

    check(y, {r: expect(layout, records[0], x[r], GPT_OSS) for r in range(2)}, 4e-3)


@pytest.mark.parametrize("shape", [Shape(4, 3, 1, 1), Shape(8, 2, 2, 1), Shape(4, 4, 4, 64), OWN])
@pytest.mark.parametrize("name", ["mxfp4", "fp8_block"])
def test_bits_do_not_depend_on_companions_or_on_tiles_of_a_block(machine: Any, name: str, shape: Shape) -> None:
    layout = RecordLayout(formats.get(name), 256, 176 if name == "fp8_block" else 160, True)
    records = make_bank(layout, 1)
    case = Case(machine, layout, records)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    gemv = CudaGemv(case.device, layout, GPT_OSS, shape=shape)
    tall = CudaGemv(case.device, layout, GPT_OSS, shape=replace(shape, resident=1000))

    alone = [case.run(gemv, x[r : r + 1], case.units([0]), 1) for r in range(8)]
    together = case.run(tall, x, case.units([7, 0, 1, 2, 3, 4, 5, 6]), 1)

    for part in range(2):
        np.testing.assert_array_equal(together[part], np.concatenate([one[part] for one in alone]))


@pytest.mark.parametrize("shape", [SMALL, OWN], ids=["prepared", "own"])
def test_one_token_with_several_routes_of_an_expert(machine: Any, shape: Shape) -> None:
    """One vector at a time, each time over all of the record."""
    layout = RecordLayout(formats.get("nvfp4"), 320, 96, True)
    records = make_bank(layout, 2)
    case = Case(machine, layout, records)
    x = torch.randn(1, 320, generator=torch.Generator().manual_seed(5)).bfloat16()

    _, y = case.run(CudaGemv(case.device, layout, GPT_OSS, shape=shape), x, case.units([0, 2, 3], [1]), 4)

    check(y, {r: expect(layout, records[int(r == 1)], x[0], GPT_OSS) for r in range(4)}, 4e-3)


@pytest.mark.parametrize("shape", [SMALL, OWN], ids=["prepared", "own"])
@pytest.mark.parametrize("at", [3, 300, 600, 1100, 2047])
def test_one_activation_far_larger_than_the_others(machine: Any, shape: Shape, at: int) -> None:
    """Wherever it is, and whichever warp reads it: the power of two that a vector counts from is of its largest."""
    layout = RecordLayout(formats.get("mxfp4"), 2048, 32)
    records = make_bank(layout, 1)
    case = Case(machine, layout, records)
    x = torch.randn(1, 2048, generator=torch.Generator().manual_seed(6))
    x[0, at] = 1e6

    _, y = case.run(CudaGemv(case.device, layout, GPT_OSS, shape=shape), x.bfloat16(), case.units([0]), 1)

    check(y, {0: expect(layout, records[0], x[0].bfloat16(), GPT_OSS)}, 4e-3)


def hidden_values(expert: Expert, x: torch.Tensor, how: Activation) -> NDArray[np.float64]:
    gate, up = (x.double().numpy() @ matrix.format.dequantize64(matrix).T for matrix in (expert.gate, expert.up))
    return reference.activate(gate, up, how.kind, how.alpha, how.limit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "q4_0", "q8_0", "fp8_block", "bf16"])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_activations_of_any_size(machine: Any, name: str, dtype: torch.dtype, size: float) -> None:
    layout = RecordLayout(formats.get(name), 128, 64)
    expert = make_expert(layout.format, 128, 64)
    expert = replace(expert, down=layout.format.quantize(np.eye(128, 64, dtype=np.float32)))
    records = np.empty((1, layout.nbytes), np.uint8)
    layout.pack(expert, records[0])
    case = Case(machine, layout, records)
    x = (torch.randn(3, 128, generator=torch.Generator().manual_seed(3)) * torch.tensor([[size], [0], [1]])).to(dtype)
    # within the limit gate and up are as they are: at 1e30 their product is none that fp32 has, so up is clamped
    how = Activation("silu_limited", limit=3e4)

    h, y = case.run(CudaGemv(case.device, layout, how, dtype, SMALL), x, case.units([0, 1, 2]), 1)

    hidden = hidden_values(expert, x, how)
    if size > 1:  # 1e-30 squared is zero in fp32
        check(h[:1], {0: hidden[0]}, BOUND[dtype])
        check(y[:1], {0: expect(layout, records[0], x[0], how)}, BOUND[dtype])
    else:
        assert not h[0].any() and not y[0].any()
    assert not h[1].any() and not y[1].any()
    check(y[2:], {0: expect(layout, records[0], x[2], how)}, BOUND[dtype])


def down_rows(machine: Any, layout: RecordLayout, expert: Expert, dtype: torch.dtype) -> NDArray[np.float64]:
    """(H, I) what down multiplies unit vectors by: its weights, one by one."""
    records = np.empty((1, layout.nbytes), np.uint8)
    layout.pack(expert, records[0])
    case = Case(machine, layout, records)
    n = layout.intermediate
    h = torch.eye(n, device=case.place)
    y = torch.full((n, layout.hidden), float("nan"), device=case.place)
    units = case.units(*np.arange(n).reshape(-1, 8).tolist(), expert=[0] * (n // 8))
    CudaGemv(case.device, layout, SILU, dtype, SMALL).down(h, units, y)
    return y.cpu().double().numpy().T


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_every_code_under_every_scale_is_exact(machine: Any, name: str) -> None:
    fmt = formats.get(name)
    layout = RecordLayout(fmt, 256, 64)
    expert = make_expert(fmt, 256, 64)
    codes = np.tile(pack_nibbles(np.arange(64, dtype=np.uint8)[None] % 16), (256, 1))
    scales = (
        np.arange(256, dtype=np.uint8) if name == "mxfp4" else np.minimum(np.arange(256) // 2, 126).astype(np.uint8)
    )
    scales[255 if name == "mxfp4" else 254 :] = 0x7F if name == "mxfp4" else 0x80  # no number; minus zero
    down = replace(expert.down, codes=codes, scales=np.repeat(scales[:, None], 64 // fmt.block, 1), global_scale=1.0)

    found = down_rows(machine, layout, replace(expert, down=down), torch.bfloat16)

    values = (E8M0 if name == "mxfp4" else E4M3)[scales].astype(np.float64)[:, None] * E2M1[np.arange(64) % 16]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, values.astype(np.float32))  # 6 * 2^127 is none that fp32 has


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "fp8_block", "bf16"])
def test_weights_are_exact(machine: Any, name: str) -> None:
    fmt = formats.get(name)
    layout = RecordLayout(fmt, 64, 128)
    expert = make_expert(fmt, 64, 128)
    codes = np.arange(expert.down.codes.size, dtype=np.uint32).astype(np.uint8).reshape(expert.down.codes.shape)
    if name == "fp8_block":
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    if name == "bf16":
        bits = np.arange(64 * 128, dtype=np.uint16) * 7
        codes = np.where((bits & 0x7F80) == 0x7F80, np.uint16(0), bits).view(np.uint8).reshape(64, -1)
    scales = expert.down.scales
    if fmt.scale_dtype is np.uint16:
        scales = (np.arange(64 * 4, dtype=np.uint16) * 119).reshape(64, 4)  # subnormal ones, too
    down = replace(expert.down, codes=codes, scales=scales)

    found = down_rows(machine, layout, replace(expert, down=down), torch.bfloat16)

    np.testing.assert_array_equal(found, fmt.dequantize32(down))


@pytest.mark.parametrize("divides", [False, True])
def test_globals_of_both_directions(machine: Any, divides: bool) -> None:
    layout = RecordLayout(formats.get("nvfp4"), 64, 64)
    expert = make_expert(layout.format, 64, 64)
    parts = {name: replace(getattr(expert, name), divides=divides, global_scale=factor) for name, factor in
             (("gate", 0.037), ("up", 3.1), ("down", 0.11))}  # fmt: skip
    records = np.empty((1, layout.nbytes), np.uint8)
    layout.pack(replace(expert, **parts), records[0])
    case = Case(machine, layout, records)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(4)) / 256

    _, y = case.run(CudaGemv(case.device, layout, SILU, torch.float32, SMALL), x, case.units([0]), 1)

    check(y, {0: expect(layout, records[0], x[0], SILU)}, 1e-5)


def test_shards_of_a_slot_add_up(machine: Any) -> None:
    fmt = formats.get("mxfp4")
    whole = RecordLayout(fmt, 96, 160, True)
    expert = make_expert(fmt, 96, 160, bias=True)
    bounds = shard_bounds(fmt, 160, 2)
    layouts = [RecordLayout(fmt, 96, stop - start, True) for start, stop in bounds]
    slot = np.empty(sum(layout.nbytes for layout in layouts), np.uint8)
    offsets = np.cumsum([0, *(layout.nbytes for layout in layouts)])
    for layout, (start, stop), offset in zip(layouts, bounds, offsets, strict=False):
        layout.pack(expert.shard(start, stop), slot[offset : offset + layout.nbytes])
    case = Case(machine, whole, slot[None])
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(5))

    parts = [
        case.run(CudaGemv(case.device, layout, GPT_OSS, torch.float32, SMALL), x, case.units([1]), 1, int(offset))[1]
        for layout, offset in zip(layouts, offsets, strict=False)
    ]

    wanted = reference.run_expert(expert, x[1:].double().numpy(), GPT_OSS.kind, GPT_OSS.alpha, GPT_OSS.limit)[0]
    check(sum(parts), {1: wanted}, 1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [SMALL, OWN], ids=["prepared", "own"])
def test_more_routes_than_fit_at_once_and_rows_that_are_not_aligned(machine: Any, shape: Shape) -> None:
    layout = RecordLayout(formats.get("mxfp4"), 4096, 32)
    records = make_bank(layout, 1)
    case = Case(machine, layout, records)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(8 * 4096 + 1, generator=torch.Generator().manual_seed(6)).to(dtype)[1:].reshape(8, 4096)
        unaligned = torch.empty(x.numel() + 1, dtype=dtype, device=case.place)[1:].reshape(8, 4096).copy_(x)
        h = torch.full((8, 32), float("nan"), device=case.place)
        y = torch.full((8, 4096), float("nan"), device=case.place)
        gemv, units = CudaGemv(case.device, layout, SILU, dtype, shape), case.units([5, 4, 3, 2, 1, 0, 6, 7])
        gemv.gate_up(unaligned, units, 1, h)
        gemv.down(h, units, y)
        check(y.cpu().double().numpy(), {r: expect(layout, records[0], x[r], SILU) for r in range(8)}, BOUND[dtype])


@pytest.mark.parametrize("shape", [SMALL, OWN], ids=["prepared", "own"])
def test_what_is_not_a_number_stays_in_its_route(machine: Any, shape: Shape) -> None:
    layout = RecordLayout(formats.get("mxfp4"), 64, 32, True)
    records = make_bank(layout, 1)
    case = Case(machine, layout, records)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    x[1, 5] = float("nan")

    _, y = case.run(CudaGemv(case.device, layout, GPT_OSS, shape=shape), x, case.units([0, 1, 2]), 1)

    check(y, {r: expect(layout, records[0], x[r], GPT_OSS) for r in (0, 2)}, 4e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["mxfp4", "bf16"])
def test_bits_do_not_depend_on_who_prepares_vectors(machine: Any, name: str, dtype: torch.dtype) -> None:
    layout = RecordLayout(formats.get(name), 96, 64, True)
    case = Case(machine, layout, make_bank(layout, 2))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(8)).to(dtype)
    x[1] *= 1e-6

    found = [
        case.run(CudaGemv(case.device, layout, GPT_OSS, dtype, replace(SMALL, own=own)), x, case.units([0, 2], [1]), 1)
        for own in (2, 3)
    ]

    for part in range(2):
        np.testing.assert_array_equal(found[0][part], found[1][part])


@pytest.mark.parametrize("shape", [replace(SMALL, resident=1), replace(SMALL, depth=4, resident=32)])
def test_more_units_than_blocks_and_units_without_routes(machine: Any, shape: Shape) -> None:
    layout = RecordLayout(formats.get("nvfp4"), 64, 80)
    records = make_bank(layout, 2)
    case = Case(machine, layout, records)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    routes: list[list[int] | None] = [None, [], *([r] for r in range(33)), None, [], [33, 34], [39]]
    owner = [i % 2 for i, mine in enumerate(mine for mine in routes if mine is not None)]

    _, y = case.run(CudaGemv(case.device, layout, SILU, shape=shape), x, case.units(*routes, expert=owner), 1)

    of = zip(owner, (mine for mine in routes if mine is not None), strict=True)
    wanted = {r: expect(layout, records[e], x[r], SILU) for e, mine in of for r in mine}
    check(y, wanted, 4e-3)


def test_tensors_are_checked(twin: TwinDevice) -> None:
    layout = RecordLayout(formats.get("mxfp4"), 64, 32)
    gemv = CudaGemv(twin, layout, SILU)  # type: ignore[arg-type]
    units = Units(torch.zeros(1, dtype=torch.int64), torch.full((1, 8), -1, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"x is torch.float32, expected torch.bfloat16"):
        gemv.gate_up(torch.zeros(1, 64), units, 1, torch.zeros(1, 32))
    with pytest.raises(ValueError, match=r"out is \(1, 33\) .* expected \(.., 32\)"):
        gemv.gate_up(torch.zeros(1, 64).bfloat16(), units, 1, torch.zeros(1, 33))
    with pytest.raises(ValueError, match=r"h is \(2, 32\) with strides \(1, 2\)"):
        gemv.down(torch.zeros(32, 2).T, units, torch.zeros(2, 64))
    with pytest.raises(TypeError, match=r"x is to be torch.int8, expected one of torch.bfloat16"):
        CudaGemv(twin, layout, SILU, torch.int8)  # type: ignore[arg-type]


def test_devices_that_are_too_old_are_refused(twin: TwinDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "architecture", "sm_75", raising=False)
    with pytest.raises(UnsupportedError, match=r"sm_75, older than sm_80: use TritonGemv"):
        CudaGemv(twin, RecordLayout(formats.get("mxfp4"), 64, 32), SILU)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_captured_graph_computes_with_what_is_there_when_it_runs() -> None:
    device = CudaDevice()
    layout = RecordLayout(formats.get("mxfp4"), 256, 128, True)
    records = make_bank(layout, 2)
    case = Case((device, device.torch_device), layout, records)
    gemv = CudaGemv(device, layout, GPT_OSS, shape=SMALL)
    x = torch.zeros(2, 256, dtype=torch.bfloat16, device=case.place)
    h, y = torch.zeros(2, 128, device=case.place), torch.zeros(2, 256, device=case.place)
    units = case.units([0], [1])

    def work() -> None:
        gemv.gate_up(x, units, 1, h)
        gemv.down(h, units, y)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            work()
    for seed in range(3):
        given = torch.randn(2, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
        x.copy_(given)
        y.fill_(float("nan"))
        graph.replay()
        check(y.cpu().double().numpy(), {r: expect(layout, records[r], given[r], GPT_OSS) for r in range(2)}, 4e-3)
    device.close()


@pytest.mark.gpu
@pytest.mark.parametrize(("own", "tokens"), [(0, 2), (4, 1), (4, 2)])
def test_what_the_kernel_just_before_writes(own: int, tokens: int) -> None:
    """Late, when what comes next has begun: no product may use units or x from before it."""
    device = CudaDevice()
    layout = RecordLayout(formats.get("mxfp4"), 256, 128, True)
    records = make_bank(layout, 2)
    case = Case((device, device.torch_device), layout, records)
    gemv = CudaGemv(device, layout, GPT_OSS, shape=replace(DEFAULT, own=own))
    (change,) = device.compile(
        """extern "C" __global__ void change(long long *address, unsigned short *x, int n) {
        #if __CUDA_ARCH__ >= 900
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        #endif
            const long long end = clock64() + 100000, first = address[0];
            while (clock64() < end) {}
            address[0] = address[1];
            address[1] = first;
            for (int i = 0; i < n; i++) x[i] ^= 0x8000;
        }""",
        "change",
    )
    given = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    x, units = given.to(case.place), case.units([0], [1] if tokens == 2 else [])
    h, y = torch.zeros(tokens, 128, device=case.place), torch.zeros(8, tokens, 256, device=case.place)

    def work() -> None:
        for out in y:
            change(units.address.data_ptr(), x.data_ptr(), ctypes.c_int(x.numel()))
            gemv.gate_up(x, units, 1, h, early=True)
            gemv.down(h, units, out)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    for turn, out in enumerate(y.cpu().double().numpy()):
        now = given if turn % 2 else -given
        check(out, {r: expect(layout, records[(r + turn + 1) % 2], now[r], GPT_OSS) for r in range(tokens)}, 4e-3)
    device.close()
