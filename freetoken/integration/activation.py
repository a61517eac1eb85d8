"""Which gated activation an experts module applies: candidates from its attributes, decided by trying them.

A module's own `_apply_gate` is run on a grid of numbers and must agree with one of the kernels' activations.
Reading class names would be wrong for every family that changes its activation under the same name.
"""

from __future__ import annotations

import torch

from freetoken.errors import UnsupportedError
from freetoken.executor import Activation
from freetoken.kernels.reference import activate


def find_activation(module: torch.nn.Module) -> Activation:
    """The module's activation; raises `UnsupportedError` naming its class when no kernel has it."""
    name = type(module).__name__
    if not getattr(module, "has_gate", True):
        raise UnsupportedError(f"{name}: experts without a gate are not supported", feature=name)
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError(f"{name}: a norm after each expert is not supported", feature=name)
    with torch.no_grad(), torch.device("cpu"):  # the loader may be building on meta
        gate = torch.cat([torch.linspace(-60, 60, 481), torch.tensor([-500.0, 500.0])]).double()
        up = gate.flip(0) * 0.75 + 0.125
        interleaved = not getattr(module, "is_concatenated", True)
        both = torch.stack([gate, up], -1).flatten() if interleaved else torch.cat([gate, up])
        actual = module._apply_gate(both[None])[0].double()  # type: ignore[operator]
    for candidate in _candidates(module):
        expected = activate(gate.numpy(), up.numpy(), candidate.kind, candidate.alpha, candidate.limit)
        if torch.allclose(actual, torch.from_numpy(expected), rtol=1e-6, atol=1e-9):
            return candidate
    act = getattr(module, "act_fn", None)
    raise UnsupportedError(
        f"{name} applies an activation that no kernel has (act_fn {type(act).__name__}); "
        "supported: silu(gate) * up and gpt-oss's clamped swiglu",
        feature=name,
        available="silu, swiglu_clamped",
    )


def _candidates(module: torch.nn.Module) -> list[Activation]:
    found = [Activation("silu")]
    alpha, limit = (getattr(module, n, getattr(module, f"swiglu_{n}", None)) for n in ("alpha", "limit"))
    if isinstance(alpha, (int, float)) and isinstance(limit, (int, float)):
        found.append(Activation("swiglu_clamped", float(alpha), float(limit)))
    return found
