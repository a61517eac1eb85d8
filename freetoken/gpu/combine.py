"""The weighted sum of a token's routes and of their shards."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.gpu.tiles import narrow

_WIDTH = 1024
"""Columns of a program."""


def combine(y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, n_experts: int, out: torch.Tensor) -> None:
    """out (B, H): sum over k, in that order, of weights[:, k] times the sum of the shards' rows; added in float32.

    y: (S, B * K, H) float32 of S shards. ids: (B, K) integer; routes of ids outside [0, n_experts) add nothing,
    whatever lies in y or weights there. weights: (B, K) floating.
    """
    shards, routes, hidden = y.shape
    tokens, k = ids.shape
    if routes != tokens * k or weights.shape != ids.shape or out.shape != (tokens, hidden):
        raise ValueError(
            f"y {tuple(y.shape)}, ids {tuple(ids.shape)}, weights {tuple(weights.shape)} and out {tuple(out.shape)} "
            "do not fit: expected (S, B * K, H), (B, K), (B, K) and (B, H)"
        )
    for name, tensor in {"y": y, "ids": ids, "weights": weights, "out": out}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")
    if tokens:
        grid = (tokens, triton.cdiv(hidden, _WIDTH))
        add_routes[grid](y, ids, weights, out, n_experts, y.stride(0), hidden, S=shards, K=k, WIDTH=_WIDTH, num_warps=4)


@triton.jit
def add_routes(
    y, ids, weights, out, n_experts, shard_step, hidden, S: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr
):
    """WIDTH columns of token program_id(0)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for k in tl.static_range(K):
        route = token * K + k
        expert = tl.load(ids + route)
        if (expert >= 0) & (expert < n_experts):
            value = tl.zeros((WIDTH,), tl.float32)
            row = y + route * hidden
            for _ in tl.static_range(S):
                value += tl.load(row + column, mask=column < hidden, other=0.0)
                row += shard_step
            total += tl.load(weights + route).to(tl.float32) * value
    tl.store(out + token * hidden + column, narrow(total, out.dtype.element_ty), mask=column < hidden)
