"""The NumPy reference against torch in float64, written from the models' own definitions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

from freetoken import formats
from freetoken.formats.codes import bf16_to_fp32, fp32_to_bf16
from freetoken.formats.record import Expert, RecordLayout
from freetoken.kernels import reference
from tests.support.experts import make_bank, make_expert, make_routes

HIDDEN, INNER = 32, 64


def silu_mlp(expert: Expert, x: torch.Tensor) -> torch.Tensor:
    """Llama's: down(silu(gate(x)) * up(x))."""
    gate, up, down = (torch.from_numpy(m.format.dequantize64(m)) for m in (expert.gate, expert.up, expert.down))
    linear = torch.nn.functional.linear
    biases = [None if b is None else torch.from_numpy(b).double() for b in (expert.gate_bias, expert.up_bias)]
    hidden = torch.nn.functional.silu(linear(x, gate, biases[0])) * linear(x, up, biases[1])
    return linear(hidden, down, None if expert.down_bias is None else torch.from_numpy(expert.down_bias).double())


def gpt_oss_mlp(expert: Expert, x: torch.Tensor) -> torch.Tensor:
    """gpt-oss's, as `GptOssExperts` writes it, with its constants."""
    gate_w, up_w, down_w = (torch.from_numpy(m.format.dequantize64(m)) for m in (expert.gate, expert.up, expert.down))
    gate_b, up_b, down_b = (torch.from_numpy(b).double() for b in (expert.gate_bias, expert.up_bias, expert.down_bias))
    gate, up = x @ gate_w.T + gate_b, x @ up_w.T + up_b
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return ((up + 1) * (gate * torch.sigmoid(gate * 1.702))) @ down_w.T + down_b


def inputs(n: int, size: float = 1.0) -> NDArray[np.float64]:
    return np.random.default_rng(n).standard_normal((n, HIDDEN)) * size


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", formats.names())
def test_silu(name: str, bias: bool) -> None:
    expert = make_expert(formats.get(name), HIDDEN, INNER, bias=bias)
    x = inputs(5)
    wanted = silu_mlp(expert, torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(reference.run_expert(expert, x), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("name", formats.names())
def test_gpt_oss(name: str, size: float) -> None:
    """The larger inputs reach the clamps on both sides."""
    expert = make_expert(formats.get(name), HIDDEN, INNER, bias=True)
    x = inputs(5, size)
    wanted = gpt_oss_mlp(expert, torch.from_numpy(x)).numpy()
    out = reference.run_expert(expert, x, "swiglu_clamped", 1.702, 7.0)
    np.testing.assert_allclose(out, wanted, rtol=1e-11, atol=1e-12)


def test_silu_limited_is_deepseek_v4s() -> None:
    """`DeepseekV4Experts._apply_gate` itself, on inputs on both sides of every limit."""
    experts = SimpleNamespace(limit=10.0, act_fn=torch.nn.functional.silu)
    gate, up = (np.random.default_rng(i).standard_normal((7, 40)) * 12 for i in (0, 1))
    gate[0, :4], up[0, :4] = [10, -10, 1e4, -1e4], [-10, 10, -1e4, 1e4]
    wanted = DeepseekV4Experts._apply_gate(experts, torch.from_numpy(np.concatenate([gate, up], axis=1)))
    out = reference.activate(gate, up, "silu_limited", 0, 10.0)
    np.testing.assert_allclose(out, wanted.numpy(), rtol=1e-14, atol=0)


def test_activations_do_not_overflow() -> None:
    gate = np.array([-1e4, 1e4, 0.0])
    np.testing.assert_array_equal(reference.activate(gate, np.ones(3), "silu", 0, 0), [0, 1e4, 0])
    np.testing.assert_array_equal(reference.activate(gate, np.ones(3), "swiglu_clamped", 1.0, 800.0), [0, 1600, 0])


def test_layer_adds_up_weighted_routes() -> None:
    layout = RecordLayout(formats.get("bf16"), HIDDEN, INNER, bias=True)
    bank = make_bank(layout, 3)
    x = inputs(4).astype(np.float32)
    ids, weights = make_routes(4, 2, 3)
    ids[1] = [2, 2]  # one expert twice
    ids[2] = [-1, 0]  # one route to nowhere
    ids[3] = [3, -5]  # both
    wanted = torch.zeros(4, HIDDEN, dtype=torch.float64)
    for b in range(4):
        for e, weight in zip(ids[b], weights[b], strict=True):
            if 0 <= e < 3:
                wanted[b] += float(weight) * silu_mlp(layout.unpack(bank[e]), torch.from_numpy(x[b]).double())
    out = reference.run_layer(bank, layout, x, ids, weights)
    np.testing.assert_allclose(out, wanted.numpy(), rtol=1e-11, atol=1e-12)
    assert not out[3].any()


def test_layer_takes_bf16_bits() -> None:
    layout = RecordLayout(formats.get("bf16"), HIDDEN, INNER)
    bank, routes = make_bank(layout, 3), make_routes(4, 2, 3)
    bits = fp32_to_bf16(inputs(4).astype(np.float32))
    out = reference.run_layer(bank, layout, bits, *routes)
    np.testing.assert_array_equal(out, reference.run_layer(bank, layout, bf16_to_fp32(bits), *routes))


def test_rounding_meets_x_and_the_hidden_values() -> None:
    expert, x = make_expert(formats.get("bf16"), HIDDEN, INNER), inputs(5)
    gate, up, down = (m.format.dequantize64(m).T for m in (expert.gate, expert.up, expert.down))
    for rounding, to in (("none", np.asarray), ("bf16", reference.round_bf16), ("fp8", reference.round_fp8)):
        hidden = reference.activate(to(x) @ gate, to(x) @ up, "silu", 0, 0)
        np.testing.assert_array_equal(reference.run_expert(expert, x, rounding=rounding), to(hidden) @ down)


def test_round_fp8() -> None:
    """One group by hand, then what is not a number, a short last group and no rows."""
    values = np.zeros((3, 130))
    values[0, :9] = [448, 17, 19, -21.5, 2.0**-9, 1.5 * 2.0**-9, 2.0**-10, 2.0**-6 + 2.0**-10, -1000 * 2.0**-20]
    values[0, 128:] = [1e-5, 2.0**-33]
    values[1, [3, 129]] = [np.nan, 1]
    values[2, [3, 129]] = [1, -np.inf]
    out = reference.round_fp8(values)
    # 2.0**-10 and 1.5 * 2.0**-9 are ties between subnormals; the floor of 1e-4 makes the last group's scale 2**-22
    np.testing.assert_array_equal(out[0, :9], [448, 16, 20, -22, 2.0**-9, 2.0**-8, 0, 2.0**-6, 0])
    np.testing.assert_array_equal(out[0, 128:], [5 * 2.0**-19, 0])
    assert np.isnan(out[1, :128]).all() and out[1, 129] == 1
    assert out[2, 3] == 1 and np.isnan(out[2, 128:]).all()
    assert reference.round_fp8(np.zeros((0, 130))).shape == (0, 130)


def test_round_bf16() -> None:
    values = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -3.0e38])
    wanted = torch.from_numpy(values).float().bfloat16().double().numpy()
    np.testing.assert_array_equal(reference.round_bf16(values), wanted)
    np.testing.assert_array_equal(wanted[:3], [1, 1, 1 + 2.0**-6])
