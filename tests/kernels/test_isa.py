"""Levels and the tables of tile functions."""

from __future__ import annotations

import pytest
import torch

from freetoken import formats
from freetoken.executor import kernel_choices
from freetoken.kernels._isa import ACTIVATIONS, LEVELS, TileKernel, available_levels
from tests.support.experts import table


def test_levels_are_ordered() -> None:
    assert LEVELS == ("scalar", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx")


def test_available_levels_are_the_lowest() -> None:
    available = available_levels()
    assert len(available) >= 1
    assert available == LEVELS[: len(available)]


@pytest.mark.parametrize("name", formats.names())
def test_table_of_a_format(name: str) -> None:
    kernels = table(formats.get(name))
    pairs = [(kernel.act, kernel.level) for kernel in kernels]
    assert len(set(pairs)) == len(pairs)
    assert all(kernel.act in ACTIVATIONS and kernel.level in LEVELS for kernel in kernels)
    ranks = [LEVELS.index(kernel.level) for kernel in kernels]
    assert ranks == sorted(ranks), "the scalar definition comes first"
    assert ("fp32", "scalar") in pairs
    if name not in ("bf16", "fp8_block"):
        assert ("int8", "scalar") in pairs
    # what is chosen on a lower level exists there: a kind of activation has a version of its own from some level up
    for act in {act for act, _ in pairs} - {"bf16"}:
        assert (act, "scalar") in pairs


@pytest.mark.parametrize("name", formats.names())
def test_the_tile_that_auto_takes_decodes_once_for_several_vectors(name: str) -> None:
    """On the highest level, for a bf16 model; that it gives the same bits is test_experts.py's."""
    if "avx512bf16" not in available_levels():
        pytest.skip("this CPU has no avx512bf16")
    (choice, *_) = kernel_choices(formats.get(name), "auto", torch.bfloat16)
    assert choice.kernel.few


def test_a_tile_kernel_says_what_it_is() -> None:
    kernel = table(formats.get("bf16"))[0]
    assert repr(kernel) == "<tile bf16 fp32 scalar>"


def test_tile_kernels_are_not_made_by_hand() -> None:
    with pytest.raises(TypeError, match="listed by"):
        TileKernel()
