"""The hash against the same arithmetic on Python's numbers, which do not wrap by themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freetoken.rows import NgramHash
from freetoken.rows.ngrams import primes_above, splitmix64

END = 7


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def look_up_plainly(ngrams: NgramHash, tokens: list[int]) -> list[list[int]]:
    """Rows of each token of a text, one by one."""
    m0, m1, m2 = ngrams.multipliers
    text = [ngrams.end, ngrams.end, *tokens]
    found = []
    for at in range(2, len(text)):
        p2, p1, t = text[at - 2 : at + 1]
        if p1 == ngrams.end:
            p2 = ngrams.end
        bigram = signed(t * m0) ^ signed(p1 * m1)
        trigram = bigram ^ signed(p2 * m2)
        heads = len(ngrams.sizes)
        firsts = [sum(ngrams.sizes[:head]) for head in range(heads)]
        found.append([
            first + (bigram if head < heads // 2 else trigram) % ngrams.sizes[head] for head, first in enumerate(firsts)
        ])  # fmt: skip
    return found


def test_the_published_numbers() -> None:
    """16 successive primes; their sum, filled up to whole rows of 128 shards, is the number of rows of the family."""
    ngrams = NgramHash.published(layer=3, end=END)
    assert ngrams.sizes[0] == 20_000_003
    assert len(ngrams.sizes) == 16
    assert ngrams.rows == 320_001_446
    assert -(-ngrams.rows // 128) == 2_500_012
    assert ngrams.multipliers == tuple(map(signed, splitmix64(1234 + 10007 * 3, 3)))
    assert NgramHash.published(layer=4, end=END).multipliers != ngrams.multipliers


def test_splitmix64() -> None:
    """The numbers that its implementations in many languages are tested with."""
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_primes() -> None:
    assert primes_above(0, 6) == [2, 3, 5, 7, 11, 13]
    assert primes_above(13, 2) == [17, 19]
    assert primes_above(20_000_000, 2) == [20_000_003, 20_000_023]


@pytest.mark.parametrize("heads", [2, 16])
@pytest.mark.parametrize("layer", range(4))
def test_against_plain_arithmetic(layer: int, heads: int) -> None:
    ngrams = NgramHash.published(layer, END, heads)
    rng = np.random.default_rng(layer)
    tokens = rng.integers(0, 250_000, 400)
    tokens[rng.random(400) < 0.2] = END
    found = ngrams.look_up(tokens, ngrams.start())
    assert found.tolist() == look_up_plainly(ngrams, tokens.tolist())
    assert found.min() >= 0
    firsts = np.cumsum([0, *ngrams.sizes])
    assert ((found >= firsts[:-1]) & (found < firsts[1:])).all()


def test_token_by_token_and_in_a_batch() -> None:
    ngrams = NgramHash.published(0, END, above=100)
    tokens = np.random.default_rng(1).integers(0, 20, (3, 50))
    whole = ngrams.look_up(tokens, ngrams.start(3))
    previous = ngrams.start(3)
    for at in range(50):
        one = tokens[:, at : at + 1]
        np.testing.assert_array_equal(ngrams.look_up(one, previous), whole[:, at : at + 1])
        previous = np.concatenate([previous, one], axis=1)[:, -2:]


def test_what_was_before_the_end_of_a_text_counts_for_nothing() -> None:
    ngrams = NgramHash.published(0, END)
    first, second = (ngrams.look_up(np.array([before, END, 11, 12]), ngrams.start()) for before in (1, 2))
    assert (first[0] != second[0]).any()
    np.testing.assert_array_equal(first[2:], second[2:])
    np.testing.assert_array_equal(first[2:], ngrams.look_up(np.array([11, 12]), ngrams.start()))


def test_tensors_give_the_same() -> None:
    ngrams = NgramHash.published(5, END)
    t, p1, p2 = np.random.default_rng(2).integers(0, 2**31, (3, 1000))
    p1[::3] = END
    expected = np.stack(ngrams.heads(t, p1, p2))
    found = torch.stack(ngrams.heads(*map(torch.from_numpy, (t, p1, p2))))
    np.testing.assert_array_equal(found.numpy(), expected)
