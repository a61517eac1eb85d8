"""Attention of one token against float64, and against transformers' own in the model's type."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral

from freetoken.gpu import attention
from freetoken.gpu.attention import attend

BOUND = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of the norm: for bf16 and fp16 the rounding of the result, and that of probabilities, which averages out."""
LEAST = {dtype: torch.finfo(dtype).min for dtype in attention.DTYPES}
GROUPS = [1, 3, 8, 16]


def make(
    rows: int, group: int, columns: int, width: int, dtype: torch.dtype, wide: int = 0, kv_heads: int = 2
) -> list[torch.Tensor]:
    """Query, key, value as a cache and a projection have them: views, behind and between other bytes."""
    random = torch.Generator().manual_seed(group * columns + width)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    wide = wide or width
    query = draw(rows, 1, kv_heads * group, width).transpose(1, 2)
    key, value = (draw(rows + 1, kv_heads, columns + 3, n)[:rows, :, :columns] for n in (width, wide))
    return [query, key, value]


def hide(mask: torch.Tensor) -> torch.Tensor:
    """What is added, (B, 1, 1, C), to hide what is False (B, C)."""
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)[:, None, None]


def exact(query: Any, key: Any, value: Any, added: Any, sinks: Any, scaling: float, softcap: float = 0.0) -> Any:
    """In float64; a row that sees nothing is zeros."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = query.double() @ key.mT * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + added.double()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(len(query), -1, 1, 1)], -1)
    shares = scores.softmax(-1).nan_to_num(0)[..., : key.shape[2]]
    return (shares @ value).transpose(1, 2)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.cpu().double() - wanted).norm() / wanted.norm())


def check(
    tensors: list[torch.Tensor],
    visible: torch.Tensor,
    device: torch.device,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    slices: int | None = None,
) -> torch.Tensor:
    """Against float64, whatever lies in columns that are hidden. visible: (B, C) bool."""
    query, key, value = tensors
    dtype, scaling = query.dtype, query.shape[-1] ** -0.5
    hidden = ~visible[:, None, :, None]
    wanted = exact(
        query, key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), hide(visible), sinks, scaling, softcap
    )
    for x in (key, value):
        x.masked_fill_(hidden, torch.nan)
    mask = hide(visible).clamp(min=LEAST[dtype]).to(dtype)
    on = [x if x is None else x.to(device) for x in (*tensors, mask, sinks)]
    found = attend(*on, scaling, softcap, slices)
    assert found.shape == wanted.shape and found.dtype == dtype and found.is_contiguous()
    assert error(found, wanted) <= BOUND[dtype]
    return found


def window(rows: int, columns: int, column: int, size: int | None = None) -> torch.Tensor:
    """What a token at a column sees: of a window, without padding, of which each row has one more on the left."""
    at = torch.arange(columns)
    seen = (at <= column) & (at > column - (size or columns)) & (at >= torch.arange(rows)[:, None])
    return seen | (at == column)


@pytest.mark.parametrize("dtype", attention.DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_groups_and_sinks(group: int, dtype: torch.dtype, device: torch.device) -> None:
    for sinks in (None, torch.randn(2 * group, generator=torch.Generator().manual_seed(1)).to(dtype)):
        check(make(1, group, 150, 64, dtype), window(1, 150, 120), device, sinks, slices=2)


@pytest.mark.parametrize("width", [24, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", attention.DTYPES, ids=str)
def test_widths(width: int, dtype: torch.dtype, device: torch.device) -> None:
    for wide in (width, 16):
        check(make(1, 4, 70, width, dtype, wide, kv_heads=1), window(1, 70, 66), device, slices=2)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("slices", [None, 1, 2])
def test_rows_and_slices(rows: int, slices: int | None, device: torch.device) -> None:
    """Lengths that are no multiples of a block, and slices that there are not."""
    sinks = torch.linspace(-3, 3, 4).bfloat16()
    for columns in (1, 31, 64, 65, 201):
        seen = window(rows, columns, columns - 1)
        check(make(rows, 4, columns, 64, torch.bfloat16, kv_heads=1), seen, device, sinks, slices=slices)


@pytest.mark.parametrize("size", [None, 1, 64, 100])
@pytest.mark.parametrize("slices", [1, 3])
def test_windows_at_the_borders_of_blocks_and_slices(
    size: int | None, slices: int | None, device: torch.device
) -> None:
    for column in (0, 63, 64, 127, 128, 191, 192, 299):
        tensors = make(1, 8, 300, 64, torch.bfloat16, kv_heads=1)
        check(tensors, window(1, 300, column, size), device, slices=slices)


@pytest.mark.parametrize("slices", [1, 4])
def test_rows_that_see_nothing(slices: int, device: torch.device) -> None:
    """Are zeros, and change nothing of the others."""
    seen = window(3, 200, 150)
    seen[1] = False
    for sinks in (None, torch.zeros(8)):
        found = check(make(3, 4, 200, 64, torch.float32), seen, device, sinks, slices=slices)
        assert not found[1].any()


@pytest.mark.parametrize("slices", [1, 3])
def test_softcap(slices: int, device: torch.device) -> None:
    query, key, value = make(2, 4, 150, 64, torch.float32)
    for softcap in (
        5.0,
        1e4,
    ):  # with the second, scores are a ten thousandth of it: its tanh must be as exact as they are
        check([query * 8, key, value], window(2, 150, 140), device, torch.ones(8), softcap=softcap, slices=slices)


@pytest.mark.parametrize("slices", [1, 4])
def test_large_scores_and_sinks(slices: int, device: torch.device) -> None:
    """Far beyond what exp takes, growing and falling from slice to slice."""
    query, key, value = make(1, 4, 256, 64, torch.float32)
    for factor in (torch.linspace(1, 60, 256), torch.linspace(60, 1, 256)):
        for sinks in (None, torch.tensor([-1e4, -50.0, 0, 20, 90, 200, 300, 1e4])):
            check([query, key * factor[:, None], value], window(1, 256, 255), device, sinks, slices=slices)


def test_what_the_mask_adds_is_added(device: torch.device) -> None:
    """Numbers too, not only what hides."""
    query, key, value = make(2, 4, 90, 64, torch.float32)
    mask = torch.randn(2, 1, 1, 90, generator=torch.Generator().manual_seed(3)) * 3
    wanted = exact(query, key, value, mask, None, 0.1)
    found = attend(*(x.to(device) for x in (query, key, value, mask)), None, 0.1)
    assert error(found, wanted) <= 1e-6


@pytest.mark.parametrize("dtype", attention.DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "sinks"])
def test_no_less_exact_than_transformers(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Its own in the same type. In float32 both err by the order of sums alone, and either may be ahead."""
    module = SimpleNamespace(num_key_value_groups=8, training=False, sinks=None)
    eager = modeling_mixtral.eager_attention_forward
    if kind == "sinks":
        module.sinks = torch.randn(16, generator=torch.Generator().manual_seed(5)).to(dtype)
        eager = modeling_gpt_oss.eager_attention_forward
    for column in (5, 100, 255):
        query, key, value = make(2, 8, 256, 64, dtype)
        mask = hide(window(2, 256, column, 128)).clamp(min=LEAST[dtype]).to(dtype)
        wanted = exact(query, key, value, hide(window(2, 256, column, 128)), module.sinks, 0.125)
        theirs = error(eager(module, query, key, value, mask, scaling=0.125)[0], wanted)
        on = [x if x is None else x.to(device) for x in (query, key, value, mask, module.sinks)]
        assert error(attend(*on, 0.125), wanted) <= theirs * (2 if dtype == torch.float32 else 1)


