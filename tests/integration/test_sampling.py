"""Sampling on fixed tensors: bit for bit the scores, random numbers and tokens of transformers' loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from freetoken.integration.sampling import Sampler, sampler_key, unknown

B, T, V, STEPS = 3, 5, 40, 12
ENDS = torch.tensor([2, 7])


def takes_tensors() -> bool:
    """Older versions of transformers count padding too, and all tokens of a prompt must have logits."""
    try:
        RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=torch.tensor([1]))
    except ValueError:
        return False
    return True


PADDING = torch.tensor([2, 0, 4]) if takes_tensors() else 2
HIGHEST = V + 3 if takes_tensors() else V
CASES: dict[str, list[Any]] = {
    "nothing": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "the usual": [TemperatureLogitsWarper(1.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8)],
    "min_p": [MinPLogitsWarper(0.1, min_tokens_to_keep=2)],
    "others": [TypicalLogitsWarper(0.9), EpsilonLogitsWarper(0.01), LogitNormalization()],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.5)],
    "penalty behind padding": [RepetitionPenaltyLogitsProcessor(0.6, prompt_ignore_length=PADDING)],
    "penalty without a prompt": [RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=T)],
    "lengths": [MinLengthLogitsProcessor(9, ENDS), MinNewTokensLengthLogitsProcessor(T, 6, torch.tensor([3]))],
    "suppressed": [InfNanRemoveLogitsProcessor(), SuppressTokensLogitsProcessor([4, 5, 6])],
    "all": [
        RepetitionPenaltyLogitsProcessor(1.2), MinLengthLogitsProcessor(8, ENDS), TemperatureLogitsWarper(1.3),
        TopKLogitsWarper(20),
    ],
}  # fmt: skip


def theirs(processors: list[Any], logits: torch.Tensor, ids: torch.Tensor, sampled: bool, pad: int) -> torch.Tensor:
    """What transformers' loop does, with end of text."""
    going = torch.ones(B, dtype=torch.int64)
    for one in logits:
        scores = LogitsProcessorList(processors)(ids, one.clone())
        tokens = torch.multinomial(torch.softmax(scores, -1), 1).squeeze(1) if sampled else scores.argmax(-1)
        tokens = tokens * going + pad * (1 - going)
        ids = torch.cat([ids, tokens[:, None]], 1)
        going = going & ~torch.isin(tokens, ENDS)
    return ids[:, T:]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_tokens_of_transformers(name: str, sampled: bool) -> None:
    """Also when the same sampler begins another text, and the random numbers after both are the same."""
    processors = CASES[name]
    assert not unknown(processors)
    valid = torch.ones(B, dtype=torch.bool)
    sampler = Sampler(processors, V, valid, sampled=sampled, ends=ENDS.tolist(), pad=1)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(STEPS, B, V, generator=generator) * 2
        if name == "suppressed":
            logits[0, 0, :3], logits[3, :, 9] = torch.tensor([torch.nan, torch.inf, -torch.inf]), torch.nan
        ids = torch.randint(0, HIGHEST, (B, T), generator=generator)
        torch.manual_seed(seed)
        expected = theirs(processors, logits, ids, sampled, 1)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        valid.fill_(True)
        sampler.begin(ids, processors)
        found = torch.stack([sampler(one) for one in logits], 1)
        assert torch.equal(found, expected)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(valid, ~torch.isin(expected, ENDS).any(1))


def test_drawing_moves_the_random_numbers_as_a_choice_does() -> None:
    sampler = Sampler([], V, torch.ones(B, dtype=torch.bool), sampled=True, ends=[], pad=0)
    states = []
    for work in (lambda: sampler(torch.zeros(B, V)), sampler.draw):
        torch.manual_seed(3)
        work()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_keys_tell_what_a_sampler_keeps() -> None:
    def key(*processors: Any) -> Any:
        return sampler_key(processors)

    assert key(TopKLogitsWarper(3)) == key(TopKLogitsWarper(3)) != key(TopKLogitsWarper(4))
    assert key(TopPLogitsWarper(0.5)) != key(MinPLogitsWarper(0.5))
    one, other = (RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=n) for n in (1, 2))
    assert key(one) == key(other) != key(RepetitionPenaltyLogitsProcessor(1.25))
    assert key(MinLengthLogitsProcessor(3, ENDS)) == key(MinLengthLogitsProcessor(5, ENDS))
    assert key(MinLengthLogitsProcessor(3, ENDS)) != key(MinLengthLogitsProcessor(3, torch.tensor([4])))
    assert key(SuppressTokensLogitsProcessor([4])) != key(SuppressTokensLogitsProcessor([5]))


def test_processors_that_may_do_anything() -> None:
    class Mine(TemperatureLogitsWarper):  # type: ignore[misc]
        pass

    given = [TemperatureLogitsWarper(0.5), Mine(0.5), NoRepeatNGramLogitsProcessor(2)]
    assert unknown(given) == ["Mine", "NoRepeatNGramLogitsProcessor"]
