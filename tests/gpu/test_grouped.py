import numpy as np
import pytest
import torch

from freetoken import formats
from freetoken.formats.record import RecordLayout
from freetoken.gpu.grouped import GroupedProduct, hidden_dtype, sort_routes
from tests.gpu.test_gemv import extreme_experts
from tests.support.experts import make_routes
from tests.support.gpu import ACTIVATIONS, FAR, HALF, Experts, check_rows, widths

BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 4e-3}
"""Of one product. fp32: sums of a few thousand products. Else: roundings to bf16, of h and in q4_0 and q8_0 of weights,
of 2**-8 at most and 1.6e-3 on average."""


def run(experts, how, x, ids, address=None):  # type: ignore[no-untyped-def]
    """Hidden values (positions), outputs (routes), and the order; what is not written is NaN."""
    device, layout = x.device, experts.layout
    address = experts.address if address is None else address
    order, starts = sort_routes(torch.from_numpy(ids).to(device), len(address))
    h = torch.full((ids.size, layout.intermediate), torch.nan, dtype=hidden_dtype(x.dtype), device=device)
    y = torch.full((ids.size, layout.hidden), torch.nan, device=device)
    product = GroupedProduct(layout, how)
    product.gate_up(x, order, starts, address, ids.shape[1], h, FAR)
    product.down(h, starts, address, order, y, FAR)
    return h, y, order.cpu().numpy()


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", formats.names())
def test_agrees_with_the_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    fmt = formats.get(name)
    how = list(ACTIVATIONS.values())[len(name) % 3]
    experts = Experts.random(RecordLayout(fmt, *widths(fmt), bias=dtype != torch.float16), 6, device)
    ids, _ = make_routes(21, 2, 5)  # none for expert 5
    ids[3] = -1, 6
    ids[7, 0] = 1 << 20
    x = torch.randn(21, experts.layout.hidden, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x[3] = torch.nan
    address = experts.address.clone()
    address[2] = 0
    ids_there = np.where((ids < 6) & (ids != 2), ids, -1)

    h, y, order = run(experts, how, x, ids, address)

    check_rows(h, experts.hidden(x, ids_there, how)[order], BOUND[dtype])
    by_route = np.empty(h.shape)
    by_route[order] = h.double().cpu().numpy()
    check_rows(y, experts.output(by_route, ids_there), BOUND[dtype])


@pytest.mark.parametrize("name", formats.names())
def test_extreme_codes_are_exact(name: str, device: torch.device) -> None:
    """Where products are exact: activations of bf16 are."""
    fmt = formats.get(name)
    for experts, size in extreme_experts(fmt, device):
        x = (torch.randn(3, experts.layout.hidden, generator=torch.Generator().manual_seed(1)) * size).to(
            torch.bfloat16
        )
        ids = np.zeros((3, 1), np.int32)
        h, _, _ = run(experts, HALF, x.float().to(device), ids)
        check_columns(h, experts.hidden(x.float(), ids, HALF), 1e-5)
        h, _, _ = run(experts, HALF, x.to(device), ids)
        check_columns(h, experts.hidden(x.float(), ids, HALF), 6e-3)


def check_columns(out, wanted, bound):  # type: ignore[no-untyped-def]
    """Each row of weights makes a column, and has a size of its own. Bound of the column's norm, which bf16 rounds."""
    error = np.linalg.norm(out.double().cpu().numpy() - wanted, axis=0)
    assert (error <= bound * np.linalg.norm(wanted, axis=0)).all(), error / np.linalg.norm(wanted, axis=0)


@pytest.mark.parametrize(("tokens", "k", "n_experts"), [(1, 1, 1), (1, 4, 512), (150, 1, 2)])
def test_counts(tokens: int, k: int, n_experts: int, device: torch.device) -> None:
    """One route alone; most experts without any; more routes than a program has columns."""
    layout = RecordLayout(formats.get("mxfp4"), 64, 32)
    few = Experts.random(layout, min(n_experts, 3), device)
    spread = np.arange(n_experts) % len(few.bank)
    experts = Experts(layout, few.bank[spread], few.records, few.address[torch.from_numpy(spread).to(device)])
    ids, _ = make_routes(tokens, k, n_experts)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)

    h, y, order = run(experts, ACTIVATIONS["silu"], x, ids)

    check_rows(h, experts.hidden(x, ids, ACTIVATIONS["silu"])[order], 4e-3)
    assert not y.isnan().any()


def test_no_tokens(device: torch.device) -> None:
    experts = Experts.random(RecordLayout(formats.get("mxfp4"), 32, 32), 1, device)

    h, y, _ = run(experts, ACTIVATIONS["silu"], torch.empty(0, 32, device=device), np.empty((0, 2), np.int32))

    assert h.shape == (0, 32) and y.shape == (0, 32)


def test_sorted_routes(device: torch.device) -> None:
    ids = torch.tensor([[3, 0], [-1, 3], [1, 4]], device=device)

    order, starts = sort_routes(ids.t().contiguous().t(), 4)

    assert order.tolist() == [1, 4, 0, 3, 2, 5]
    assert starts.tolist() == [0, 1, 2, 2, 4]
    assert order.dtype == starts.dtype == torch.int32


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    experts = Experts.random(RecordLayout(formats.get("mxfp4"), 64, 32), 2, device)
    product = GroupedProduct(experts.layout, ACTIVATIONS["silu"])
    order, starts = sort_routes(torch.zeros(3, 1, dtype=torch.int32, device=device), 2)
    x = torch.zeros(3, 64, device=device)
    with pytest.raises(ValueError, match=r"x is \(3, 32\).*expected contiguous rows of 64"):
        product.gate_up(x[:, :32], order, starts, experts.address, 1, torch.empty(3, 32, device=device))
    with pytest.raises(TypeError, match=r"out is torch\.bfloat16, expected torch\.float32"):
        product.gate_up(x, order, starts, experts.address, 1, x[:, :32].contiguous().bfloat16())
    with pytest.raises(ValueError, match="3 routes, 3 rows for 1 each, 2 starts of 2 experts and 3 rows of output"):
        product.gate_up(x, order, starts[:2], experts.address, 1, x[:, :32].contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp4", "bf16"])
def test_many_tokens_and_experts(name: str, device: torch.device) -> None:
    """10,000 tokens, 512 experts, an output of more than 2**31 values, against float64 on the device."""
    layout = RecordLayout(formats.get(name), 2880, 64, bias=True)
    few = Experts.random(layout, 4, device)
    spread = np.arange(512) % 4
    experts = Experts(layout, few.bank[spread], few.records, few.address[torch.from_numpy(spread).to(device)])
    ids = np.random.default_rng(0).integers(0, 512, (10_000, 75)).astype(np.int32)
    x = torch.randn(10_000, 2880, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)

    h, y, order = run(experts, ACTIVATIONS["silu"], x, ids)

    assert y.numel() > 1 << 31
    some = np.arange(len(order))[::997]
    tokens = order[some] // 75
    rows = experts.hidden(
        x[torch.from_numpy(tokens).to(device)], ids.reshape(-1)[order[some], None], ACTIVATIONS["silu"]
    )
    check_rows(h[torch.from_numpy(some).to(device)], rows, 4e-3)
    wanted = experts.output(
        h[torch.from_numpy(some).to(device)].double().cpu().numpy(), ids.reshape(-1)[order[some], None]
    )
    check_rows(y[torch.from_numpy(order[some]).to(device)], wanted, 4e-3)