def test_other_strides(device: torch.device) -> None:
    """Of a mask that all rows share, of widths that are not beside each other."""
    query, key, value = (x.to(device) for x in make(2, 4, 90, 64, torch.float32))
    mask = hide(window(1, 90, 70)).clamp(min=LEAST[torch.float32]).to(device)
    wanted = attend(query, key, value, mask.expand(2, -1, -1, -1).contiguous(), None, 0.1)
    found = attend(query.mT.contiguous().mT, key.mT.contiguous().mT, value, mask.expand(2, -1, -1, -1), None, 0.1)
    assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("slices", [1, 3])
def test_numbers_that_are_none_are_seen(slices: int, device: torch.device) -> None:
    query, key, value = (x.to(device) for x in make(1, 4, 200, 64, torch.float32))
    mask = torch.zeros(1, 1, 1, 200, device=device)
    for wrong in (torch.nan, torch.inf):
        sinks = torch.zeros(16, device=device)[::2]
        sinks[3] = wrong
        found = attend(query, key, value, mask, sinks, 0.1, slices=slices)[0, 0].isnan().all(-1)
        assert found.tolist() == [n == 3 for n in range(8)]


def test_refuses_what_does_not_fit() -> None:
    query, key, value = make(2, 4, 90, 64, torch.float32)
    mask = torch.zeros(2, 1, 1, 90)
    for wrong in (
        [query, key, value, mask[..., 1:], None],
        [query, key, value[:1], mask, None],
        [query[:, :7], key, value, mask, None],
        [query, key, value, mask, torch.zeros(7)],
        [query.expand(-1, -1, 2, -1), key, value, mask, None],
        [query[:0], key[:0], value[:0], mask[:0], None],
        [query, key[:, :, :0], value[:, :, :0], mask[..., :0], None],
    ):
        with pytest.raises(ValueError, match=r"do not fit: expected \(B, H, 1, W\)"):
            attend(*wrong, 0.1)
    with pytest.raises(ValueError, match=r"torch.float32, torch.float16 and torch.float32 are not"):
        attend(query, key.half(), value, mask, None, 0.1)
    with pytest.raises(ValueError, match=r"heads of 257 and 64, at most 256"):
        attend(query[..., :1].expand(-1, -1, -1, 257), key[..., :1].expand(-1, -1, -1, 257), value, mask, None, 0.1)
    with pytest.raises(ValueError, match="130 heads for 2 of keys, at most 64"):
        attend(query[:, :1].expand(-1, 130, -1, -1), key, value, mask, None, 0.1)
