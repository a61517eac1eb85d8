import numpy as np
import pytest
import torch

from freetoken.gpu.combine import combine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_weighted_sum(shards: int, ids_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    rng = np.random.default_rng(0)
    tokens, k, hidden = 5, 4, 1100
    ids = rng.integers(0, 9, (tokens, k))
    ids[0], ids[1, 1], ids[2, 3] = -1, 9, -5
    y = rng.standard_normal((shards, tokens * k, hidden)).astype(np.float32)
    weights = torch.from_numpy(rng.uniform(0, 1, (tokens, k)).astype(np.float32)).to(dtype)
    absent = (ids < 0) | (ids > 8)
    wanted = y.astype(np.float64).sum(0).reshape(tokens, k, hidden) * weights.double().numpy()[..., None]
    wanted = np.where(absent[..., None], 0, wanted).sum(1)
    y[:, absent.reshape(-1)] = np.nan
    weights[torch.from_numpy(absent)] = torch.nan
    out = torch.full((tokens, hidden), torch.nan, dtype=dtype, device=device)

    combine(torch.from_numpy(y).to(device), torch.from_numpy(ids).to(device, ids_dtype), weights.to(device), 9, out)

    rounding = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    error = np.abs(out.double().cpu().numpy() - wanted)
    assert (error <= np.abs(wanted) * rounding + 1e-6 * np.abs(wanted).max()).all()


def test_the_order_of_a_tokens_experts_decides(device: torch.device) -> None:
    """In float32, 1e8 + 1 is 1e8."""
    y = torch.tensor([1e8, 1, -1e8, 1e8, -1e8, 1], device=device)[None, :, None]
    ids = torch.tensor([[0, 1, 2], [2, 1, 0]], device=device)
    out = torch.empty(2, 1, device=device)

    combine(y.contiguous(), ids, torch.ones(2, 3, device=device), 3, out)

    assert out.tolist() == [[0], [1]]


def test_no_tokens(device: torch.device) -> None:
    combine(torch.empty(1, 0, 8), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2), 3, torch.empty(0, 8))


def test_refuses_what_does_not_fit() -> None:
    y, ids = torch.zeros(1, 4, 8), torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"y \(1, 4, 8\), ids \(2, 2\).*out \(3, 8\) do not fit"):
        combine(y, ids, torch.zeros(2, 2), 3, torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"weights has strides \(1, 2\)"):
        combine(y, ids, torch.zeros(2, 2).t(), 3, torch.zeros(2, 8))
