"""Steps on a fixed cache: the logits that transformers' own cache gives, for every kind of attention that is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from freetoken.integration.fixed_cache import FixedForward, cache_argument, why_not_copied, why_not_fixed
from tests.integration.test_families import LOADS
from tests.support.families import find_decorated, make_config, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 6
PROMPT = 11
VOCABULARY = 60
TAKEN = {
    "afmoe": "sliding_window",
    "deepseek_v3": "",
    "gemma4_text": "sliding_window",
    "glm4_moe": "",
    "gpt_oss": "sliding_window",
    "granitemoe_swa": "sliding_window",
    "minimax_m2": "",
    "mixtral": "sliding_window",
    "olmoe": "",
    "phimoe": "sliding_window",
    "qwen2_moe": "",
    "qwen3_moe": "",
}  # family -> which field of its config makes a window
REFUSED = {
    "aria_text": "does not say",
    "deepseek_v32": "_attention",
    "granitemoehybrid": "linear_attention",
    "lfm2_moe": "conv",
    "qwen3_next": "linear_attention",
}


def family(name: str, **changes: Any) -> Any:
    if name not in find_decorated():
        pytest.skip(f"this version of transformers has no {name}")
    return make_model(make_config(name, LOADS[name] | changes))


def padded_prompt(on: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three of different lengths, their mask and positions."""
    ids = torch.randint(3, VOCABULARY, (3, PROMPT), generator=torch.Generator().manual_seed(1)).to(on)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :1] = 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def check_steps(model: Any, steps: int, length: int, grown: int = 0) -> None:
    """Prompts, then steps of random tokens, with both caches. length: that steps see; grown: that it becomes midway."""
    name = cache_argument(model)
    ids, mask, positions = padded_prompt(model.device)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache})
    fixed = FixedForward(model, 4, length)
    fixed.begin(caches[1], mask, positions[:, -1:], PROMPT)
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        if grown and step == steps // 2:
            length = grown
            assert fixed.grow(grown)
        tokens = torch.randint(3, VOCABULARY, (3,), generator=generator).to(model.device)
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        positions = positions[:, -1:] + 1
        given = {name: caches[0], "attention_mask": mask, "position_ids": positions, "use_cache": True}
        expected = model(input_ids=tokens[:, None], **given).logits[:, -1]
        fixed.feed(tokens)
        fixed.forward(4, length)
        assert (fixed.logits[:3] - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", TAKEN)
def test_the_logits_of_a_dynamic_cache(name: str) -> None:
    """With padding on the left, beyond the window, and a row that is no sequence."""
    model = family(name, **({TAKEN[name]: WINDOW} if TAKEN[name] else {}))
    assert why_not_fixed(model) is None
    check_steps(model, 10, PROMPT + 10)


def test_growing_keeps_what_is_there() -> None:
    check_steps(family("gpt_oss", sliding_window=WINDOW), 8, PROMPT + 5, grown=PROMPT + 20)


def test_what_an_earlier_text_left_is_not_read() -> None:
    """Not even if it is no number: hidden values are multiplied by zero."""
    model = family("mixtral", sliding_window=WINDOW)
    name = cache_argument(model)
    fixed = FixedForward(model, 2, 32)
    found = []
    with torch.no_grad():
        for poison in (False, True):
            if poison:
                for memory in fixed._memories:
                    for tensor in memory.tensors:
                        tensor.fill_(torch.nan)
            ids = torch.arange(5, 13)[None]
            cache = DynamicCache(config=model.config)
            model(input_ids=ids, use_cache=True, **{name: cache})
            fixed.begin(cache, None, torch.tensor([[7]]), 8)
            fixed.feed(torch.tensor([9]))
            fixed.forward(1, 32)
            found.append(fixed.logits[:1].clone())
    assert torch.equal(*found) and not found[0].isnan().any()


def test_memory_made_in_inference_mode_is_used_outside() -> None:
    model = family("qwen3_moe")
    with torch.inference_mode():
        fixed = FixedForward(model, 1, 8)
        fixed.restart(1)
        fixed.forward(1, 8)
    with torch.no_grad():
        fixed.feed(torch.tensor([3]))
        fixed.forward(1, 8)
    assert fixed.column.item() == 1


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_have_other_caches(name: str) -> None:
    why = why_not_fixed(family(name))
    assert why is not None and REFUSED[name] in why


def test_attentions_and_caches_that_are_not_taken() -> None:
    model = family("qwen3_moe")
    model.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in (why_not_fixed(model) or "")
    assert why_not_copied(DynamicCache(config=model.config)) is None
    assert "dict" in (why_not_copied({}) or "")
