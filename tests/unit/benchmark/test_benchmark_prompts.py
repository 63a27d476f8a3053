"""Random prompts of a wanted length."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_turing.benchmark_prompts import TOLERANCE, WORDS, LengthError, make, steer


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(200, 20000),
    rate=st.floats(0.8, 4.0),
    frame=st.integers(0, 40),
    seed=st.integers(),
)
def test_the_length_is_met_with_any_tokenizer(
    tokens: int, rate: float, frame: int, seed: int
) -> None:
    def count(text: str) -> int:
        return frame + round(len(text.split()) * rate)

    text, found = steer(tokens, count, random.Random(seed))
    assert count(text) == found
    assert abs(found - tokens) <= max(2, round(tokens * TOLERANCE))


def test_no_prompt_shares_even_its_first_block_with_another() -> None:
    rng = random.Random(1)
    starts = {make(50, rng)[:16] for _ in range(500)}
    assert len(starts) == 500
    assert re.match(r"[0-9a-f]{64} \w", make(50, rng))


def test_words_are_many_and_different() -> None:
    assert len(set(WORDS)) == len(WORDS) > 150


def test_too_short_a_prompt_is_refused() -> None:
    with pytest.raises(LengthError, match="too short"):
        steer(5, lambda text: len(text), random.Random(1))


def test_a_tokenizer_that_answers_nonsense_is_told() -> None:
    answers = iter([10, *[99999] * 20])
    with pytest.raises(LengthError, match="99999"):
        steer(500, lambda text: next(answers), random.Random(1))
