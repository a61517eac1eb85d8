"""The largest values of rows against torch.topk's."""

import math

import pytest
import torch

from freetoken.gpu.topk import is_known, topk

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 4, 4), (2, 5, 1), (3, 8, 2), (1, 32, 4), (8, 60, 6), (4, 128, 8), (1, 128, 4), (5, 160, 16), (2, 256, 8)]
SHAPES += [(7, 384, 10), (2, 512, 13), (1, 1000, 16), (3, 1024, 9)]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, -math.nan, 1.0, -1.0]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def expect(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By a stable sort: NaN is the largest, as torch's sort has it, and equals keep their order."""
    indices = x.cpu().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return bits(x).gather(-1, indices).view(x.dtype), indices


def check(x: torch.Tensor, k: int) -> None:
    values, indices = topk(x, k)
    assert values.dtype == x.dtype and indices.dtype == torch.int64
    assert values.is_contiguous() and indices.is_contiguous()
    wanted = expect(x, k)
    assert torch.equal(indices.cpu(), wanted[1])
    assert torch.equal(bits(values), bits(wanted[0]))
    theirs = x.cpu().topk(k).values
    assert torch.equal(values.cpu().nan_to_num(nan=7e4), theirs.nan_to_num(nan=7e4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_as_torch(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Numbers that are all different, of both signs, some of them subnormal."""
    generator = torch.Generator().manual_seed(n)
    every = torch.randperm(1 << 12, generator=generator)[: rows * n].view(rows, n)  # numbers, by their bits
    scale = 7 if dtype != torch.float32 else 7 << 16
    x = (every * scale).to(torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)
    x = torch.where(torch.rand(rows, n, generator=generator) < 0.7, -x, x).to(device)
    assert not x.isnan().any()

    check(x, k)

    values, indices = x.topk(k)
    assert torch.equal(topk(x, k)[0], values) and torch.equal(topk(x, k)[1], indices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_equals_and_what_is_no_number(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """NaN of both signs are equal and the largest, 0 and -0 are equal; the lower index comes first."""
    pick = torch.randint(len(SPECIAL), (rows, n), generator=torch.Generator().manual_seed(k))
    check(torch.tensor(SPECIAL, dtype=dtype)[pick].to(device), k)
    check(torch.full((rows, n), -math.inf, dtype=dtype, device=device), k)
    check(torch.full((rows, n), 0.5, dtype=dtype, device=device), k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_and_dimensions(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(6, 40, 9, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    for view in (
        x[..., 2:7],
        x[:, ::3, :],
        x.transpose(1, 2),
        x.permute(2, 0, 1),
        x[2, 3],
        x[:, :, :1].expand(6, 40, 4),
    ):
        check(view, 2)


def test_no_rows(device: torch.device) -> None:
    values, indices = topk(torch.empty(0, 8, device=device), 3)
    assert values.shape == indices.shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "k"),
    [
        (torch.zeros(()), 1),
        (torch.zeros(2, 1025), 2),
        (torch.zeros(2, 17), 17),
        (torch.zeros(2, 4), 5),
        (torch.zeros(2, 4), 0),
        (torch.zeros(2, 4, dtype=torch.float64), 2),
        (torch.zeros(2, 4, dtype=torch.int32), 2),
    ],
)
def test_what_is_left_to_torch(x: torch.Tensor, k: int) -> None:
    assert not is_known(x, k)
    with pytest.raises(ValueError, match=r"largest of x .*, expected 1 to 16 of at most 1024 .* use torch.topk"):
        topk(x, k)


def test_is_an_operator(device: torch.device) -> None:
    """As torch.library wants one, which inductor and others take as it is."""
    torch.library.opcheck(
        torch.ops.freetoken.topk.default,
        (torch.randn(2, 8, device=device), 3),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_graph_finds_what_is_there_when_it_runs(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 128, dtype=dtype, device="cuda")
    topk(x, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, indices = topk(x, 4)
    for seed in range(3):
        x.copy_(torch.randn(2, 128, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        wanted = expect(x, 4)
        assert torch.equal(values.cpu(), wanted[0]) and torch.equal(indices.cpu(), wanted[1])
